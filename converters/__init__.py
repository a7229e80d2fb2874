"""Checkpoints of one format in another: pointed at (``importing``), translated (``translation``), converted (``converting``)."""
