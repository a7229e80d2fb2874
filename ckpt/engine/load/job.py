"""What all phases of a load have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from ckpt.adapters.binding.bind import bind
from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.shard_cache import ShardCache
from ckpt.byte_source.storage import source_of
from ckpt.catalog import Catalog
from ckpt.coordination.call import Call
from ckpt.coordination.rows import Row
from ckpt.errors import CkptError

from .options import LoadOptions
from .reader import Reader, Verify

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
