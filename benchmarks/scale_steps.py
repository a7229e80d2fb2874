"""Part of the scenario ``scale``: a run of many steps, as a job sees it after a save and at its start. The steps hold no tensors.

Asked is what the save path asks: which steps there are (the first time, and again after one more save), what is known of them for the
policies, and which go; and what a job asks at its start. The machine's limit beside it: one process opens and reads as many small files.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import replace
from typing import Any

from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, IndexFile
from ckpt.formats.native.paths import INDEX_NAMES
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps, Latest
from ckpt.runs.removal import infos
from ckpt.runs.step_listing import list_steps
from ckpt.runs.tiers import Tiers

from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

FEW, MANY = 1_000, 10_000
SAVE = 0.5
"""Most CPU seconds that retention takes after a save of the longer run."""
GROWTH = 1.1
"""Most that the exponent of its growth in steps may be."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Make a run of ten thousand steps and one of a thousand, and ask."""
    del settings
    few, many = (pool.run(measure, on=1, root=place.fresh(f"steps-{count}"), count=count)[0] for count in (FEW, MANY))
    grows = _exponent(few["retain"], many["retain"])
    tell(f"scale: retention among {MANY:,} steps {many['retain']:.2f} s CPU, growing as steps^{grows:.2f}")
    names = {
        "first": "list, the first time, CPU s",
        "again": "list again, after one save, CPU s",
        "infos": "facts for the policies, CPU s",
        "retain": "retention after a save, one step goes, CPU s",
        "restore": "find the newest to go on from, CPU s",
        "files": "the machine: open and read as many files, CPU s",
    }
    rows = [(what, f"{few[key]:.4f}", f"{many[key]:.4f}", f"{_exponent(few[key], many[key]):.2f}") for key, what in names.items()]
    counts = {"read_again": "records read by the list after a save", "read_restore": "records read to go on"}
    rows += [(what, str(few[key]), str(many[key]), "") for key, what in counts.items()]
    return [
        Finding(
            scenario="scale-steps",
            title=f"a run of {MANY:,} steps",
            columns=("", f"{FEW:,} steps", f"{MANY:,} steps", "exponent"),
            rows=rows,
            figures={"few": few, "many": many},
            checks=(
                at_most("retention after a save", many["retain"], SAVE, "s"),
                at_most("its exponent in steps", grows, GROWTH),
                at_most("records read by the list after a save", many["read_again"], 2),
                at_most("records read to go on", many["read_restore"], 2),
            ),
        )
    ]


def _exponent(few: float, many: float) -> float:
    return math.log(max(many, 1e-6) / max(few, 1e-6)) / math.log(MANY / FEW)


def measure(rank: Rank, *, root: str, count: int) -> dict[str, Any]:
    """CPU seconds and records read."""
    del rank
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    for n in range(count):
        make_step(root, n)
    time.sleep(2.1)  # records are believed by their times once these are older than file systems are exact
    found: dict[str, Any] = {}
    infos(list_steps(root)[:1])  # what is imported once does not count
    tiers = Tiers(root, EverySteps(1, start=1) | Latest(1))  # keeps all but step 0
    found["first"], steps = _timed(tiers.steps)
    make_step(root, count)
    (found["again"], steps), found["read_again"] = _records(lambda: _timed(tiers.steps))
    found["infos"], _ = _timed(lambda: infos(steps))
    make_step(root, count + 1)
    found["retain"], _ = _timed(tiers.retain_root)
    assert not os.path.exists(f"{root}/step-{0:08d}") and len(os.listdir(root)) == count + 1
    (found["restore"], rows), found["read_restore"] = _records(lambda: _timed(lambda: tiers.copies(None)))
    assert rows[0][0] == count + 1
    found["files"], _ = _timed(lambda: _read_all(root))
    return found


def make_step(root: str, number: int, *, reusable: bool = False) -> None:
    """A committed checkpoint, as far as listings look."""
    id = f"{number:016d}"
    record = CommitRecord(
        id=id,
        created="2026-01-01T00:00:00.000+00:00",
        writer="benchmark",
        world_size=64,
        index={name: IndexFile(path=f"index-{id}/{name}", size=0, digest="0" * 32) for name in INDEX_NAMES},
        tensor_bytes=1 << 40,
        reusable=reusable,
    )
    if number % 2:
        record = replace(record, metrics={"loss": 1 / (number + 1)})
    directory = f"{root}/step-{number:08d}"
    os.makedirs(directory)
    with open(f"{directory}/{COMMIT_PATH}", "wb") as file:
        file.write(record.to_bytes())


def _timed(ask: Any) -> tuple[float, Any]:
    before = cpu_seconds()
    answer = ask()
    return cpu_seconds() - before, answer


def _records(ask: Any) -> tuple[Any, int]:
    process = FaultyProcess()
    with wrap_backends(process.wrap):
        answer = ask()
    return answer, sum(line.startswith("read ") and COMMIT_PATH in line for line in process.log)


def _read_all(root: str) -> int:
    size = 0
    for entry in os.scandir(root):
        with open(f"{entry.path}/{COMMIT_PATH}", "rb") as file:
            size += len(file.read())
    return size
