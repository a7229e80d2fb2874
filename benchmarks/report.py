"""Medians, ratios, the checks that must hold, and the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from .scenarios import Measurement

BALANCE = 1.05
"""Most that one rank may write of a replicated state, in mean shares."""
READ = 1.02
"""Most that all ranks may read of a checkpoint in another layout, in bytes per byte that they need."""
WORTH = 100_000_000
"""Bytes of a state whose chunks are large enough for ranks on a file system to share them."""
DISTURBED = 0.15
"""With more than this part of the machine's CPU time spent by others, wall times say little, and CPU times are too high."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Something that must hold; ``detail`` has the numbers."""

    name: str
    ok: bool
    detail: str


def rows_of(measurements: Iterable[Measurement]) -> list[Row]:
    """One row for each measurement: medians, ratios to the raw and DCP measurement of the same kind (None without one), and all samples."""
    listed = list(measurements)
    plain = {(_kind(m), m.contestant): _medians(m) for m in listed}
    return [_row(m, plain) for m in listed]


def _kind(m: Measurement) -> tuple[str, str, str, str]:
    return m.scenario, m.place, m.ranks, m.operation


def _medians(m: Measurement) -> dict[str, float]:
    return {what: median(getattr(s, what) for s in m.samples) for what in ("wall", "cpu", "elsewhere")}


def _row(m: Measurement, medians: Mapping[tuple[Any, str], dict[str, float]]) -> Row:
    mine, last = medians[_kind(m), m.contestant], m.samples[-1]
    row: Row = {"scenario": m.scenario, "place": m.place, "ranks": m.ranks, "operation": m.operation, "contestant": m.contestant}
    row |= {"state_bytes": m.state_bytes, "stored_bytes": m.stored, **mine, "bytes_per_second": m.state_bytes / mine["wall"]}
    row |= {"written": sum(last.written), "read": sum(last.read), "written_by_rank": last.written, "read_by_rank": last.read}
    row["written_max_over_mean"] = max(last.written) / mean(last.written) if any(last.written) else None
    row["read_over_state"] = sum(last.read) / m.state_bytes
    for rival in ("raw", "dcp"):
        other = medians.get((_kind(m), rival))
        for what in ("wall", "cpu"):
            row[f"{what}_over_{rival}"] = mine[what] / other[what] if other is not None and other[what] > 0 else None
    return row | {"said": last.said, "samples": [{"wall": s.wall, "cpu": s.cpu, "elsewhere": s.elsewhere} for s in m.samples]}


# -------------------------------------------------------------------------------------------------------------- checks


def checks_of(rows: Sequence[Row]) -> list[Check]:
    """All checks that what was measured allows."""
    found = []
    for row in rows:
        if row["contestant"] != "ckpt":
            continue
        where = f"{row['scenario']}, ranks {row['ranks']}, {row['place']}"
        if row["cpu_over_dcp"] is not None:
            name = f"{row['operation']} CPU seconds below DCP's: {where}"
            detail = f"{row['cpu']:.3f} s, {row['cpu_over_dcp']:.2f} of DCP's" + _disturbed(row)
            found.append(Check(name=name, ok=row["cpu_over_dcp"] < 1, detail=detail))
        if row["scenario"] == "replicated" and row["operation"] == "save":
            found.append(_balance(row, where))
        if row["scenario"] == "reshard" and row["state_bytes"] >= WORTH:
            found.append(_read(row, where))
    return found


def _disturbed(row: Row) -> str:
    return f"; other processes had {row['elsewhere']:.0%} of the machine" if row["elsewhere"] > DISTURBED else ""


def _balance(row: Row, where: str) -> Check:
    written = [said["rank_bytes"] for said in row["said"]]
    ratio = max(written) / mean(written)
    return Check(name=f"bytes per rank max/mean <= {BALANCE}: {where}", ok=ratio <= BALANCE, detail=f"{ratio:.4f}")


def _read(row: Row, where: str) -> Check:
    ratio = sum(said["read"] for said in row["said"]) / sum(said["needed"] for said in row["said"])
    return Check(name=f"bytes read / needed <= {READ}: {where}", ok=ratio <= READ, detail=f"{ratio:.4f}")


# -------------------------------------------------------------------------------------------------------------- tables

COLUMNS = ("", "wall s", "GB/s", "CPU s", "wall/raw", "CPU/raw", "wall/DCP", "CPU/DCP", "written MB", "read MB", "others' CPU")


def tables(rows: Sequence[Row]) -> list[str]:
    """A table for each operation of each scenario and place, as lines of text."""
    lines: list[str] = []
    kinds = list(dict.fromkeys((r["scenario"], r["place"], r["ranks"], r["operation"], r["state_bytes"]) for r in rows))
    for kind in kinds:
        scenario, place, ranks, operation, state_bytes = kind
        mine = [r for r in rows if (r["scenario"], r["place"], r["ranks"], r["operation"], r["state_bytes"]) == kind]
        title = f"{scenario} {operation}, ranks {ranks}, {place}: {state_bytes / 1e6:,.1f} MB"
        lines += ["", title, *aligned([COLUMNS, *map(_cells, mine)])]
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    ratios = [row[f"{what}_over_{rival}"] for rival in ("raw", "dcp") for what in ("wall", "cpu")]
    return (
        row["contestant"],
        f"{row['wall']:.3f}",
        f"{row['bytes_per_second'] / 1e9:.2f}",
        f"{row['cpu']:.3f}",
        *("-" if r is None else f"{r:.2f}" for r in ratios),
        f"{row['written'] / 1e6:,.1f}",
        f"{row['read'] / 1e6:,.1f}",
        f"{row['elsewhere']:.0%}" + (" !" if row["elsewhere"] > DISTURBED else ""),
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first flush left, all others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows]
