"""Exports: the model of a running job as safetensors files, written by all of its ranks at once."""
