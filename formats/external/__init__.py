"""What the readers of other people's formats share: their catalog, indexes of files, and how elements are read. No torch."""
