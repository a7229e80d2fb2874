"""Checkpoint formats: bytes in, catalogs out. Never imports torch."""
