"""The scenario ``live-push``: four trainers (FSDP2) give a model in bfloat16 to two engines (TP 2), on one machine.

*ckpt* is ``Source.publish`` and ``Sink.take``; *ckpt in place* the same with ``switch="in-place"``; *ckpt tcp* without what processes of
one machine share; *reshard* the call inside one job. *gather* is what TRL, verl and OpenRLHF do: ``full_tensor()`` on all trainers, then a
broadcast of each whole tensor from the first to all engines, which copy their parts. *sockets* is the floor of TCP: the same bytes over
loopback between the same processes, nothing checked. *memcpy* is that of memory: each engine copies what it needs from its own memory.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import live_job
from .findings import Finding, at_most, medians
from .live_job import ENGINES, TRAINERS, Groups, Side
from .measure import RankCost, Sample, cost_of
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell, turns

SECRET = "benchmark"
TIMEOUT = 60.0
PIECE = 4 << 20
WORLD = TRAINERS + ENGINES
BLOCKING = ("eager", "lazy", "memcpy")
STEPS = 1_000_000
"""The first step of what is published to nobody."""
WARM_STEPS = 2_000_000
"""The first step of pushes that are not counted,"""
WARM = 3
"""and how many there are: a source fills so many segments in turn (``keep`` and one), and fresh memory costs more than the copy into it."""
PAUSE = 2.0
"""Seconds of a forward and backward pass."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """In processes of its own, whatever the ranks of the other scenarios are."""
    nbytes = settings.size * settings.ranks
    with Pool(WORLD) as own:
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        own.run(prepare, on=WORLD, nbytes=nbytes)
        ports = [port for port in own.run(listen, on=WORLD) if port]
        own.run(connect, on=WORLD, ports=ports)
        addresses = own.run(open_sources, on=WORLD)[0]
        own.run(open_sinks, on=WORLD, addresses=addresses)
        moved = sum(own.run(needed, on=WORLD))
        for step in range(WARM_STEPS, WARM_STEPS + WARM):
            for name in KINDS:
                own.run(push, on=WORLD, name=name, step=step)
        for step, (repetition, name) in enumerate(turns(list(CONTESTANTS), settings.repeat)):
            sample = Sample.of(own.run(push, on=WORLD, name=name, step=step))
            tell(f"push by {name}: {sample.wall:.2f} s, {sample.cpu:.2f} s CPU")
            if repetition > 0:
                blocked = max(s.get("blocked", 0.0) for s in sample.said)
                samples[name].append({"wall": sample.wall, "cpu": sample.cpu, "elsewhere": sample.elsewhere, "blocked": blocked})
        blocked: dict[str, list[dict[str, float]]] = {name: [] for name in BLOCKING}
        for step, (repetition, name) in enumerate(turns(list(BLOCKING), settings.repeat), STEPS):
            seconds = max(own.run(block, on=WORLD, name=name, step=step))
            tell(f"blocked by {name}: {seconds:.3f} s")
            if repetition > 0:
                blocked[name].append({"seconds": seconds})
        own.run(close, on=WORLD)
    return [
        _table(moved, {n: medians(s) for n, s in samples.items()}),
        _blocked(moved, {n: medians(s)["seconds"] for n, s in blocked.items()}),
    ]


def _table(nbytes: int, mine: dict[str, dict[str, float]]) -> Finding:
    def over(name: str, floor: str, key: str = "wall") -> float:
        return mine[name][key] / mine[floor][key]

    rows = [
        (n, f"{m['wall']:.3f}", f"{m['cpu']:.2f}", *(f"{over(n, f):.2f}" for f in ("memcpy", "sockets", "gather")), f"{m['blocked']:.3f}")
        for n, m in mine.items()
    ]
    return Finding(
        scenario="live-push",
        title=f"FSDP {TRAINERS} → TP {ENGINES}, {nbytes / 1e6:,.0f} MB of bfloat16",
        columns=("", "wall s", "CPU s", "/ memcpy", "/ sockets", "/ gather", "blocked s"),
        rows=rows,
        figures={"bytes": nbytes, "medians": mine},
        checks=[
            at_most("push on one machine in copies of memory", over("ckpt", "memcpy"), 2.0),
            at_most("push on one machine in gathers and broadcasts", over("ckpt", "gather"), 0.5),
            at_most("push over TCP in plain sockets", over("ckpt tcp", "sockets"), 1.4),
        ],
        notes=("blocked: in publish, on the slowest trainer",),
    )


def _blocked(nbytes: int, seconds: dict[str, float]) -> Finding:
    over = {name: s / seconds["memcpy"] for name, s in seconds.items()}
    return Finding(
        scenario="live-push",
        title=f"a trainer is blocked while it publishes {nbytes / TRAINERS / 1e6:,.0f} MB on each of {TRAINERS} ranks",
        columns=("", "s", "/ memcpy"),
        rows=[(name, f"{s:.3f}", f"{over[name]:.2f}") for name, s in seconds.items()],
        figures={"bytes": nbytes, "seconds": seconds},
        checks=[
            at_most("blocked by an eager publish in copies of memory", over["eager"], 1.15),
            at_most("blocked by a lazy publish in copies of memory", over["lazy"], 0.15),
        ],
        notes=(f"lazy: the call, and what fence() waits for {PAUSE:g} s later; memcpy: each rank copies its part into warm memory",),
    )


# ------------------------------------------------------------------------------------------------------------ in a rank


def prepare(rank: Rank, *, nbytes: int) -> int:
    """This rank's side, its memory touched."""
    groups = rank.kept["groups"] = Groups.of()
    wanted = live_job.shapes(nbytes)
    trains = rank.number < TRAINERS
    side = live_job.trainer(wanted, rank.number, groups.mesh) if trains else live_job.engine(wanted, rank.number - TRAINERS, TRAINERS)
    side.fill(0)
    if not trains:
        side.kept["copy"] = {name: t.clone() for name, t in side.tensors.items()}
    rank.kept["side"] = side
    gc.collect()
    gc.freeze()
    return side.nbytes


def needed(rank: Rank) -> int:
    return rank.kept["side"].nbytes if rank.number >= TRAINERS else 0


def listen(rank: Rank) -> int | None:
    """Engines listen for the floor of TCP."""
    if rank.number < TRAINERS:
        return None
    rank.kept["listener"] = listener = socket.create_server(("127.0.0.1", 0))
    return int(listener.getsockname()[1])


def connect(rank: Rank, *, ports: list[int]) -> None:
    if rank.number < TRAINERS:
        streams = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    else:
        streams = [rank.kept["listener"].accept()[0] for _ in range(TRAINERS)]
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rank.kept["streams"] = streams


KINDS: dict[str, dict[str, Any]] = {"ckpt": {}, "ckpt in place": {"switch": "in-place"}, "ckpt tcp": {}}
"""Each has a source and a sink of its own; keyword arguments of the sink."""


def open_sources(rank: Rank) -> dict[str, str]:
    from ckpt.live import Source

    if rank.number >= TRAINERS:
        return {}
    side: Side = rank.kept["side"]
    group = rank.kept["groups"].trainers
    for kind in KINDS:
        side.kept[kind] = Source(
            f"tcp://127.0.0.1:0/{kind.replace(' ', '-')}", side.state, process_group=group, secret=SECRET, timeout=TIMEOUT
        )
    return {kind: side.kept[kind].address for kind in KINDS}


def open_sinks(rank: Rank, *, addresses: dict[str, str]) -> None:
    from ckpt.live import Sink

    if rank.number < TRAINERS:
        return
    side: Side = rank.kept["side"]
    group = rank.kept["groups"].engines
    for kind, options in KINDS.items():
        side.kept[kind] = Sink(
            addresses[kind], into=side.state, layout=side.layout, process_group=group, secret=SECRET, timeout=TIMEOUT, **options
        )


def close(rank: Rank) -> None:
    for kind in KINDS:
        rank.kept["side"].kept[kind].close()


class WrongPushError(RuntimeError):
    """What arrived is not what was pushed."""


def push(rank: Rank, *, name: str, step: int) -> RankCost:
    """One push of new values. Filling, clearing and comparing are not counted.

    Raises:
        WrongPushError: an engine has other values.
    """
    side: Side = rank.kept["side"]
    trains = rank.number < TRAINERS
    if trains:
        side.fill(step)
    elif name == "memcpy":
        for tensor in side.kept["copy"].values():
            tensor.add_(0)  # warm, like the trainers' memory that has just been written
    else:
        side.clear()
    gc.collect()
    dist.barrier(rank.kept["groups"].both)
    cost = cost_of(lambda: CONTESTANTS[name](rank, side, step) or {})
    dist.barrier(rank.kept["groups"].both)
    if not trains and name not in ("memcpy", "sockets") and (wrong := side.wrong(step)) is not None:
        raise WrongPushError(f"{name}: {wrong} is not that of step {step}")
    return cost


def block(rank: Rank, *, name: str, step: int) -> float:
    """Seconds that a trainer is blocked; the whole job takes part."""
    side: Side = rank.kept["side"]
    groups: Groups = rank.kept["groups"]
    if rank.number >= TRAINERS:
        return 0.0
    if "own copy" not in side.kept:
        side.kept["own copy"] = {n: t.clone() for n, t in side.tensors.items()}
    gc.collect()
    dist.barrier(groups.trainers)
    began = time.monotonic()
    if name == "memcpy":
        for n, tensor in side.tensors.items():
            side.kept["own copy"][n].copy_(tensor)
        return time.monotonic() - began
    publication = side.kept["ckpt"].publish(step, capture=name)
    seconds = time.monotonic() - began
    if name == "lazy":
        time.sleep(PAUSE)
        began = time.monotonic()
        publication.fence()
        seconds += time.monotonic() - began
    publication.result()
    dist.barrier(groups.trainers)
    return seconds


def _pushed(kind: str) -> Callable[[Rank, Side, int], dict[str, Any] | None]:
    def act(rank: Rank, side: Side, step: int) -> dict[str, Any] | None:
        if rank.number >= TRAINERS:
            os.environ["CKPT_LIVE_LOCAL"] = "off" if kind == "ckpt tcp" else "on"
            sink = side.kept[kind]
            sink.take(newer_than=sink.version, timeout=TIMEOUT)
            return {"take": sink.report.seconds}
        began = time.monotonic()
        side.kept[kind].publish(step, capture="eager")
        return {"blocked": time.monotonic() - began}

    return act


def _resharded(rank: Rank, side: Side, step: int) -> None:
    from ckpt.live import reshard

    trains = rank.number < TRAINERS
    old, new = (side.state, None) if trains else (None, side.state)
    reshard(old, new, new_layout=side.layout, process_group=rank.kept["groups"].both, timeout=TIMEOUT)


def _gathered(rank: Rank, side: Side, step: int) -> None:
    groups: Groups = rank.kept["groups"]
    for name, shape in side.shapes.items():
        if rank.number < TRAINERS:
            tensor: DTensor = side.state["model"][name]
            whole = tensor.full_tensor()
            if rank.number == 0:
                dist.broadcast(whole, 0, group=groups.senders)
        else:
            whole = torch.empty(shape, dtype=torch.bfloat16)
            dist.broadcast(whole, 0, group=groups.senders)
            side.tensors[name].copy_(whole[side.blocks[name]])


def _sent(rank: Rank, side: Side, step: int) -> None:
    """Every trainer sends each engine a fourth of what that needs, from one buffer into another."""
    if "buffer" not in side.kept:
        side.kept["buffer"] = bytearray(max(PIECE, 1))
    share = live_job.engine_share(side.shapes)
    buffer = memoryview(side.kept["buffer"])

    def work(stream: socket.socket) -> None:
        left = share
        while left:
            part = buffer[: min(left, PIECE)]
            if rank.number < TRAINERS:
                stream.sendall(part)
                left -= len(part)
            else:
                left -= stream.recv_into(part)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in rank.kept["streams"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _copied(rank: Rank, side: Side, step: int) -> None:
    if rank.number >= TRAINERS:
        for name, tensor in side.tensors.items():
            tensor.copy_(side.kept["copy"][name])


CONTESTANTS: dict[str, Callable[[Rank, Side, int], dict[str, Any] | None]] = {
    **{kind: _pushed(kind) for kind in KINDS},
    "reshard": _resharded,
    "gather": _gathered,
    "sockets": _sent,
    "memcpy": _copied,
}
