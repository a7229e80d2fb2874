"""DTensor, wherever this version of torch keeps it. It is not imported here: that takes half a second, and where nothing else has
imported it there is no DTensor."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_PACKAGES = ("torch.distributed.tensor", "torch.distributed._tensor")  # the second one before torch 2.5
_types: tuple[type[DTensor], ...] = ()


def dtensor_types() -> tuple[type[DTensor], ...]:
    """The class alone; nothing if no object of this process can be one."""
    global _types
    if not _types:
        _types = tuple({kind for name in _PACKAGES if (kind := getattr(sys.modules.get(name), "DTensor", None)) is not None})
    return _types


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _types or dtensor_types())


def placement_types() -> ModuleType:
    """The module of ``Shard`` and ``Replicate``; to be asked for where there is a DTensor."""
    return next(sys.modules[f"{name}.placement_types"] for name in _PACKAGES if f"{name}.placement_types" in sys.modules)
