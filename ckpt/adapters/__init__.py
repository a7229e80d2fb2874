"""From live PyTorch objects to named boxes of memory, and back. The only part of the package, beside the engine, that touches tensors."""
