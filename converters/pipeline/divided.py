"""A conversion that several processes divide among them, and that communicate: the first one begins and finishes it, each writes its files.

Invariants: nobody writes before the first process has begun, and that one finishes only when every process has said that its files are
durable. The files that are left at the begin are divided, not all: after a kill, any number of processes resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt.converters.select.selection import OutputSet
from ckpt.errors import CkptError, ConsistencyError, MismatchError, RankFailedError, UsageError
from ckpt.formats.native.writer import replacement_noticed
from ckpt.net.channel import Row
from ckpt.net.divided_work import DividedWork
from ckpt.plan.machines import balanced, bytes_of
from ckpt.telemetry.callbacks import ProgressCallback

from .conversion import Conversion
from .target import OutputPlan

log = logging.getLogger("ckpt")

Part = tuple[int, int] | DividedWork
"""Number of this process and how many there are, which do not communicate; or the work of processes that do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFiles:
    """What was written of a plan: files, bytes of them, bytes read of the sources; ``finished`` says whether the checkpoint exists."""

    plan: OutputPlan
    files: int
    bytes: int
    read: int
    finished: bool


def write_divided(conversion: Conversion, work: DividedWork, progress: ProgressCallback | None) -> WrittenFiles:
    """Write the conversion, together with the other processes of ``work``. Every process gives the counts of all."""
    if conversion.name is not None:
        text = f"{conversion.format.name} writes one file, and a file is written by one process"
        raise UsageError(text, where=conversion.url, hint="run the command in one process; --threads says how many threads it has")
    plans: list[OutputPlan] = []

    def begin(rows: dict[int, Row]) -> Row:
        _check_same(rows)
        plans.append(conversion.begin((0, 1)))
        left = conversion.missing(plans[0])
        if left and len(left) < work.count:
            text = "%d of %d processes have nothing to write: %d files are left. Smaller ones (--shard-size) divide better"
            log.warning(text, work.count - len(left), work.count, len(left))
        return {"id": conversion.id, "ended": conversion.has_ended, "left": left}

    begun = work.agree("begin", lambda: {"digest": conversion.digest}, begin)
    plan = plans[0] if plans else conversion.join(begun["id"], ended=begun["ended"])
    sizes = [plan.files[number].size for number in begun["left"]]
    shares = balanced(sizes, work.count)
    mine = [begun["left"][n] for n in shares[work.number]]

    def write() -> Row:
        with replacements_noticed(conversion.chosen):
            # What a lost process has made durable counts as written, and is not written again.
            again = set(conversion.missing(plan)) if work.repeats else mine
            read = conversion.write(plan, [n for n in mine if n in again], progress=report)
        return {"files": len(mine), "bytes": sum(plan.files[i].size for i in mine), "read": read}

    def finish(rows: dict[int, Row]) -> Row:
        return {**_sums(rows), "finished": conversion.finish(plan, again=True)}

    try:
        with work.shown(bytes_of(sizes, shares), progress) as report:
            return WrittenFiles(plan=plan, **work.agree("write", write, finish))
    except CkptError as err:
        if isinstance(err, MismatchError) or (isinstance(err, RankFailedError) and err.cause in _mismatches()):
            work.agree("discard", dict, lambda rows: conversion.discard(plan))
        raise


def _check_same(rows: dict[int, Row]) -> None:
    (first, expected), *others = rows.items()
    for rank, row in others:
        if row != expected:
            raise ConsistencyError(
                f"processes {first} and {rank} do not see the same source, or have other versions of ckpt",
                hint="give all of them a source on storage that they share; let nobody write to it meanwhile",
            )


def _sums(rows: dict[int, Row]) -> dict[str, Any]:
    return {name: sum(row[name] for row in rows.values()) for name in ("files", "bytes", "read")}


def _mismatches() -> set[str]:
    """Names of the class and those below it."""
    names, rest = set[str](), [MismatchError]
    while rest:
        one = rest.pop()
        names.add(one.__name__)
        rest += one.__subclasses__()
    return names


@contextmanager
def replacements_noticed(chosen: OutputSet) -> Iterator[None]:
    """Around reads of what was chosen: a checkpoint that was replaced meanwhile is an error that says so."""
    with ExitStack() as watched:
        for catalog in chosen.catalogs:
            watched.enter_context(replacement_noticed(catalog))
        yield
