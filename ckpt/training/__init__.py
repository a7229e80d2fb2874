"""The training loop's face: when to save, what to keep, where to resume, and the tiers between."""
