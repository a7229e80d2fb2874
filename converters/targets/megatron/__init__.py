"""Conversion into Megatron-LM's format ``torch``: which rank has what, its arguments and its optimizer."""
