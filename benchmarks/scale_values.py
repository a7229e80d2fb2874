"""Part of the scenario ``scale``: a state of a million plain values in one dict, saved, saved again and loaded in place.

Peak memory is what the process had at most during the call, less what it had right before it, when the state was there already. Beside it
what the values cost as JSON alone, and a file of ``torch.save``.
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import ckpt

from .findings import Finding, at_most
from .measure import cpu_seconds, reset_peak, resident
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

COUNT = 1_000_000
LOAD, MEMORY = 5.0, 300.0
"""Most CPU seconds and MB of a load."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Save and load float values under words, and ints under ints, which JSON keeps as pairs."""
    del settings
    kinds = ("words", "ints")
    words, ints = (pool.run(measure, on=1, directory=place.fresh(f"values-{kind}"), kind=kind, count=COUNT)[0] for kind in kinds)
    tell(f"scale: {COUNT:,} plain values load in {words['load'][0]:.2f} s CPU")
    names = {
        "save": "first save",
        "again": "second save",
        "load": "load in place",
        "json": "json.dumps and json.loads of the same",
        "torch": "torch.save and torch.load",
    }
    cells = [(what, *(f"{kind[key][part]:.{2 - 2 * part}f}" for kind in (words, ints) for part in (0, 1))) for key, what in names.items()]
    return [
        Finding(
            scenario="scale-values",
            title=f"{COUNT:,} plain values",
            columns=("", "words, CPU s", "peak MB", "ints, CPU s", "peak MB"),
            rows=cells,
            figures={"words": words, "ints": ints},
            checks=(
                at_most("load of a million plain values", words["load"][0], LOAD, "s"),
                at_most("load of a million values under ints", ints["load"][0], LOAD, "s"),
                at_most("memory of the load beyond the state", words["load"][1], MEMORY, "MB"),
            ),
        )
    ]


def measure(rank: Rank, *, directory: str, kind: str, count: int) -> dict[str, tuple[float, float]]:
    """CPU seconds and MB of each."""
    import torch

    alone = rank.groups[1]
    os.makedirs(directory)
    ckpt.save(f"{directory}/first", {"v": {"a": 1}}, job=ckpt.Job(process_group=alone))
    ckpt.load(f"{directory}/first", {"v": {"a": 1}}, job=ckpt.Job(process_group=alone))
    values: Any = {f"key{i}": i + 0.5 for i in range(count)} if kind == "words" else {i: i + 2 for i in range(count)}
    state, other = {"v": values}, {"v": dict.fromkeys(values, 0)}
    found = {
        "save": _cost(lambda: ckpt.save(f"{directory}/a", state, job=ckpt.Job(process_group=alone))),
        "again": _cost(lambda: ckpt.save(f"{directory}/b", state, job=ckpt.Job(process_group=alone))),
        "load": _cost(lambda: ckpt.load(f"{directory}/a", other, job=ckpt.Job(process_group=alone))),
        "json": _cost(lambda: json.loads(json.dumps(list(values.items())))),
        "torch": _cost(lambda: (torch.save(state, f"{directory}/t"), torch.load(f"{directory}/t", weights_only=False))),
    }
    if other != state:
        raise ValueError("what was loaded is not what was saved")
    return found


def _cost(work: Any) -> tuple[float, float]:
    gc.collect()
    memory, before = reset_peak(), cpu_seconds()
    work()
    return cpu_seconds() - before, (resident("VmHWM") - memory) / 1e6
