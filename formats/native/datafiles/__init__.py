"""Data files: their headers, and where chunks lie in them (docs/format.md §6)."""
