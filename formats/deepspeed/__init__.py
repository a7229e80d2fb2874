"""Checkpoints that DeepSpeed writes: ZeRO-1, 2 and 3, pipelines, experts, and universal directories."""
