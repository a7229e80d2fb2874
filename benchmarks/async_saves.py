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
"""How many times as long DCP's saves must block a training loop."""
STEPS, EVERY = 12, 2
CONTESTANTS = ("memcpy", "ckpt eager", "ckpt lazy", "dcp")
LOOPS = ("none", "ckpt lazy", "dcp")

Samples = dict[str, list[dict[str, float]]]


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All parts, in one place."""
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
    copy = mine["memcpy"]
    rows = [
        (c, *(cell for key in ("call", "cpu", "blocked") for cell in (f"{m[key]:.4f}", f"{m[key] / copy[key]:.2f}")), f"{m['durable']:.2f}")
        for c, m in mine.items()
    ]
    where = f"ranks {n}, {place.label}"
    checks = (
        at_most(f"eager call in copies of the same bytes: {where}", mine["ckpt eager"]["call"] / copy["call"], EAGER),
        at_most(f"CPU time of an eager call in copies of the same bytes: {where}", mine["ckpt eager"]["cpu"] / copy["cpu"], EAGER),
        at_most(f"lazy call: {where}", 1000 * mine["ckpt lazy"]["call"], 1000 * LAZY, "ms"),
    )
    return Finding(
        scenario="async",
        title=f"the trainer waits, ranks {n}, {place.label}, {settings.size / 1e6:,.0f} MB per rank",
        columns=("", "call s", "copies", "CPU s", "copies", "call and step s", "copies", "durable s"),
        rows=rows,
        figures={"place": place.label, "medians": mine, "samples": samples},
        checks=checks,
    )


def slowed(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    """A training loop without saves, with ckpt's lazy saves and with DCP's: for how long each save blocks it, and what it computes.

    Not by how much the loop takes longer: with as many ranks as cores that is noise, and what runs in the background takes from training.
    """
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
    saves = -(-STEPS // EVERY)
    ours, dcp = mine["ckpt lazy"], mine["dcp"]
    beyond = {c: (m["cpu"] - mine["none"]["cpu"]) / saves for c, m in mine.items()}
    where = f"ranks {n}, {place.label}"
    rows = [
        (
            c,
            *(f"{1000 * m[key]:.1f}" for key in ("computed", "call", "blocked")),
            f"{m['computed'] / dcp['computed']:.2f}",
            f"{m['blocked'] / dcp['blocked']:.2f}",
            f"{beyond[c]:.3f}",
            f"{m['seconds']:.2f}",
            f"{m['ended']:.2f}",
        )
        for c, m in mine.items()
    ]
    return Finding(
        scenario="async",
        title=f"{STEPS} steps of training, a save every {EVERY}, ranks {n}, {place.label}, {nbytes / 1e6:,.0f} MB per rank",
        columns=("saves", "computed ms", "call ms", "blocked ms", "of dcp's", "of dcp's", "more CPU s", "loop s", "durable s"),
        rows=rows,
        figures={"place": place.label, "medians": mine, "beyond": beyond, "samples": samples},
        checks=(
            at_most(f"what the trainer computes for a save, over DCP's: {where}", ours["computed"] / dcp["computed"], 1 / GAIN),
            at_most(f"what a save blocks training for, over DCP's: {where}", ours["blocked"] / dcp["blocked"], 1 / GAIN),
        ),
        notes=(
            "per save: computed, CPU time of the trainer's thread in the call; blocked, the call and the next step's wait for the capture; "
            "then both over DCP's; more CPU, what all threads of a rank compute beyond the loop without saves",
        ),
    )


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(r[key] for r in ranks) for key in ranks[0]}
