"""``ckpt stats``: where the time of a save went, by phase and rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import FormatError, StorageError

from . import units
from .output import Output, options, style

if TYPE_CHECKING:
    from ckpt.formats.native.commit import CommitRecord
    from ckpt.spans import PhaseSum, SpanTable

STRAGGLER = 1.5
"""A rank that works longer than this times the median rank holds the others up."""
_SHOWN = 8


@click.command("stats", short_help="Show where the time of a save went.")
@click.argument("url")
@click.option("--ranks", "by_rank", is_flag=True, help="Show each rank, the slowest first.")
@click.option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@options
def command(url: str, *, by_rank: bool, trace: str | None, as_json: bool, quiet: bool) -> None:
    """Show how long the phases of the save of URL took, the slowest first.

    SECONDS are those that the threads of the slowest rank were busy, MEDIAN
    those of the median rank; WALL is from the first start to the last end.

    \b
    Example:
      ckpt stats runs/a/step-00001000
      ckpt stats --ranks runs/a/step-00001000 | head
      ckpt stats --trace save.json runs/a/step-00001000
    """
    output = Output(json=as_json, quiet=quiet)
    record, tables = _read(url)
    save = _save(record, tables)
    if trace is not None:
        _write_trace(trace, tables)
    if output.json:
        output.document(_document(url, record, save, tables, by_rank=by_rank))
    elif quiet:
        for name in save.slowest if by_rank else [phase.phase for phase in save.phases]:
            output.line(str(name))
    else:
        _print_ranks(save, tables, output) if by_rank else _print_phases(save.phases, output)
        _print_totals(record, save, output)
    if trace is not None:
        spans = sum(len(table.spans) for table in tables.values())
        output.talk(f"{trace}: {units.plural(spans, 'span')} of {units.plural(len(tables), 'rank')}; open it in ui.perfetto.dev")


def _read(url: str) -> tuple[CommitRecord, dict[int, SpanTable]]:
    """The commit record is enough: a checkpoint with a damaged index still says how it was saved."""
    from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord
    from ckpt.formats.native.spans import read_spans
    from ckpt.formats.native.writer import read_record
    from ckpt.formats.registry import open_catalog
    from ckpt.io_backends.registry import join_url, open_backend

    backend = open_backend(url)
    data = read_record(backend)
    if data is None:
        format = open_catalog(url).format  # raises what is wrong, if no checkpoint is there
        raise FormatError(f"a checkpoint of the format {format} has no spans", where=url, hint="only saves of ckpt keep them")
    record = CommitRecord.from_bytes(data, join_url(backend.url, COMMIT_PATH))
    return record, read_spans(backend, record)


def _write_trace(path: str, tables: Mapping[int, SpanTable]) -> None:
    from ckpt.trace import trace_lines

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(trace_lines(tables))
    except OSError as err:
        hint = "name a file in a directory that is there"
        raise StorageError(f"the trace cannot be written: {err.strerror or err}", where=path, hint=hint) from err


# ------------------------------------------------------------------------------------------------------- over all ranks


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase over the ranks that have it; ``rank`` is the one that was busy longest, for ``seconds``."""

    phase: str
    ranks: int
    rank: int
    seconds: float
    median: float
    wall: float
    spans: int
    bytes: int

    @property
    def rate(self) -> float | None:
        """Bytes a second of all ranks together; None where none are counted."""
        return self.bytes / self.wall if self.bytes and self.wall > 0 else None


@dataclass(frozen=True, kw_only=True)
class Save:
    """``seconds`` is the wall time of the rank that took longest; ``slowest`` are all ranks in order, ``stragglers`` the first of them."""

    phases: list[Phase]
    seconds: float
    median: float
    slowest: list[int]
    stragglers: list[int]
    missing: list[int]
    folded: int


def _save(record: CommitRecord, tables: Mapping[int, SpanTable]) -> Save:
    work = {rank: table.seconds for rank, table in tables.items()}
    slowest = sorted(work, key=lambda rank: (-work[rank], rank))
    middle = median(work.values())
    return Save(
        phases=_phases(tables),
        seconds=max(table.wall for table in tables.values()),
        median=middle,
        slowest=slowest,
        stragglers=[rank for rank in slowest if work[rank] > STRAGGLER * middle],
        missing=[rank for rank in range(record.world_size) if rank not in tables],
        folded=sum(table.folded_count for table in tables.values()),
    )


def _phases(tables: Mapping[int, SpanTable]) -> list[Phase]:
    """Machines' clocks differ, so no time of one rank is taken from that of another: the longest ``wall`` of a rank is the phase's."""
    sums: dict[str, dict[int, PhaseSum]] = {}
    for rank, table in tables.items():
        for one in table.sums.values():
            sums.setdefault(one.phase, {})[rank] = one
    found = [_phase(name, by_rank) for name, by_rank in sums.items()]
    return sorted(found, key=lambda p: (-p.seconds, p.phase))


def _phase(name: str, by_rank: Mapping[int, PhaseSum]) -> Phase:
    slowest = min(by_rank, key=lambda rank: (-by_rank[rank].busy, rank))
    return Phase(
        phase=name,
        ranks=len(by_rank),
        rank=slowest,
        seconds=by_rank[slowest].seconds,
        median=median(s.seconds for s in by_rank.values()),
        wall=max(s.wall for s in by_rank.values()),
        spans=sum(s.count for s in by_rank.values()),
        bytes=sum(s.nbytes for s in by_rank.values()),
    )


# ---------------------------------------------------------------------------------------------------------------- people


def _print_phases(phases: list[Phase], output: Output) -> None:
    heads = ("PHASE", ">SLOWEST RANK", ">SECONDS", ">MEDIAN", ">WALL", ">BYTES", ">RATE", "NOTE")
    output.table(heads, [_row(phase) for phase in phases])


def _row(phase: Phase) -> tuple[str, ...]:
    from ckpt.spans import LEADING, WAITING

    times = (_seconds(phase.seconds), _seconds(phase.median), _seconds(phase.wall))
    waits = "waiting for training" if phase.phase == "settle" else "waiting for other ranks"
    note = waits if phase.phase in WAITING else "the leader alone" if phase.phase in LEADING else ""
    return (phase.phase, str(phase.rank), *times, units.size(phase.bytes) if phase.bytes else "", _rate(phase.rate), note)


def _print_ranks(save: Save, tables: Mapping[int, SpanTable], output: Output) -> None:
    names, stragglers = [phase.phase for phase in save.phases], set(save.stragglers)
    rows = []
    for rank in save.slowest:
        table = tables[rank]
        phases = [_seconds(table.sums[name].seconds) if name in table.sums else "" for name in names]
        note = style(_times(table.seconds, save.median), "red") if rank in stragglers else ""
        rows.append((str(rank), _seconds(table.seconds), *phases, note))
    output.table((">RANK", ">SECONDS", *(f">{name}" for name in names), "NOTE"), rows)


def _print_totals(record: CommitRecord, save: Save, output: Output) -> None:
    size, rate = units.size(record.tensor_bytes), _rate(record.tensor_bytes / save.seconds if save.seconds > 0 else None)
    output.line(f"{units.plural(record.world_size, 'rank')}, {size} in {_seconds(save.seconds)} s{f' ({rate})' if rate else ''}")
    output.line(f"stragglers: {_some(save.stragglers)}" if save.stragglers else "no stragglers")
    if save.missing:
        output.line(f"no spans were kept of {units.plural(len(save.missing), 'rank')}: {_some(save.missing)}")
    if save.folded:
        output.line(f"{units.plural(save.folded, 'span')} are kept as sums only")


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN:,} more" if len(ranks) > _SHOWN else ""
    return ", ".join(f"rank {rank}" for rank in ranks[:_SHOWN]) + more


def _times(seconds: float, middle: float) -> str:
    return f"{seconds / middle:.1f} × the median" if middle > 0 else "the median is 0"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{units.size(rate)}/s"


# -------------------------------------------------------------------------------------------------------------- machines


def _document(url: str, record: CommitRecord, save: Save, tables: Mapping[int, SpanTable], *, by_rank: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "url": url,
        "id": record.id,
        "created": record.created,
        "world_size": record.world_size,
        "tensor_bytes": record.tensor_bytes,
        "seconds": save.seconds,
        "median": save.median,
        "stragglers": save.stragglers,
        "missing": save.missing,
        "folded": save.folded,
        "phases": [{**asdict(phase), "rate": phase.rate} for phase in save.phases],
    }
    return {**fields, "ranks": [_rank(rank, tables[rank]) for rank in save.slowest]} if by_rank else fields


def _rank(rank: int, table: SpanTable) -> dict[str, Any]:
    phases = [{"phase": s.phase, "seconds": s.seconds, "wall": s.wall, "spans": s.count, "bytes": s.nbytes} for s in table.sums.values()]
    return {
        "rank": rank,
        "began": datetime.fromtimestamp(table.began, timezone.utc).isoformat(timespec="microseconds"),
        "seconds": table.seconds,
        "wall": table.wall,
        "folded": table.folded_count,
        "phases": phases,
    }
