"""From a state to a committed checkpoint: capture, staging, writing, commit."""
