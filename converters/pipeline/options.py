"""What a conversion is asked for, as one value that its parts hand on. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from ckpt.converters.select.selection import SelectOptions, Views
from ckpt.plan.match import several
from ckpt.settings import limits

from .parallel import MegatronParallel


class MergeKeywords(TypedDict, total=False):
    """Those fields of ``ConvertOptions`` that a merge of checkpoints takes too, as keywords of a call."""

    views: Views | None
    only: Sequence[str]
    exclude: Sequence[str]
    optimizer: bool
    dtype: str | None
    root: str | None
    skip: Sequence[str]
    shard_size: int | None
    memory: int
    threads: int | None
    overwrite: bool
    verify: bool
    config: str | os.PathLike[str] | None
    require_config: bool


class ConvertKeywords(MergeKeywords, total=False):
    """The fields of ``ConvertOptions`` as keywords of a call."""

    parallel: MegatronParallel | None
    repair: bool
    job: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """See ``converters.convert.convert``, which explains each of them."""

    views: Views | None = None
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    optimizer: bool = True
    dtype: str | None = None
    root: str | None = None
    skip: Sequence[str] = ()
    shard_size: int | None = None
    parallel: MegatronParallel | None = None
    memory: int = limits.CONVERT_MEMORY
    threads: int | None = None
    overwrite: bool = False
    verify: bool = False
    repair: bool = False
    job: Mapping[str, int] = field(default_factory=dict)
    config: str | os.PathLike[str] | None = None
    require_config: bool = False

    @property
    def selection(self) -> SelectOptions:
        """Those that say what of the source is taken."""
        return SelectOptions(
            views=self.views,
            only=several(self.only),
            exclude=several(self.exclude),
            optimizer=self.optimizer,
            dtype=self.dtype,
            root=self.root,
            skip=several(self.skip),
        )
