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

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from ckpt import units
from ckpt.catalog import Catalog, job_tensors
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.digest_reader import Verify
from ckpt.errors import CkptError, CorruptError, MismatchError, NamesError, ShapeError, UsageError
from ckpt.formats.native.commit import LABELS
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.group import Job
from ckpt.plan import tree
from ckpt.plan.layout.layout import Layout
from ckpt.plan.match import Selection, report_names, rules_of_rename, ways_out
from ckpt.plan.tables import ranks_text
from ckpt.plan.values import LABEL, StatePart, part_in, renamed_path
from ckpt.settings import check_flags
from ckpt.state.bind import bind
from ckpt.state.shard_table import ShardCache
from ckpt.state.targets import Binding
from ckpt.state.tensors import raw_view, reads_otherwise
from ckpt.state.walk import take_all
from ckpt.telemetry.progress import ProgressCallback, reported
from ckpt.telemetry.spans import Spans
from ckpt.text import parse_json

from .reader import Reader
from .whole_chunks import note_writes

if TYPE_CHECKING:
    import torch


# Whether a checkpoint fits the states of all ranks: the row that each rank gives the leader, and the leader's verdict. All problems of all
# ranks go into one error.

log = logging.getLogger("ckpt")

_OF_TENSORS = frozenset({"$tensor", "$tensors", "$inline"})
"""Kinds of nodes that stand for tensors: these count by their names."""


def row_of_match(call: Call, catalog: Catalog, binding: Binding) -> Row:
    """For the leader."""
    everything = binding.used >= job_tensors(catalog).keys()
    row: Row = {
        "problems": {"missing": binding.missing, "shapes": binding.shapes, "misfits": binding.misfits},
        "used": {"used": None if everything else sorted(binding.used), "values": sorted(binding.values)},
    }
    if call.group.size > 1:  # what is equal on most ranks goes as a digest: the leader asks one of them for it
        row = {key: call.share(json.dumps(value).encode()) for key, value in row.items()}
    if binding.renames:
        row["renames"] = binding.renames
    return row


def verdict_of(call: Call, catalog: Catalog, rows: Mapping[int, Row], select: Selection, *, strict: bool) -> Row:
    """Leader: names that are missing and unexpected, as every rank reads them; raises what does not fit, of all ranks."""
    if call.group.size > 1:
        call.fetch_all(row[key] for row in rows.values() for key in ("problems", "used"))
    missing: dict[str, list[int]] = {}
    shapes: dict[str, list[int]] = {}
    misfits: dict[str, list[int]] = {}
    used: set[str] = set()
    values: set[str] = set()
    names = job_tensors(catalog).keys()
    for problems, ranks in _lists(call, rows, "problems"):
        for key, lines in (("missing", missing), ("shapes", shapes), ("misfits", misfits)):
            for line in problems[key]:
                lines.setdefault(line, []).extend(ranks)
    for usage, _ in _lists(call, rows, "used"):
        used.update(names if usage["used"] is None else usage["used"])
        values.update(usage["values"])
    for row in rows.values():  # of ranks that have the optimizer: not all need to
        if "renames" in row:
            select = select.followed_by((old, new) for old, new in row["renames"])
    unexpected = _unexpected(catalog, select, names - used, values)
    idle = select.idle(_paths(catalog), missing) if strict and (select.only or select.moves) else []
    lost = ", ".join(part for part in (catalog.record.lost if catalog.record is not None else ()) if part != LABELS)
    if shapes or misfits or idle or (strict and (missing or unexpected)):
        err = _mismatch(catalog, select, len(rows), missing, unexpected, shapes, misfits, idle)
        err.where = call.url
        if lost and not idle:
            message = f"{err.message}\n  a rebuild of its index could not recover the checkpoint's {lost}"
            hint = (
                "load an older step; or strict=False takes what is left, and leaves in the state what is missing; only=[...] loads a part"
            )
            raise CorruptError(message, where=call.url, hint=hint) from err
        raise err
    if lost and missing:
        named = "\n".join(report_names("missing, and left in the state as they are", missing))
        log.warning("%s: a rebuild of its index could not recover the checkpoint's %s\n%s", call.url, lost, named)
    return {"missing": sorted(missing), "unexpected": unexpected}


def _lists(call: Call, rows: Mapping[int, Row], key: str) -> Iterator[tuple[Row, list[int]]]:
    """What rows have under a key, each with the ranks that have it."""
    # Nearly all ranks have the same problems, mostly none, so the leader fetches a handful of lists however many ranks there are.
    by_digest: dict[str, list[int]] = {}
    for rank, row in rows.items():
        if call.group.size == 1:
            yield row[key], [rank]
        else:
            by_digest.setdefault(row[key], []).append(rank)
    for digest, ranks in by_digest.items():
        yield parse_json(call.fetch(digest)), ranks


def _unexpected(catalog: Catalog, select: Selection, unused: Set[str], values: set[str]) -> list[str]:
    """Names of the checkpoint that no rank took."""
    names = [n for n in unused if select.wants(select.renamed(n))]
    taken = values if not select.only and not select.moves else frozenset[str]()
    for path, node in tree.leaves(catalog.state, but=_OF_TENSORS, outside=taken):
        if path.partition(".")[0] == LABEL:
            continue
        counted = not tree.refers(node) or tree.tag_of(node) in ("$per_rank", "$param_groups")
        if counted and path and select.wants(renamed_path(select, path)) and not _covered(select, path, values):
            names.append(path)
    return sorted(names)


def _paths(catalog: Catalog) -> list[str]:
    """Everything that ``only`` and ``rename`` may mean: names of tensors, paths of values, and all that contains them."""
    names = [*job_tensors(catalog)]
    names += [path for path, _ in tree.leaves(catalog.state)]
    names += [n.replace(".state.", ".", 1) for n in names]  # an optimizer's state goes by its parameters too
    return list(dict.fromkeys([*names, *(n[:i] for n in names for i, c in enumerate(n) if c == ".")]))


def _mismatch(
    catalog: Catalog,
    select: Selection,
    everywhere: int,
    missing: Mapping[str, list[int]],
    unexpected: Iterable[str],
    shapes: Mapping[str, list[int]],
    misfits: Mapping[str, list[int]],
    idle: Sequence[str],
) -> MismatchError:
    if missing:
        # For names of the state that are missing because the checkpoint has something of another kind there: what it has
        there = {select.renamed(name): "one tensor of all ranks in the checkpoint, a PerRank" for name in job_tensors(catalog)}
        for path, node in tree.leaves(catalog.state, but=_OF_TENSORS):
            if tree.tag_of(node) != "$per_rank":
                there[renamed_path(select, path)] = "one value of all ranks in the checkpoint, a tensor or a PerRank"
            elif sum(path in nodes for nodes in catalog.ranks.values()) == catalog.world_size:  # else a rank may lack its own
                there[renamed_path(select, path)] = "a PerRank in the checkpoint, a tensor"
        notes = {name: f": {there[name]} in the state" for name in missing if name in there}
    else:
        notes = {}
    lines = report_names("missing in the checkpoint", (_on(n + notes.get(n, ""), r, everywhere) for n, r in missing.items()))
    lines += report_names("unexpected in the checkpoint", (_moved(n, select) for n in unexpected))
    lines += report_names("do not fit", (_on(n, r, everywhere) for n, r in [*shapes.items(), *misfits.items()]))
    lines += report_names("match no name", idle)
    kinds = [kind for kind, given in ((NamesError, missing or unexpected or idle), (ShapeError, shapes), (MismatchError, misfits)) if given]
    kind = kinds[0] if len(kinds) == 1 else MismatchError
    texts = [*shapes, *misfits, *notes.values()]
    hint = ways_out(missing=bool(missing or idle), unexpected=bool(unexpected), texts=texts, ranks=everywhere)
    part = part_in(catalog.state) if missing else None
    if part is not None:
        given = part.text()
        lines.insert(0, f"  the checkpoint is a part of a state: it was saved with {given}")
        hint = f"load the base first, then this part over it with {given}"
    return kind("the checkpoint does not fit the state; nothing in the state was changed\n" + "\n".join(lines), hint=hint)


def _moved(path: str, select: Selection) -> str:
    """A stored name, and the one that the renames made of it: stored → mapped."""
    renamed = renamed_path(select, path) if select.moves else path
    return path if renamed == path else f"{path} → {renamed}"


def _covered(selection: Selection, path: str, taken: set[str]) -> bool:
    """Whether a value of the checkpoint, or something that contains it, was taken, by whatever path the state has it."""
    around = [path, *(path[:i] for i, c in enumerate(path) if c == "."), ""]  # the key "" has the path of the state itself
    return any((renamed_path(selection, p) if selection.moves else p) in taken for p in around)


def _on(name: str, ranks: list[int], size: int) -> str:
    return name if len(ranks) == size else f"{name} ({ranks_text(sorted(ranks))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did, or with ``dry_run`` would do.

    ``missing``: names of the state, on any rank, that the checkpoint lacks. ``unexpected``: names of the checkpoint that no rank's state
    has. ``renamed``: a tensor's stored name → its name in the state. ``cast``: tensors of this rank whose dtype was converted. Bytes are
    this rank's: ``bytes_needed`` by its tensors as they are stored, ``bytes_read`` from storage, for others too, ``bytes_unverified`` read
    without a check of their digest, ``bytes_received`` of those needed that other ranks had read. They came in ``requests`` reads, which
    storage may split, from ``files`` files. ``memory`` is what reading took beside the state, in bytes. Of a dry run it is the most that
    reading can take, and ``seconds`` is an estimate for the slowest rank, made from ``estimated_from``.
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
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = field(default=None, hash=False)

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


def check_load_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what :func:`ckpt.load` would refuse, also where there is nothing to load yet: else the first restart of a job finds out."""
    if unknown := given.keys() - {*LoadArguments.__annotations__, "dry_run"}:
        raise TypeError(f"restore has no argument {min(unknown)!r}")
    check_flags(strict=given.get("strict", True), cast=given.get("cast", False))
    ReadOptions.of(given.get("read"))
    Job.of(given.get("job"))
    StatePart.of(given.get("only"), trainable=given.get("trainable", False))
    rules_of_rename(given.get("rename"))


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
