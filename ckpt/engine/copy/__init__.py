"""Copies of checkpoints: bytes from one storage to another, as they are. No torch."""
