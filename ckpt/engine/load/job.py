"""What a caller may ask of a load, what a load reports, and what all of its phases have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeVar

from ckpt.catalog import Catalog
from ckpt.engine.byte_source import source_of
from ckpt.engine.digest_reader import Verify
from ckpt.errors import CkptError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.plan.layout.layout import Layout
from ckpt.plan.match import Selection
from ckpt.state.bind import bind
from ckpt.state.shard_table import ShardCache
from ckpt.state.targets import Binding
from ckpt.telemetry.callbacks import ProgressCallback
from ckpt.telemetry.spans import Spans

from .reader import Reader


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did, or with ``dry_run`` would do.

    ``missing``: names of the state, on any rank, that the checkpoint lacks. ``unexpected``: names of the checkpoint that no rank's
    state has. ``renamed``: a tensor's stored name → its name in the state. ``cast``: tensors of this rank whose dtype was converted.
    Bytes are this rank's: ``bytes_needed`` by its tensors as they are stored, ``bytes_read`` from storage, for others too,
    ``bytes_unverified`` read without a check of their digest, ``bytes_received`` of those needed that other ranks had read. They came
    in ``requests`` reads, which storage may split, from ``files`` files. ``memory`` is what reading took beside the state, in bytes. Of
    a dry run it is the most that reading can take, and ``seconds`` is an estimate for the slowest rank, from what ``estimated_from``
    says.
    """

    url: str
    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    bytes_needed: int
    bytes_read: int
    bytes_unverified: int
    bytes_received: int
    seconds: float
    requests: int = 0
    files: int = 0
    memory: int = 0
    dry_run: bool = False
    estimated_from: str | None = None


Shares = Literal["all", "parts", "none"]
"""What ranks read for each other: all that several want, on one machine only what several want different parts of, or nothing."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    layout: Layout | None
    selection: Selection
    strict: bool
    cast: bool
    verify: Verify
    timeout: float
    threads: int
    exchange: Shares = "none"
    spans: Spans | None = None
    progress: ProgressCallback | None = None
    dry_run: bool = False
    """Plan it, and read nothing but the index and headers."""
    sources: tuple[str, ...] | None = None
    """Where the files may lie that a virtual checkpoint points into; None: as CKPT_SOURCES says."""


R = TypeVar("R")
PARTLY_WRITTEN = "the state given to load is now partly overwritten: load another checkpoint into it before using it"
UNCHANGED = "nothing in the state was changed on this rank"


@dataclass(eq=False)
class StateWrites:
    """Whether something in the state was changed. It is not part of a phase's value, since a phase that fails returns none."""

    begun: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadJob:
    """What all phases of one try have in common."""

    call: Call
    options: LoadOptions
    recorded: dict[int, Row] | None
    writes: StateWrites

    def span(self, phase: str, nbytes: int = 0) -> AbstractContextManager[object]:
        return nullcontext() if self.options.spans is None else self.options.spans.span(phase, nbytes)

    def agree(self, row: Row, decide: Callable[[dict[int, Row]], R]) -> R:
        """The end of a phase: the leader decides with the rows of all ranks, and every rank returns that."""
        if self.call.is_leader:
            return self.call.lead(row, decide)
        decision: R = self.call.follow(row)
        return decision

    def bind(self, state: object, catalog: Catalog, shards: ShardCache) -> Binding:
        """What of this rank's state takes what of a checkpoint; raises as ``bind``. ``shards``: what is known of the state's tensors."""
        group, options = self.call.group, self.options
        return bind(
            state,
            catalog,
            rank=group.rank,
            ranks=group.ranks,
            layout=options.layout,
            selection=options.selection,
            cast=options.cast,
            shards=shards,
        )

    def reader(self, catalog: Catalog, verify: Verify) -> Reader:
        options, source = self.options, source_of(catalog)
        return Reader(catalog=catalog, source=source, verify=verify, threads=options.threads, beat=self.call.heartbeat, spans=options.spans)


@contextmanager
def tells_whether_written(writes: StateWrites) -> Iterator[None]:
    try:
        yield
    except CkptError as err:
        err.message += f"; {PARTLY_WRITTEN if writes.begun else UNCHANGED}"
        raise
