"""All that a report says, as values: what is drawn is decided here, how in ``html``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from ckpt import units
from ckpt.errors import CkptError, UsageError
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.runlog import LogEntry, entry_line
from ckpt.plan.layout.mesh import Mesh
from ckpt.telemetry.spans import NOTICEABLE, WAITING, SpanTable

from .areas import Timeline, timeline
from .heat import HeatMap, KindSize, LayerSize, blocks, heat_map, kinds_of
from .history import SavedSpans, is_checkpoint, read_history, read_save
from .summary import Loss, SaveSummary, brief

# Sentences: what is worth changing, and which figures say so. Pure. Each rule gives nothing where its figures are unremarkable.

_GAP = 0.05
_LARGE_PART = 0.3
_LONG_PYTHON = 1.0
_UNEVEN = 1.5
_SMALL_WRITE, _MANY_WRITES = 1 << 20, 10_000
_FEW_STEPS = 6
_WORSE = 1.3
_TOGETHER = 0.75
_REPEATED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """What to do, and why: both whole sentences."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What rules look at. ``earlier`` are the saves of the run up to this one; ``groups`` are named sets of ranks: hosts, coordinates."""

    save: SaveSummary
    tables: Mapping[int, SpanTable]
    earlier: Sequence[SaveSummary] = ()
    groups: Mapping[str, Sequence[int]]


def advise(facts: Facts) -> tuple[Recommendation, ...]:
    """The most useful first."""
    return tuple(advice for rule in _RULES for advice in rule(facts))


def _stragglers(facts: Facts) -> Iterator[Recommendation]:
    save = facts.save
    if not save.stragglers:
        return
    slow = set(save.stragglers)
    together = [name for name, ranks in facts.groups.items() if len(ranks) > 1 and len(slow & set(ranks)) >= _TOGETHER * len(ranks)]
    first = save.stragglers[0]
    lost = save.work[first] - save.median
    ranks = units.plural(len(facts.tables), "rank")
    why = f"All {ranks} wait for the last one, rank {first}: about {brief(lost)} s of this save."
    if together:
        shared = [rank for rank in save.stragglers if any(rank in facts.groups[name] for name in together)]
        alone = [rank for rank in save.stragglers if rank not in shared]
        if alone:
            works = f"It is slow while its neighbours are not: {brief(save.work[alone[0]])} s of work."
            yield Recommendation(what=f"Look at rank {alone[0]}.", why=f"{why} {works}" if alone[0] == first else works)
        slowest = f"The slowest of them, rank {shared[0]}, works {brief(save.work[shared[0]])} s; the median is {brief(save.median)} s."
        yield Recommendation(
            what=f"Look at {', '.join(together[:4])}: nearly all of these ranks are slow, so it is what they share.",
            why=why if shared[0] == first else slowest,
        )
    elif len(slow) > 1:
        yield Recommendation(
            what=f"Look at rank {first} first; {units.plural(len(slow), 'rank')} take more than 1.5 × the median.", why=why
        )
    elif "has more to" in save.verdict:
        yield Recommendation(
            what=f"Give rank {first} less to write: cut its large tensors in the layout, or let more replicas share them.", why=why
        )
    else:
        yield Recommendation(what=f"Look at the machine of rank {first}: its storage, its network, and what else runs there.", why=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStraggler:
    """A rank that held up ``saves`` of a run more than any other rank, for ``seconds`` in all, most of it in ``phase``."""

    rank: int
    phase: str
    saves: int
    seconds: float


def run_stragglers(saves: Sequence[SaveSummary]) -> tuple[RunStraggler, ...]:
    """The ranks that were the slowest straggler of a save, those of most saves first."""
    by_rank: dict[int, list[Loss]] = {}
    for save in saves:
        if save.lost is not None:
            by_rank.setdefault(save.lost.rank, []).append(save.lost)
    ranks = []
    for rank, losses in by_rank.items():
        phases: dict[str, float] = {}
        for lost in losses:
            phases[lost.phase] = phases.get(lost.phase, 0.0) + lost.seconds
        phase = max(phases, key=lambda name: (phases[name], name))
        ranks.append(RunStraggler(rank=rank, phase=phase, saves=len(losses), seconds=sum(phases.values())))
    return tuple(sorted(ranks, key=lambda one: (-one.saves, -one.seconds, one.rank)))


def _again(facts: Facts) -> Iterator[Recommendation]:
    for one in run_stragglers(facts.earlier)[:1]:
        if one.saves >= _REPEATED and one.rank not in facts.save.stragglers:
            often = f"It was the slowest in {one.saves:,} of {len(facts.earlier):,} saves"
            yield Recommendation(
                what=f"Look at rank {one.rank}: it is slow again and again, though not in the newest save.",
                why=f"{often}, mostly in {one.phase}: {brief(one.seconds)} s in all.",
            )


def _waiting_caller(facts: Facts) -> Iterator[Recommendation]:
    save = facts.save
    if save.blocked is None or save.background or save.blocked < 1:
        return
    yield Recommendation(
        what="Save in the background: ckpt.save_async, or Checkpointer with its default.",
        why=f"Training stood still for {brief(save.blocked)} s. In the background it waits for the copy of the state only.",
    )


def _sync(facts: Facts) -> Iterator[Recommendation]:
    sync, save = facts.save.phase("sync"), facts.save
    if sync is None or sync.median < _LARGE_PART * save.seconds or sync.median < NOTICEABLE:
        return
    yield Recommendation(
        what="Ask for storage that makes bytes durable faster, or use a local tier and publish in the background.",
        why=f"The median rank spends {brief(sync.median)} s of {brief(save.seconds)} s in sync, after all bytes were written.",
    )


def _python(facts: Facts) -> Iterator[Recommendation]:
    for name in ("collect", "plan"):
        phase = facts.save.phase(name)
        if phase is not None and phase.median >= max(_LONG_PYTHON, 0.1 * facts.save.seconds):
            yield Recommendation(
                what=f"Save fewer, larger tensors, or keep the Checkpointer between saves: {name} takes long.",
                why=f"The median rank spends {brief(phase.median)} s of {brief(facts.save.seconds)} s in {name}.",
            )


def _leader(facts: Facts) -> Iterator[Recommendation]:
    commit = facts.save.phase("commit")
    if commit is not None and commit.seconds >= max(_LARGE_PART * facts.save.seconds, 1.0):
        yield Recommendation(
            what="Look at the leader's storage: small files and renames are slow there.",
            why=f"Commit takes {brief(commit.seconds)} s of {brief(facts.save.seconds)} s; it writes a few small files.",
        )


def _uneven(facts: Facts) -> Iterator[Recommendation]:
    written = [one.nbytes for table in facts.tables.values() if (one := table.sums.get("write")) is not None]
    if len(written) < 2 or not any(written) or facts.save.stragglers:
        return
    if max(written) > _UNEVEN * mean(written) and max(written) > _SMALL_WRITE:
        yield Recommendation(
            what="Spread the bytes more evenly: cut large tensors in the layout, or let replicas share them.",
            why=f"The rank with most writes {units.size(max(written))}, the mean is {units.size(mean(written))}.",
        )


def _small_writes(facts: Facts) -> Iterator[Recommendation]:
    write = facts.save.phase("write")
    if write is not None and write.spans >= _MANY_WRITES and write.bytes < _SMALL_WRITE * write.spans / 4:
        yield Recommendation(
            what="Store fewer, larger tensors: most writes are small.",
            why=f"{write.spans:,} writes carry {units.size(write.bytes / write.spans)} on average.",
        )


def _worse(facts: Facts) -> Iterator[Recommendation]:
    seconds = [save.seconds for save in facts.earlier]
    if len(seconds) < _FEW_STEPS:
        return
    third = len(seconds) // 3
    before, now = median(seconds[:third]), median(seconds[-third:])
    if now > _WORSE * before and now - before > NOTICEABLE:
        yield Recommendation(
            what="Find out what has changed: saves have become slower.",
            why=f"The last {third} saves took {brief(now)} s (median), the first {third} took {brief(before)} s.",
        )


def _gaps(facts: Facts) -> Iterator[Recommendation]:
    gap = facts.save.unaccounted
    if gap is not None and gap.share >= _GAP and gap.seconds >= NOTICEABLE:
        yield Recommendation(
            what="Do not look for all of the time in the phases.",
            why=f"No phase covers {brief(gap.seconds)} s of rank {gap.rank} ({100 * gap.share:.0f} % of the save).",
        )


_RULES: tuple[Callable[[Facts], Iterator[Recommendation]], ...] = (
    _stragglers,
    _again,
    _worse,
    _waiting_caller,
    _sync,
    _python,
    _leader,
    _uneven,
    _small_writes,
    _gaps,
)


ROWS = 64
"""Ranks that have a row each in a heat map; of more, each is a cell of a block."""
_PER_BLOCK = 8
_COLUMNS, _CELLS = 256, 4096
_WIDE = 128
_GROUPS = 12
_COMPARED = 6


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the reader of a report knows that spans do not tell. ``price`` is of a rank for an hour."""

    price: float | None = None
    currency: str = ""
    ranks_per_host: int | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True, kw_only=True)
class GroupHeat:
    """A heat map whose rows are sets of ranks: the hosts, or the coordinates of a mesh dimension."""

    title: str
    labels: tuple[str, ...]
    heat: HeatMap
    left_out: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEvent:
    """A save that failed, or a load: ``what`` happened, in words, and for a load what its slowest rank was busy with longest."""

    at: float
    what: str
    seconds: float | None
    ranks: int
    nbytes: int | None
    slowest: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Detail:
    """One save looked at closely. ``rows`` are the rows of a block, if the heat map has blocks of ranks in place of a row for each."""

    saved: SavedSpans
    save: SaveSummary
    record: CommitRecord
    heat: HeatMap
    rows: int | None
    groups: tuple[GroupHeat, ...]
    times: Timeline
    advice: tuple[Recommendation, ...]
    kinds: tuple[KindSize, ...]
    layers: tuple[LayerSize, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """``saves`` are shown as a series, ``compared`` side by side; ``detail`` is None if no save has spans."""

    urls: tuple[str, ...]
    setting: Setting
    saves: tuple[SavedSpans, ...]
    compared: tuple[SavedSpans, ...]
    detail: Detail | None
    notes: tuple[str, ...]
    failed: tuple[HistoryEvent, ...] = ()
    loads: tuple[HistoryEvent, ...] = ()


def build_report(urls: Sequence[str], setting: Setting) -> Report:
    """A report on a run, or on checkpoints."""
    notes: list[str] = []
    log: tuple[LogEntry, ...] = ()
    if len(urls) == 1 and not is_checkpoint(urls[0]):
        history = read_history(urls[0])
        log = history.log
        saves = history.saves or (() if log else (read_save(urls[0]),))  # raises what is there
        if members := {saved.member: saved.url.rpartition("/")[0] for saved in saves if saved.member is not None}:
            runs = ", ".join(members.values())
            raise UsageError(f"this is a run of several jobs: {', '.join(members)}", where=urls[0], hint=f"name the run of one: {runs}")
        if history.log_problem is not None:
            notes.append(f"What failed and what was loaded: {history.log_problem}.")
        if history.left_out:
            read = units.plural(len(history.saves), "save")
            notes.append(f"The run has {history.candidates:,} steps; {read} were read, evenly spread. {history.left_out:,} were left out.")
    else:
        for url in urls:
            if not is_checkpoint(url) and (history := read_history(url)).saves:
                text = "several saves are compared, and this is a run"
                raise UsageError(text, where=url, hint=f"name one of its saves, such as {history.saves[-1].url}, or the run alone")
        saves = tuple(read_save(url) for url in urls)
    notes += [f"{saved.url}: {saved.problem}" for saved in saves if saved.error is not None][:_COMPARED]
    known = [saved for saved in saves if saved.summary is not None]
    compared = known[:_COMPARED]
    if len(urls) == 1:  # of a run the fastest, the median, the slowest and the newest
        ordered = sorted(known, key=lambda s: (s.summary.seconds if s.summary else 0.0, s.url))
        chosen = {ordered[0].url, ordered[len(ordered) // 2].url, ordered[-1].url, known[-1].url} if len(known) > 1 else set()
        compared = [s for s in known if s.url in chosen]
    detail = None
    if known:
        newest = known[-1] if known[-1].tables else read_save(known[-1].url)
        if newest.summary is not None and newest.record is not None:
            others = [s.summary for s in known if s.url != newest.url and s.summary is not None]
            detail = _detail(newest, newest.summary, newest.record, others, setting, notes)
    return Report(
        urls=tuple(urls),
        setting=setting,
        saves=saves,
        compared=tuple(compared),
        detail=detail,
        notes=tuple(notes),
        failed=tuple(_history_event(entry) for entry in reversed(log) if entry.kind == "save"),
        loads=tuple(_history_event(entry) for entry in reversed(log) if entry.kind == "load"),
    )


def _history_event(entry: LogEntry) -> HistoryEvent:
    busiest = max(
        ((one.busy, -rank, one.phase) for rank, table in entry.tables.items() for one in table.sums.values() if one.phase not in WAITING),
        default=None,
    )
    slowest = "" if busiest is None else f"{busiest[2]}, {brief(busiest[0] / 1e6)} s on rank {-busiest[1]}"
    return HistoryEvent(
        at=entry.at,
        what=entry_line(entry),
        seconds=entry.seconds,
        ranks=entry.ranks,
        nbytes=entry.tensor_bytes,
        slowest=slowest,
        step=entry.step,
    )


def _detail(
    saved: SavedSpans, save: SaveSummary, record: CommitRecord, earlier: Sequence[SaveSummary], setting: Setting, notes: list[str]
) -> Detail:
    tables = saved.tables
    groups = _groups(record.world_size, setting, tables)
    cells, rows = _cells(record.world_size, setting.ranks_per_host or _ranks_per_host(groups.get("host", {})))
    kinds, layers = _sizes(saved.url, record, notes)
    if save.missing:
        notes.append(f"No spans were kept of {units.plural(len(save.missing), 'rank')} of {record.world_size:,}.")
    if save.folded:
        notes.append(f"{units.plural(save.folded, 'span')} are kept as sums only: their bars are pale, from first start to last end.")
    facts = Facts(
        save=save,
        tables=tables,
        earlier=[*earlier, save],
        groups={f"{title} {label}": ranks for title, labelled in groups.items() for label, ranks in labelled.items()},
    )
    return Detail(
        saved=saved,
        save=save,
        record=record,
        heat=heat_map(save, tables, cells),
        rows=rows,
        groups=tuple(_group_heat(title, labelled, save, tables) for title, labelled in groups.items()),
        times=timeline(save, tables),
        advice=advise(facts),
        kinds=kinds,
        layers=layers,
    )


def _cells(ranks: int, per_host: int | None) -> tuple[tuple[range, ...], int | None]:
    """The ranks of each cell, and how many cells a column has."""
    # Columns are hosts, or blocks of eight ranks, as long as all can be seen.
    if ranks <= ROWS:
        return blocks(ranks, 1), None
    host = per_host or _PER_BLOCK
    if ranks <= _CELLS and -(-ranks // host) <= _COLUMNS:
        return blocks(ranks, 1), host
    cells = blocks(ranks, max(per_host or 1, -(-ranks // _CELLS)))
    if len(cells) > _CELLS:
        cells = blocks(ranks, -(-ranks // _CELLS))
    return cells, -(-len(cells) // _WIDE)


def _groups(ranks: int, setting: Setting, tables: Mapping[int, SpanTable]) -> dict[str, dict[str, Sequence[int]]]:
    """Title → label → ranks: hosts, and the coordinates of each mesh dimension, as the reader has told of them, or else the ranks."""
    groups: dict[str, dict[str, Sequence[int]]] = {}
    if setting.ranks_per_host is None:
        hosts = _by({rank: table.host for rank, table in tables.items() if table.host is not None})
        if 1 < len(hosts) < len(tables):
            groups["host"] = hosts
    if setting.mesh is None:
        for name in dict.fromkeys(name for table in tables.values() for name in table.coordinates):
            groups[name] = _by({rank: table.coordinates[name] for rank, table in tables.items() if name in table.coordinates})
    if setting.ranks_per_host and ranks > setting.ranks_per_host > 1:
        groups["host"] = {str(i): block for i, block in enumerate(blocks(ranks, setting.ranks_per_host))}
    if setting.mesh is not None:
        mesh = setting.mesh
        if len(mesh.ranks) != ranks:
            sizes = " × ".join(map(str, mesh.sizes))
            raise UsageError(f"a mesh of {sizes} has {len(mesh.ranks):,} ranks, the save has {ranks:,}", hint="--mesh names all dimensions")
        array = mesh.array()
        for axis, name in enumerate(mesh.names):
            if mesh.sizes[axis] > 1:
                groups[name] = {str(i): tuple(array.take(i, axis=axis).ravel().tolist()) for i in range(mesh.sizes[axis])}
    return groups


def _by(values: Mapping[int, object]) -> dict[str, Sequence[int]]:
    """Ranks by what they have, in the order of the first of each."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks_of.setdefault(str(value), []).append(rank)
    return {label: tuple(ranks) for label, ranks in ranks_of.items()}


def _ranks_per_host(hosts: Mapping[str, Sequence[int]]) -> int | None:
    """How many neighbours share a machine, if it is as many on each, or fewer on the last."""
    size = max(map(len, hosts.values()), default=0)
    even = [tuple(block) for block in blocks(sum(map(len, hosts.values())), size)] if size else []
    return size if size > 1 and [tuple(ranks) for ranks in hosts.values()] == even else None


def _group_heat(title: str, labelled: Mapping[str, Sequence[int]], save: SaveSummary, tables: Mapping[int, SpanTable]) -> GroupHeat:
    """The slowest groups, in their order, if there are too many to see: a group is as slow as its median rank."""
    work = {label: sorted(save.work.get(rank, 0.0) for rank in ranks)[len(ranks) // 2] for label, ranks in labelled.items()}
    slowest = set(sorted(labelled, key=lambda label: -work[label])[:_GROUPS])
    shown = [label for label in labelled if label in slowest]
    groups = [ranks if isinstance(ranks, range) else tuple(ranks) for ranks in (labelled[label] for label in shown)]
    return GroupHeat(
        title=title,
        labels=tuple(f"{title} {label}" for label in shown),
        heat=heat_map(save, tables, groups, typical=True),
        left_out=len(labelled) - len(shown),
    )


def _sizes(url: str, record: CommitRecord, notes: list[str]) -> tuple[tuple[KindSize, ...], tuple[LayerSize, ...]]:
    """From the index; nothing if it is damaged, which a note says."""
    from ckpt.formats.native.paths import STATE
    from ckpt.formats.registry import open_catalog

    try:
        entries = open_catalog(url).tensors.values()
    except CkptError as err:
        notes.append(f"What the save consists of is not known: {err.message}")
        return (), ()
    return kinds_of(entries, record.index[STATE].size)
