"""Runs at rest: which steps there are, copies of them, and what killed saves left behind. No torch."""
