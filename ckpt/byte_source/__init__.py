"""Where the bytes of chunks come from, and the one way to read and verify them."""
