"""Checkpoints of Megatron-LM and Megatron-Core."""
