"""Dry runs: a load or a save as far as its plan, and a report of what it would move."""
