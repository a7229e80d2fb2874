"""What an export is given, what it reports, and what all of its phases on one rank have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.converters.mapping.convention import model_views
from ckpt.converters.select.selection import SelectOptions
from ckpt.converters.targets.hf_config import ModelConfig
from ckpt.coordination.call import Call
from ckpt.errors import UsageError
from ckpt.settings import limits


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What an export did. ``tensor_bytes`` and ``file_bytes`` are all ranks'; ``rank_bytes`` are those of tensors that this rank wrote, in
    ``writes`` calls, and ``sent_bytes`` those that it sent to other ranks. ``left_out`` are tensors of which nothing was exported.
    ``seconds`` of wall time."""

    url: str
    files: tuple[str, ...]
    tensors: int
    tensor_bytes: int
    file_bytes: int
    rank_bytes: int
    sent_bytes: int
    writes: int
    left_out: tuple[str, ...]
    seconds: float
    since: str | None = None
    """The export that this delta follows; None for a full one."""
    changed: int = 0
    """Elements that a delta has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What all ranks have to give alike; see ``export``."""

    names: str | None
    convention: str
    numbers: Mapping[str, int]
    only: Sequence[str]
    exclude: Sequence[str]
    root: str | None
    dtype: str | None
    shard_size: int | str | None
    overwrite: bool
    memory: int
    since: str | None
    anchor_every: int

    def selection(self, numbers: Mapping[str, int]) -> SelectOptions:
        """What of the state is taken; ``numbers`` of the model are these options' and those of its configuration."""
        return SelectOptions(
            views=None if self.names is None else model_views(self.names, self.convention, numbers),
            only=self.only,
            exclude=self.exclude,
            dtype=self.dtype,
            root=self.root,
        )

    def check(self) -> None:
        """Raise UsageError unless the numbers can be."""
        if self.memory < limits.LEAST_MEMORY:
            raise UsageError(f"{self.memory} bytes of memory are too few", hint=f"at least {limits.LEAST_MEMORY} (memory=)")
        if type(self.anchor_every) is not int or self.anchor_every < 1:
            raise UsageError(
                f"anchor_every is a whole number of at least 1, not {self.anchor_every!r}", hint="16; 1 writes full exports only"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportJob:
    """What all phases of one export on one rank have in common. ``began``: by ``time.perf_counter``."""

    call: Call
    options: ExportOptions
    config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None
    threads: int
    began: float
