"""Codecs of chunks (docs/format.md §10)."""
