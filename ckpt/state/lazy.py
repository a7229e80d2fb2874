"""torch, for modules that a process without it runs, too: imported when something is done with tensors.

A value can be one of torch's objects only where somebody has imported torch. Before that each class here is ``()``, of which nothing is
an instance.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckpt.needs import require_torch

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
    from torch.nn import Module as Module
    from torch.nn import Parameter as Parameter
    from torch.optim import Optimizer as Optimizer

    imported: bool
    """Whether somebody has imported torch."""
    PLAIN: frozenset[type]
    """Classes of nearly all tensors of a state: no function needs to be asked about these."""
    RAW: dict[int, torch.dtype]
    """A dtype of each item size that every operation supports: bytes are moved as these, so exotic dtypes need no kernels."""

_BEFORE = {"imported": False, "PLAIN": frozenset[type](), **dict.fromkeys(("Tensor", "Parameter", "Module", "Optimizer", "DeviceMesh"), ())}
_WITH = ("torch", "RAW")
"""Names that import torch."""


def __getattr__(name: str) -> Any:
    """Asked until torch is there, and once then: what is found stays among the names of this module."""
    if name not in _BEFORE and name not in _WITH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    present = sys.modules.get("torch")
    if name in _BEFORE and (present is None or getattr(present.__spec__, "_initializing", False)):  # another thread may be importing it
        return _BEFORE[name]
    require_torch("a tensor")
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    globals().update(
        imported=True,
        torch=torch,
        Tensor=torch.Tensor,
        Parameter=torch.nn.Parameter,
        Module=torch.nn.Module,
        Optimizer=torch.optim.Optimizer,
        DeviceMesh=DeviceMesh,
        PLAIN=frozenset({torch.Tensor, torch.nn.Parameter}),
        RAW={1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128},
    )
    return globals()[name]
