"""The formats that a checkpoint can be converted to, one module each."""
