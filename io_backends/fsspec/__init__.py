"""Any storage that has an fsspec file system."""
