"""Objects of DeepSpeed that no state can hold, recognised without importing it.

ZeRO trains partitions of its own. Stage 3 leaves empty parameters in the module between steps; after a step of stages 1 and 2 the
parameters are what the partitions say, whatever was loaded into them. ``deepspeed.initialize`` marks the parameters: ``_hp_mapping``
(stages 1 and 2, BF16_Optimizer), ``ds_shape`` (``zero.Init``, stage 3), ``_z3_optimizer`` (stage 3). Source: DeepSpeed 0.19.8.
"""

from __future__ import annotations

import torch

from ckpt.errors import StateError

_HINT = (
    "save with engine.save_checkpoint(folder) and resume with engine.load_checkpoint(folder); ckpt.open, ckpt.load and ckpt convert read "
    'what it writes. With ZeRO stage 0 the state is {"model": engine.module, "optimizer": engine.optimizer}'
)
_KINDS = {"DeepSpeedEngine": "an engine of DeepSpeed", "ZeROOptimizer": "an optimizer of DeepSpeed's ZeRO"}


def refuse_partitioned(tensor: torch.Tensor, name: str) -> None:
    partitioned = hasattr(tensor, "ds_shape") and tensor.ds_shape != tensor.shape
    if partitioned or hasattr(tensor, "_hp_mapping") or hasattr(tensor, "_z3_optimizer"):
        what = "the parameter is one of DeepSpeed's ZeRO, which keeps the values in partitions of its own"
        raise StateError(what, where=f"tensor {name}", hint=_HINT)


def refuse_zero(value: object, path: str) -> None:
    for kind in type(value).__mro__:
        if kind.__name__ in _KINDS and kind.__module__.startswith("deepspeed."):
            raise StateError(f"{_KINDS[kind.__name__]} cannot be part of a state", where=path, hint=_HINT)
