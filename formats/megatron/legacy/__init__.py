"""Megatron-LM's format ``torch``: files of ranks."""
