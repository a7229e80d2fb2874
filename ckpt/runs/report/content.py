"""All that a report says, as values: what is drawn is decided here, how in ``html``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt import units
from ckpt.errors import CkptError, UsageError
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.runlog import LogEntry, entry_line
from ckpt.plan.layout.mesh import Mesh
from ckpt.telemetry.spans import WAITING, SpanTable

from .advice import Facts, Recommendation, advise
from .areas import Timeline, timeline
from .history import SavedSpans, is_checkpoint, read_history, read_save
from .summary import MIDDLE, HeatMap, KindSize, LayerSize, SaveSummary, blocks, brief, heat_map, kinds_of

ROWS = 64
"""Ranks that have a row each in a heat map; of more, each is a cell of a block."""
_PER_BLOCK = 8
_COLUMNS, _CELLS = 256, 4096
_WIDE = 128
_GROUPS = 12
_COMPARED = 6
RUNS = 6
"""Runs that are laid over each other, at most: as many colours as can be told apart."""
PAGE = 5_000_000
"""Bytes of a page, at most: ranks and threads have what the ``_PHASES`` of all saves, with their points in charts, leave."""
_PHASES = 8_000


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
    notes: tuple[str, ...]
    """What its spans leave out."""
    advice: tuple[Recommendation, ...] = ()
    kinds: tuple[KindSize, ...] = ()
    layers: tuple[LayerSize, ...] = ()

    @property
    def page_bytes(self) -> int:
        """About how many bytes it takes in the page: cells of a table have words, those of a strip numbers, and a colour if they differ."""
        cells = [cell for row in self.heat.rows.values() for cell in row]
        ranks = sum(14 if cell is not None and cell.level == MIDDLE else 28 for cell in cells) if self.rows else 140 * len(cells)
        groups = sum(140 * len(row) for group in self.groups for row in group.heat.rows.values())
        return ranks + groups + 260 * sum(len(lane.bars) for lane in self.times.lanes) + 4_000


@dataclass(frozen=True, kw_only=True)
class Series:
    """What is drawn as one line over steps: the saves of a run and its failures, or the checkpoints that are compared."""

    url: str
    saves: tuple[SavedSpans, ...]
    failed: tuple[HistoryEvent, ...] = ()
    loads: tuple[HistoryEvent, ...] = ()

    @property
    def known(self) -> tuple[SavedSpans, ...]:
        """The saves that have spans."""
        return tuple(saved for saved in self.saves if saved.summary is not None)


@dataclass(frozen=True, kw_only=True)
class Report:
    """``series`` are several runs to lay over each other, or one. Of one, ``compared`` are side by side, ``steps`` can be seen closely."""

    urls: tuple[str, ...]
    setting: Setting
    series: tuple[Series, ...]
    compared: tuple[SavedSpans, ...] = ()
    steps: tuple[Detail, ...] = ()
    notes: tuple[str, ...]

    @property
    def detail(self) -> Detail | None:
        """The newest save; None if no save has spans."""
        return self.steps[-1] if self.steps else None


def build_report(urls: Sequence[str], setting: Setting) -> Report:
    """A report on a run, on runs to lay over each other, or on checkpoints."""
    notes: list[str] = []
    urls = tuple(dict.fromkeys(urls))
    runs = [_run(url, notes, alone=len(urls) == 1) for url in urls if not is_checkpoint(url)]
    if runs and len(runs) < len(urls):
        save = f"one of its saves, such as {runs[0].saves[-1].url}" if runs[0].saves else "checkpoints only"
        raise UsageError("a run and a checkpoint cannot be compared", where=runs[0].url, hint=f"name runs only, or {save}")
    if len(runs) > RUNS:
        raise UsageError(f"a report shows {RUNS} runs at most, and these are {len(runs)}", where=urls[RUNS], hint="name fewer")
    series = tuple(runs) or (Series(url="", saves=_checkpoints(urls)),)
    notes += [f"{saved.url}: {saved.problem}" for one in series for saved in one.saves if saved.error is not None][:_COMPARED]
    if len(runs) > 1:
        for run in runs:
            if not run.known:
                raise UsageError("no save of this run has spans", where=run.url, hint="leave it out; CKPT_SPANS=off keeps no spans")
        return Report(urls=urls, setting=setting, series=series, notes=tuple(notes))
    known = series[0].known
    compared = known[:_COMPARED]
    if runs and known:  # of a run the fastest, the median, the slowest and the newest
        ordered = sorted(known, key=lambda saved: (saved.seconds, saved.url))
        chosen = {ordered[0].url, ordered[len(ordered) // 2].url, ordered[-1].url, known[-1].url}
        compared = tuple(saved for saved in known if saved.url in chosen)
    steps = _steps(known, setting, notes) if known else ()
    return Report(urls=urls, setting=setting, series=series, compared=compared, steps=steps, notes=tuple(notes))


def distinct(urls: Sequence[str]) -> list[str]:
    """The ends of different URLs, as many parts as tell them apart."""
    for parts in range(1, max(url.count("/") for url in urls) + 1):
        ends = ["/".join(url.rstrip("/").split("/")[-parts:]) for url in urls]
        if len(set(ends)) == len(urls):
            return ends
    return list(urls)


def _checkpoints(urls: Sequence[str]) -> tuple[SavedSpans, ...]:
    saves = tuple(read_save(url) for url in urls)
    if len({saved.label or saved.step for saved in saves}) == len(saves):
        return saves
    return tuple(replace(saved, label=label) for saved, label in zip(saves, distinct(urls), strict=True))


def _run(url: str, notes: list[str], *, alone: bool) -> Series:
    history = read_history(url, tables=alone)
    saves = history.saves or (() if history.log else (read_save(url),))  # raises what is there
    if members := {saved.member: saved.url.rpartition("/")[0] for saved in saves if saved.member is not None}:
        runs = ", ".join(members.values())
        raise UsageError(f"this is a run of several jobs: {', '.join(members)}", where=url, hint=f"name the run of one: {runs}")
    if history.log_problem is not None:
        notes.append(f"{url}: what failed and what was loaded: {history.log_problem}.")
    if history.left_out:
        read = units.plural(len(history.saves), "save")
        notes.append(f"{url} has {history.candidates:,} steps; {read} were read, evenly spread. {history.left_out:,} were left out.")
    failed, loads = ([_history_event(entry) for entry in reversed(history.log) if entry.kind == kind] for kind in ("save", "load"))
    return Series(url=url, saves=saves, failed=tuple(failed), loads=tuple(loads))


def _steps(known: Sequence[SavedSpans], setting: Setting, notes: list[str]) -> tuple[Detail, ...]:
    """As many saves as a page holds, in the order of the run: the newest, which has advice, then the slowest."""
    *others, newest = known
    ranks = newest.record.world_size if newest.record else 0
    steps = {newest.url: _advised(_detail(newest, setting, ranks=ranks), known, setting, notes)}
    room = PAGE - _PHASES * len(known) - steps[newest.url].page_bytes
    for saved in sorted(others, key=lambda saved: saved.seconds)[::-1]:
        step = _detail(saved, setting, ranks=ranks)
        room -= step.page_bytes
        if room < 0:
            left = f"Ranks and threads of {units.plural(len(known) - len(steps), 'save')}, the fastest ones, are left out"
            notes.append(f"{left}: the page would pass {units.size(PAGE)}. Their phases are shown.")
            break
        steps[saved.url] = step
    return tuple(steps[saved.url] for saved in known if saved.url in steps)


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


def _detail(saved: SavedSpans, setting: Setting, *, ranks: int) -> Detail:
    """A mesh is that of the newest save, which has ``ranks``."""
    save, record, tables = saved.summary, saved.record, saved.tables
    assert save is not None and record is not None
    others = setting.mesh is not None and record.world_size != ranks
    groups = _groups(record.world_size, replace(setting, mesh=None) if others else setting, tables)
    cells, rows = _cells(record.world_size, setting.ranks_per_host or _ranks_per_host(groups.get("host", {})))
    notes = [f"This save has {units.plural(record.world_size, 'rank')}, and the mesh {ranks:,}."] if others else []
    if save.missing:
        notes.append(f"No spans were kept of {units.plural(len(save.missing), 'rank')} of {record.world_size:,}.")
    if save.folded:
        notes.append(f"{units.plural(save.folded, 'span')} are kept as sums only: their bars are pale, from first start to last end.")
    return Detail(
        saved=saved,
        save=save,
        record=record,
        heat=heat_map(save, tables, cells),
        rows=rows,
        groups=tuple(_group_heat(title, labelled, save, tables) for title, labelled in groups.items()),
        times=timeline(save, tables),
        notes=tuple(notes),
    )


def _advised(detail: Detail, known: Sequence[SavedSpans], setting: Setting, notes: list[str]) -> Detail:
    """The newest save with advice, which looks at all saves, and with what it consists of."""
    groups = _groups(detail.record.world_size, setting, detail.saved.tables)
    facts = Facts(
        save=detail.save,
        tables=detail.saved.tables,
        earlier=[saved.summary for saved in known if saved.summary is not None],
        groups={f"{title} {label}": ranks for title, labelled in groups.items() for label, ranks in labelled.items()},
    )
    kinds, layers = _sizes(detail.saved.url, detail.record, notes)
    return replace(detail, advice=advise(facts), kinds=kinds, layers=layers)


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
