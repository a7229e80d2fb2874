"""DTensor. It is not imported here: that takes half a second, and where nothing else has imported it there is no DTensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_types: tuple[type[DTensor], ...] = ()


def dtensor_types() -> tuple[type[DTensor], ...]:
    """The class alone; nothing if no object of this process can be one."""
    global _types
    if not _types:
        _types = (kind,) if (kind := getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)) is not None else ()
    return _types


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _types or dtensor_types())
