"""Checkpoints of ``torch.distributed.checkpoint``: ``.metadata`` and data files of ``torch.save`` archives."""
