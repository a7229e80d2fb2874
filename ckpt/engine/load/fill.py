"""How a state gets the tensors and values of a catalog: the one driver of loads, dry runs, reshards and live takes.

    catalog ──► bind ──► match ──────────────► fill ─────────────────────────────► set
                 │         │                    │                                   │
    every rank   state ⇄   what lacks, what     objects accept theirs; memory for   values, options of
                 catalog   does not fit         meta tensors; bytes → tensors       optimizers
    leader                 does it fit on all?

Where the bytes come from is a parameter, a :class:`ByteTransfer`: chunks of storage, some of which other ranks read (a load), memory of
ranks (a reshard), pieces and segments of a source (a take). A dry run ends before ``fill``.

Invariant: nothing in a state changes before every rank knows that everything fits. All problems of all ranks go into one error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from ckpt import units
from ckpt.catalog import Catalog
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.digest_reader import Verify
from ckpt.errors import CkptError, UsageError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.group import Job
from ckpt.plan.layout.layout import Layout
from ckpt.plan.match import Selection
from ckpt.settings import check_flags
from ckpt.state.bind import bind
from ckpt.state.shard_table import ShardCache
from ckpt.state.targets import Binding
from ckpt.state.tensors import raw_view, reads_otherwise
from ckpt.state.walk import take_all
from ckpt.telemetry.callbacks import ProgressCallback, reported
from ckpt.telemetry.spans import Spans

from .reader import Reader, note_writes
from .validate import row_of_match

if TYPE_CHECKING:
    import torch


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

    def __str__(self) -> str:
        verb = "would load" if self.dry_run else "loaded"
        lacking = "".join(f", {len(names)} {what}" for what, names in (("missing", self.missing), ("unexpected", self.unexpected)) if names)
        what = f"{units.plural(self.tensors, 'tensor')}, {units.size(self.bytes_needed)}," if self.tensors else "values"
        return f"{verb} {what} from {self.url} in {units.duration(self.seconds)}{lacking}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How a load reads: ``read=ckpt.ReadOptions(verify="partial")``.

    Args:
        verify: ``"full"`` reads every touched chunk whole and checks it; ``"partial"`` reads only what is needed and checks the chunks that
            are needed whole; ``"off"`` checks nothing.
        exchange: ranks that want the same chunks, or parts of them, read each once and hand over to each other what they want. By default
            everything where storage is not a file system; on a file system, where reading costs less than sending, only ranks of one
            machine, and only chunks of which they want different parts. ``False``: each rank reads what it needs.
        sources: as for :func:`ckpt.open`.

    Raises:
        UsageError: one of them is something else.
    """

    verify: Verify = "full"
    exchange: bool | None = None
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.verify not in ("full", "partial", "off"):
            raise UsageError(f"verify must be 'full', 'partial' or 'off', not {self.verify!r}")
        if self.exchange is not None:
            check_flags(exchange=self.exchange)

    @classmethod
    def of(cls, read: object) -> ReadOptions:
        """What a caller gives as ``read=``; None: the defaults."""
        if read is None:
            return cls()
        if not isinstance(read, cls):
            raise UsageError(f"read= is a ckpt.ReadOptions, not {read!r}", hint='read=ckpt.ReadOptions(verify="partial")')
        return read


class LoadArguments(TypedDict, total=False):
    """What :meth:`ckpt.Checkpointer.restore` hands on to :func:`ckpt.load`."""

    only: str | Sequence[str] | None
    trainable: bool
    rename: Mapping[str, str] | None
    strict: bool
    cast: bool
    read: ReadOptions | None
    layout: Layout | None
    job: Job | None
    progress: bool | ProgressCallback | None


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


@dataclass(kw_only=True, eq=False)
class LoadJob:
    """What all phases of one try have in common. ``begun``: whether something in the state was changed, or may have been."""

    call: Call
    options: LoadOptions
    begun: bool = False

    def span(self, phase: str, nbytes: int = 0) -> AbstractContextManager[object]:
        return nullcontext() if self.options.spans is None else self.options.spans.span(phase, nbytes)

    def reader(self, catalog: Catalog, verify: Verify | None = None) -> Reader:
        options = self.options
        return Reader(catalog, verify or options.verify, options.threads, self.call.heartbeat, options.spans)


def nothing(rows: Mapping[int, object]) -> None:
    """Leader: there is nothing to decide."""


# ---- bind and match


@dataclass(frozen=True, kw_only=True, eq=False)
class Matched:
    """A catalog that fits the states of all ranks. ``verdict`` is what the leader decided."""

    job: LoadJob
    catalog: Catalog
    binding: Binding
    verdict: Row

    @property
    def renamed(self) -> dict[str, str]:
        """Stored names of loaded tensors that have another name in the state."""
        selection = self.job.options.selection.followed_by(self.binding.renames)
        if not selection.moves:
            return {}
        entries = {n: e for n, (_, e) in self.binding.targets.items() if e.rank is None}
        return {e.name: n for n, e in entries.items() if selection.renamed(e.name) != e.name}

    def report(self, **figures: Any) -> LoadReport:
        return LoadReport(
            url=self.job.call.url,
            tensors=len(self.binding.targets),
            missing=tuple(self.verdict["missing"]),
            unexpected=tuple(self.verdict["unexpected"]),
            renamed=self.renamed,
            cast=tuple(self.binding.cast),
            **figures,
        )


def match(
    job: LoadJob,
    catalog: Catalog,
    state: object,
    shards: ShardCache,
    *,
    decide: Callable[[dict[int, Row]], Row],
    ranks: tuple[int, ...] | None = None,
    beside: Callable[[Binding], Row] | None = None,
) -> Matched:
    """Bind this rank's state to a catalog, and see with all other ranks whether it fits everywhere. Within a phase.

    ``ranks``: those that have a state, where not all do: the others get an empty binding. ``shards``: what is known of the state's tensors.
    ``decide`` is what the leader makes of all rows, with ``validate.verdict_of``; ``beside`` gives what else it is to know, and may add
    misfits.
    """
    call, options = job.call, job.options
    ranks = call.group.ranks if ranks is None else ranks
    binding, has_state = Binding(), call.group.rank in ranks
    if has_state:
        with job.span("match"):
            binding = bind(
                state,
                catalog,
                rank=call.group.rank,
                ranks=ranks,
                layout=options.layout,
                selection=options.selection,
                cast=options.cast,
                shards=shards,
            )
    row = {} if beside is None else beside(binding)
    if has_state:
        row |= row_of_match(call, catalog, binding)
    return Matched(job=job, catalog=catalog, binding=binding, verdict=call.agree(row, decide))


# ---- fill


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteTransfer:
    """How the bytes of a catalog come into a state: ``run`` moves them. Memory in ``padding``, which is beyond what is stored, is zeroed
    first. ``counts``: bytes that have come, and in all."""

    padding: Sequence[torch.Tensor]
    run: Callable[[], object]
    counts: Callable[[], tuple[int, int]] = lambda: (0, 0)


def fill(matched: Matched, plan: Callable[[Collection[torch.device]], ByteTransfer]) -> None:
    """Give memory to tensors that have none, and fill all with what the transfer brings. ``plan`` makes it when all have memory; it gets
    the GPUs that they are on."""
    job, binding = matched.job, matched.binding
    job.begun |= bool(binding.create)
    for create in binding.create:
        create()
    targets = [local for local, _ in binding.targets.values()]
    devices = {part.memory.device for local in targets for part in local.parts if part.memory.is_cuda}
    if devices:
        settle_devices(devices_of(targets), job.call.url)
    transfer = plan(devices)
    job.begun = True
    for memory in transfer.padding:
        (memory if reads_otherwise(memory) else raw_view(memory)).zero_()
    if job.options.progress is None:
        transfer.run()
    else:
        with reported(job.options.progress, transfer.counts):
            transfer.run()
    if devices:
        settle_devices(devices_of(targets), job.call.url)
    if targets:
        note_writes(targets)


# ---- set: objects of the state take their values before any tensor changes, all else is set when every byte is there


def accept(matched: Matched) -> list[Callable[[], None]]:
    """Let the objects of the state take theirs. Returns what is left to set when all bytes are there."""
    binding = matched.binding
    if not binding.objects:
        return [*(each.take for each in binding.options), *binding.apply]
    refusal = take_all([*binding.options, *binding.objects])
    if refusal is not None:
        matched.job.begun = not refusal.undone
        if isinstance(refusal.error, CkptError):
            raise refusal.error
        raise _refused(refusal.error, f"{refusal.path} in {matched.job.call.url}") from refusal.error
    matched.job.begun = True
    return binding.apply


def set_all(setters: Iterable[Callable[[], None]], url: str) -> None:
    """Set the values, now that all bytes are there."""
    try:
        for setter in setters:
            setter()
    except CkptError:
        raise
    except Exception as err:  # whatever an object of the user's raises: it has to say that the state was touched
        raise _refused(err, url) from err


def _refused(err: Exception, where: str) -> CkptError:
    return CkptError(
        f"an object of the state did not take its loaded value: {type(err).__name__}: {err}",
        where=where,
        hint="`ckpt inspect URL --state` shows what is stored; only=[...] leaves the object out",
    )
