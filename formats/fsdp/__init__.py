"""Directories with one ``torch.save`` file per rank: sharded and local state dicts of FSDP, dictionaries of DTensors."""
