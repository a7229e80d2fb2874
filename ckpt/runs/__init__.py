"""Runs of a training job: when to save and where, which steps there are, what to keep, and what is reported of it."""
