"""Two checkpoints compared, and the parts of one checkpoint with each other. No torch."""
