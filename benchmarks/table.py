"""What an infrastructure lead asks, measured on two ranks of this machine: ``python -m benchmarks.table``. ``replay`` plays thousands.

Contestants take turns, every time beginning with another one. Each removes its files before the next one; the first turn does not count.
*stall*: what a background save keeps a training loop waiting, in the call and in the next step; raw bytes are written in the foreground.
*save*: until the files are synced. *load*: from a disk, without the page cache. *restart*: from the start of Python on all ranks until the
first step of training is over, the least of the turns. *requests*: files opened, listed, renamed, made and removed, of all ranks; one that
is opened again counts once. *host memory*: the peak of a rank beyond what it had, for each byte of its state.
"""

from __future__ import annotations

import glob
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import click
import numpy as np

from .measure import RankCost, Sample, cpu_seconds, peak_of
from .places import Place, machine, size_of
from .pool import Pool, Rank
from .replay import CONTESTANTS, COUNTER, commit, settle
from .report import aligned

RANKS = 2
LOOPS = {"ckpt": "ckpt lazy"}
"""A contestant's name in the training loop of ``async_saves``, where it differs."""
TIERS = ("memory", "node-local")
STEPS, EVERY = 12, 2
Figures = dict[str, dict[str, float]]


# ------------------------------------------------------------------------------------------------------------ on the ranks


def measured(rank: Rank, *, operation: Any, contestant: str, directory: str, count: bool) -> RankCost:
    """A save or a load that is timed, or one whose requests and memory are taken, too."""
    from . import tasks

    costs: list[RankCost] = []

    def act() -> None:
        costs.append(tasks.run(rank, operation=operation, contestant=contestant, directory=directory, check=True))

    if not count:
        act()
        return costs[0]
    COUNTER.begin(directory)
    peak = peak_of(act)
    COUNTER.directory = None
    costs[0].said.update(requests=len(COUNTER.touched), peak=peak)
    return costs[0]


def save_training(rank: Rank, *, contestant: str, directory: str) -> dict[str, str]:
    """Save the training that was built; the digests of its tensors."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    import ckpt

    from . import async_saves
    from .contestants import CONTESTANTS as KNOWN
    from .states import digests_of

    job, tree = async_saves.local_job(rank), {"model": rank.kept["model"], "optimizer": rank.kept["optimizer"]}
    if contestant == "ckpt":
        ckpt.save(directory, tree, job=ckpt.Job(process_group=job.group))
    elif contestant == "dcp":
        dcp_save(async_saves.dcp_state(rank), checkpoint_id=directory, process_group=job.group)
    else:
        KNOWN[contestant].save(job, directory)
    return digests_of(job.state.local)


def restart(rank: Rank, *, contestant: str, directory: str, size: int) -> tuple[dict[str, str], float]:
    """Build the training, load it and train a step; the digests that the load brought, and the CPU seconds of this process."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    import ckpt

    from . import async_saves
    from .contestants import CONTESTANTS as KNOWN
    from .states import digests_of

    async_saves.build_training(rank, ranks=RANKS, size=size)
    job, tree = async_saves.local_job(rank), {"model": rank.kept["model"], "optimizer": rank.kept["optimizer"]}
    job.state.clear()
    if contestant == "ckpt":
        ckpt.load(directory, tree, job=ckpt.Job(process_group=job.group))
    elif contestant == "dcp":
        into = async_saves.dcp_state(rank)
        dcp_load(into, checkpoint_id=directory, process_group=job.group)
        set_state_dict(tree["model"], tree["optimizer"], model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    else:
        KNOWN[contestant].load(job, directory)
    loaded = digests_of(async_saves.local_job(rank).state.local)
    async_saves._step(rank)
    return loaded, cpu_seconds()


# --------------------------------------------------------------------------------------------------------------- the parts


def moved(contestants: Sequence[str], places: Sequence[Place], size: int, repeat: int) -> Figures:
    """Saves until durable, and cold loads."""
    from . import tasks
    from .scenarios import turns
    from .states import Recipe

    samples: dict[tuple[str, str, str], list[Sample]] = {}
    with Pool(RANKS) as pool:
        pool.run(settle, on=RANKS)
        total = pool.run(tasks.prepare, on=RANKS, recipe=Recipe(kind="sharded", ranks=RANKS, size=RANKS * size))[0][1]
        stored = {}
        for repetition, contestant in turns(contestants, repeat):
            for tier, place in zip(TIERS, places, strict=True):
                directory = place.fresh(contestant)
                for operation in ("save", "load"):
                    arguments = {"operation": operation, "contestant": contestant, "directory": directory, "count": repetition == 0}
                    sample = Sample.of(pool.run(measured, on=RANKS, **arguments))
                    samples.setdefault((contestant, operation, tier), []).append(sample)
                    place.cool(directory)
                stored[contestant] = size_of(directory)
                place.fresh(contestant)
    figures: Figures = {contestant: {"bytes written / state": stored[contestant] / total} for contestant in contestants}
    for (contestant, operation, tier), (counted, *timed) in samples.items():
        mine = figures[contestant]
        for q in (50, 99):
            mine[f"{operation}, {tier}, s, p{q}"] = float(np.percentile([s.wall for s in timed], q))
        mine[f"{operation}, {tier}, GB/s"] = total / 1e9 / mine[f"{operation}, {tier}, s, p50"]
        mine[f"{operation}, {tier}, CPU s per GB"] = median(s.cpu for s in timed) / total * 1e9
        mine[f"{operation}, {tier}, others' share of the CPU"] = median(s.elsewhere for s in timed)
        mine[f"{operation}, requests"] = sum(said["requests"] for said in counted.said)
        mine[f"{operation}, host memory / state"] = max(said["peak"] for said in counted.said) * RANKS / total
    return figures


def stalls(contestants: Sequence[str], place: Place, size: int, repeat: int) -> Figures:
    """Milliseconds of a step, and for how long a save stops training."""
    from . import async_saves
    from .scenarios import turns

    blocked: dict[str, list[dict[str, float]]] = {}
    with Pool(RANKS) as pool:
        pool.run(async_saves.build_training, on=RANKS, ranks=RANKS, size=size)
        for repetition, contestant in turns(["none", *contestants], repeat):
            directory = place.fresh("loop")
            loop = {"contestant": LOOPS.get(contestant, contestant), "directory": directory, "steps": STEPS, "every": EVERY}
            made = pool.run(async_saves.train, on=RANKS, **loop)
            for folder in glob.glob(f"{glob.escape(directory)}-*"):
                shutil.rmtree(folder)
            if repetition > 0:
                blocked.setdefault(contestant, []).append(max(made, key=lambda one: one["blocked"]))
        pool.run(async_saves.close, on=RANKS)
    step = median(one["seconds"] for one in blocked.pop("none")) / STEPS
    stall = {contestant: median(one["blocked"] for one in made) for contestant, made in blocked.items()}
    return {
        c: {"step, ms": 1e3 * step, "stall, ms": 1e3 * seconds, "stall, % of a step": 100 * seconds / step} for c, seconds in stall.items()
    }


def restarts(contestants: Sequence[str], places: Sequence[Place], size: int, repeat: int) -> Figures:
    """Seconds from the start of the ranks until the first step is over."""
    from . import async_saves
    from .scenarios import turns

    saved: dict[tuple[str, str], Any] = {}
    figures: Figures = {contestant: {} for contestant in contestants}
    with Pool(RANKS) as pool:
        pool.run(async_saves.build_training, on=RANKS, ranks=RANKS, size=size)
        for tier, place in zip(TIERS, places, strict=True):
            for contestant in contestants:
                arguments = {"contestant": contestant, "directory": place.fresh(f"kept-{contestant}")}
                saved[contestant, tier] = pool.run(save_training, on=RANKS, **arguments)
    for tier, place in zip(TIERS, places, strict=True):
        for _, contestant in turns(contestants, repeat - 1):
            directory = f"{place.path}/kept-{contestant}"
            place.cool(directory)
            began = time.monotonic()
            with Pool(RANKS) as pool:
                made = pool.run(restart, on=RANKS, contestant=contestant, directory=directory, size=size)
                seconds = time.monotonic() - began
            if [loaded for loaded, _ in made] != saved[contestant, tier]:
                raise ValueError(f"{contestant} did not load what it saved: {directory}")
            mine, cpu = figures[contestant], sum(cpu for _, cpu in made)
            for key, value in ((f"restart, {tier}, s", seconds), (f"restart, {tier}, CPU s", cpu)):
                mine[key] = min(value, mine.get(key, value))
    return figures


@click.command(context_settings={"show_default": True})
@click.option("--size", type=click.IntRange(1), default=128, help="MB of state per rank.")
@click.option("--repeat", type=click.IntRange(1), default=10, help="Saves and loads that count.")
@click.option("--restarts", "again", type=click.IntRange(1), default=2, help="Restarts.")
@click.option("--memory", default="/dev/shm", type=click.Path(exists=True, file_okay=False), help="A directory in memory.")
@click.option("--local", default=tempfile.gettempdir(), type=click.Path(exists=True, file_okay=False), help="A directory on a disk.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Write all figures to this file.")
def main(*, size: int, repeat: int, again: int, memory: str, local: str, json_path: str | None) -> None:
    """Measure ckpt, DCP, torch_checkpointing (where it is installed) and raw bytes on two ranks."""
    from .contestants import CONTESTANTS as KNOWN

    contestants, nbytes = [name for name in CONTESTANTS if name in KNOWN], 1_000_000 * size
    with ExitStack() as stack:
        places = [stack.enter_context(Place(directory)) for directory in (memory, local)]
        parts: list[Callable[[], Figures]] = [
            lambda: moved(contestants, places, nbytes, repeat),
            lambda: stalls(contestants, places[0], nbytes, 2),
            lambda: restarts(contestants, places, nbytes, again),
        ]
        began = machine()
        figures: Figures = {contestant: {} for contestant in contestants}
        for part in parts:
            for contestant, got in part().items():
                figures[contestant] |= got
                click.echo(f"{contestant}: {', '.join(f'{key} {value:.3g}' for key, value in got.items())}", err=True)
    command = " ".join(["python -m benchmarks.table", *sys.argv[1:]])
    document = {"command": command, "commit": commit(), "machine": began, "ranks": RANKS, "MB per rank": size, "figures": figures}
    document |= {"filesystems": [place.label for place in places]}
    click.echo(f"{command}, commit {commit()}, {began}, {', '.join(place.label for place in places)}")
    rows = [(key, *(f"{figures[c][key]:.3g}" for c in contestants)) for key in figures[contestants[0]]]
    click.echo("\n".join(aligned([("", *contestants), *rows])))
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    main()
