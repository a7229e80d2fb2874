"""How fast a run has read and written so far: what a dry run estimates seconds with. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from ckpt.errors import CkptError
from ckpt.formats.native.catalog import read_record
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.paths import step_number
from ckpt.formats.native.runlog import read_log
from ckpt.formats.native.spans import read_spans
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.tracing.spans import SpanTable

_NEWEST = 4
"""Steps of a run that are looked at, from the newest on: that of a save that still goes on has no spans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRate:
    """Bytes that one rank moves in a second, while the others do the same; ``measured`` says where that is known from."""

    bytes_per_second: float
    measured: str


def rate_of_loads(url: str) -> TransferRate | None:
    """Of the newest load in the log of the run that the checkpoint is a step of; None if there is none."""
    run, _, _ = url.rstrip("/").rpartition("/")
    try:
        entries = [entry for entry in read_log(open_backend(run)) if entry.kind == "load" and entry.error is None] if run else []
    except CkptError:
        return None
    for entry in reversed(entries):
        rate = _rate(entry.tables, ("read", "verify", "decode", "copy", "exchange"), "read")
        if rate is not None:
            return TransferRate(bytes_per_second=rate, measured=f"the run's log: a load by {entry.ranks} ranks")
    return None


def rate_of_saves(url: str) -> TransferRate | None:
    """Of the save at ``url``, if there is one, or of the newest step beside it whose spans were kept; None if there is none."""
    run, _, name = url.rstrip("/").rpartition("/")
    urls = [url]
    try:
        beside = [n.rstrip("/") for n in open_backend(run).list_dir("") if n.endswith("/")] if run else []
    except CkptError:
        beside = []
    steps = sorted(((number, n) for n in beside if n != name and (number := step_number(n)) is not None), reverse=True)
    urls += [join_url(run, step) for _, step in steps[:_NEWEST]]
    for one in urls:
        try:
            backend = open_backend(one)
            data = read_record(backend)
            tables = {} if data is None else read_spans(backend, CommitRecord.from_bytes(data, one))
        except CkptError:
            continue
        rate = _rate(tables, ("encode", "write", "sync"), "write")
        if rate is not None:
            return TransferRate(bytes_per_second=rate, measured=f"the spans of {one}")
    return None


def _rate(tables: Mapping[int, SpanTable], phases: Iterable[str], counted: str) -> float | None:
    """Bytes of the phase ``counted`` in each second from the first start of ``phases`` to their last end, on the middle rank."""
    rates = []
    for table in tables.values():
        sums = [table.sums[phase] for phase in phases if phase in table.sums]
        if counted in table.sums and table.sums[counted].nbytes:
            wall = max(s.last for s in sums) - min(s.first for s in sums)
            rates.append(1e6 * table.sums[counted].nbytes / max(1, wall))
    return median(rates) if rates else None
