"""Arithmetic on checkpoints: tensors that are computed from those of several, streamed through the pipeline of conversions."""
