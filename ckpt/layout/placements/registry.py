"""The splits there are, by name. Layouts travel between ranks as JSON that names them, and DTensors' placements are read as these."""

from __future__ import annotations

from typing import Any

from ckpt.errors import LayoutError

from .base import DTensorAxis, Split
from .boxes import Boxes, StatedBoxes
from .flat import Flat
from .interleaved import Interleaved
from .shard import Shard

SPLITS: dict[str, type[Split]] = {cls.__name__: cls for cls in (Shard, Interleaved, Flat, Boxes, StatedBoxes)}
"""A new split is one more entry."""


def split_from_json(data: Any) -> Split:
    """The split that :meth:`~.base.Split.to_json` wrote."""
    kind, *values = data
    if kind not in SPLITS:
        raise LayoutError(
            f"a layout names the split {kind!r}, which this process does not know",
            hint=f"it knows {', '.join(SPLITS)}; give all ranks the same",
        )
    return SPLITS[kind](*map(_tuples, values))


def split_from_dtensor(placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
    """The split that a DTensor's placement stands for, and its position among ``axis.later``; None if no split knows it. The last of the
    registry is asked first: it may be a special case of one before."""
    answers = (cls.from_dtensor(placement, axis) for cls in reversed(SPLITS.values()))
    return next((answer for answer in answers if answer is not None), None)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
