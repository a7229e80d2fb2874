"""Delta files: exports that hold only the elements that changed since the export before them (docs/formats.md)."""
