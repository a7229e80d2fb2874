"""``mem://``: checkpoints in the memory of a machine, which outlive their trainers (``ckpt.memory``)."""
