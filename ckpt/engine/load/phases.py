"""The values that the phases of a load hand on (``load.py``): each has all that the next phase needs, and none of them ever changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.adapters.binding.targets import Binding
from ckpt.catalog import Catalog

from .job import LoadJob
from .read_exchange import ReadExchange
from .reader import Reader
from .shared_reads import SharedReads
from .whole_chunks import TensorLoad


@dataclass(frozen=True, kw_only=True, eq=False)
class Matched:
    """A checkpoint that fits on every rank. ``sharing``: what this rank may share with others; ``refused``: the rank sets that do not
    share after all, None if nobody does; ``machines`` says which ranks are on one machine (``ckpt.plan.machines``), ``near_files`` which
    have which files near (``ckpt.plan.near_files``) or is a digest of that, None where a file costs all ranks the same."""

    job: LoadJob
    catalog: Catalog
    binding: Binding
    sharing: SharedReads
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    refused: Sequence[str] | None
    machines: Any
    near_files: Any

    @property
    def jobs(self) -> list[TensorLoad]:
        """What goes into which target."""
        return list(map(TensorLoad._make, self.binding.targets.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """Which chunks this rank reads itself. ``exchange`` moves those that several ranks want, None if nobody shares; ``setters`` give the
    state its values."""

    matched: Matched
    reader: Reader
    exchange: ReadExchange | None
    setters: Sequence[Callable[[], None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Filled:
    """All tensors have their bytes, but for chunks that were ``handed_out_wrong``: these are read again."""

    divided: Divided
    handed_out_wrong: Sequence[tuple[str, int]]
