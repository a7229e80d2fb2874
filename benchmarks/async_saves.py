"""The scenario ``async``: for how long saves in the background keep a trainer waiting, and how much they slow a training loop down."""

from __future__ import annotations

import glob
import shutil

from . import blocking, tasks
from .findings import Finding, at_most, medians
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell, turns
from .states import Recipe

EAGER = 1.15
"""Most that an eager call may take, in copies of the same bytes into warm memory."""
LAZY = 0.010
"""Most seconds of a lazy call."""
GAIN = 5.0
"""How many times as much DCP's saves must slow a training loop down."""
CLEAR = 0.02
"""Least slowdown by DCP that can be told from noise."""
STEPS, EVERY = 24, 8
CONTESTANTS = ("memcpy", "ckpt eager", "ckpt lazy", "dcp")
LOOPS = ("none", "ckpt lazy", "dcp")

Samples = dict[str, list[dict[str, float]]]


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Both parts, in one place."""
    return [blocked(settings, pool, place, tell), slowed(settings, pool, place, tell)]


def blocked(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    """Seconds that the trainer waits for a save, beside one copy of the rank's bytes into memory that is warm."""
    n = settings.ranks
    pool.run(tasks.prepare, on=n, recipe=Recipe(kind="sharded", ranks=n, size=settings.size * n))
    pool.run(blocking.settle, on=n)
    samples: Samples = {c: [] for c in CONTESTANTS}
    for repetition, contestant in turns(CONTESTANTS, settings.repeat):
        directory = place.fresh(contestant)
        found = _slowest(pool.run(blocking.block, on=n, contestant=contestant, directory=directory))
        tell(f"async on {n}, {place.label}: {contestant} call {found['call']:.3f} s, blocked {found['blocked']:.3f} s")
        place.fresh(contestant)
        if repetition > 0:
            samples[contestant].append(found)
    pool.run(blocking.close, on=n)
    mine = {c: medians(s) for c, s in samples.items()}
    copy = mine["memcpy"]["call"]
    rows = [
        (c, f"{m['call']:.4f}", f"{m['call'] / copy:.2f}", f"{m['blocked']:.4f}", f"{m['blocked'] / copy:.2f}", f"{m['durable']:.2f}")
        for c, m in mine.items()
    ]
    where = f"ranks {n}, {place.label}"
    checks = (
        at_most(f"eager call in copies of the same bytes: {where}", mine["ckpt eager"]["call"] / copy, EAGER),
        at_most(f"lazy call: {where}", 1000 * mine["ckpt lazy"]["call"], 1000 * LAZY, "ms"),
    )
    return Finding(
        scenario="async",
        title=f"the trainer waits, ranks {n}, {place.label}, {settings.size / 1e6:,.0f} MB per rank",
        columns=("", "call s", "copies", "call and step s", "copies", "durable s"),
        rows=rows,
        figures={"place": place.label, "medians": mine, "samples": samples},
        checks=checks,
    )


def slowed(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    """A training loop without saves, with ckpt's lazy saves and with DCP's."""
    n = settings.ranks
    nbytes = pool.run(blocking.build_training, on=n, ranks=n, size=settings.size // 4)[0]
    samples: Samples = {c: [] for c in LOOPS}
    for repetition, contestant in turns(LOOPS, min(settings.repeat, 3)):
        directory = place.fresh(f"loop-{contestant}")
        found = _slowest(pool.run(blocking.train, on=n, contestant=contestant, directory=directory, steps=STEPS, every=EVERY))
        tell(f"async on {n}, {place.label}: {STEPS} steps, saves {contestant}: {found['seconds']:.2f} s")
        for made in glob.glob(f"{glob.escape(directory)}-*"):
            shutil.rmtree(made)
        if repetition > 0:
            samples[contestant].append(found)
    pool.run(blocking.close, on=n)
    mine = {c: medians(s) for c, s in samples.items()}
    alone = mine["none"]["seconds"]
    slower = {c: m["seconds"] / alone - 1 for c, m in mine.items()}
    where = f"ranks {n}, {place.label}"
    clear = slower["dcp"] >= CLEAR
    ratio = max(slower["ckpt lazy"], 0.0) / slower["dcp"] if clear else 0.0
    rows = [(c, f"{m['seconds']:.2f}", f"{slower[c]:+.1%}", f"{m['calls']:.3f}", f"{m['ended']:.2f}") for c, m in mine.items()]
    return Finding(
        scenario="async",
        title=f"{STEPS} steps of training, a save every {EVERY}, ranks {n}, {place.label}, {nbytes / 1e6:,.0f} MB per rank",
        columns=("saves", "loop s", "slower by", "in calls s", "durable s"),
        rows=rows,
        figures={"place": place.label, "medians": mine, "slower": slower, "samples": samples},
        checks=(at_most(f"slowdown of training over DCP's: {where}", ratio, 1 / GAIN),) if clear else (),
        notes=() if clear else (f"DCP slows the loop by less than {CLEAR:.0%} here, or the machine is too noisy: not compared",),
    )


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(r[key] for r in ranks) for key in ranks[0]}
