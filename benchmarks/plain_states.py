"""The last part of the scenario ``async``: dicts of tensors and of DTensors, as every ``state_dict()`` gives them, beside a module and its
optimizer that have the same bytes. A training loop changes plain tensors without an optimizer's step, so they are copied in the call."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.observe.history import read_save

from . import blocking
from .findings import Finding, at_most, medians
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell, turns

WIDTH = 1024
LIMIT = 1.1
"""Most CPU time of a plain state's save, in that of the module's."""
UNACCOUNTED = 0.05
"""Most of a save's time in which no span says what is done."""
BLOCKED = 1.0
"""Most seconds that a save blocks the caller, in those of DCP's: both copy plain tensors in the call."""
PLAIN = ("tensors", "DTensors")
STATES = ("module", *PLAIN)
CONTESTANTS = (*((kind, "waits") for kind in STATES), *((kind, "goes on") for kind in STATES), *((kind, "dcp") for kind in PLAIN))

Samples = dict[str, list[dict[str, float]]]


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    """Every state saved by a caller that waits, by one that never does, and by DCP."""
    n = settings.ranks
    nbytes = pool.run(build, on=n, ranks=n, size=settings.size)[0]
    names = [f"{kind}, {how}" for kind, how in CONTESTANTS]
    samples: Samples = {name: [] for name in names}
    for repetition, name in turns(names, settings.repeat):
        kind, how = CONTESTANTS[names.index(name)]
        found = pool.run(save, on=n, kind=kind, how=how, directory=place.fresh(name))
        worst = {key: max(f[key] for f in found) for key in found[0]} | {"cpu": sum(f["cpu"] for f in found)}
        tell(f"async on {n}, {place.label}: {name}: {worst['cpu']:.3f} s CPU, fence {worst['fence']:.3f} s")
        place.fresh(name)
        if repetition > 0:
            samples[name].append(worst)
    pool.run(blocking.close, on=n)
    mine = {name: medians(s) for name, s in samples.items()}
    return _finding(mine, samples, f"ranks {n}, {place.label}", nbytes)


def _finding(mine: dict[str, dict[str, float]], samples: Samples, where: str, nbytes: int) -> Finding:
    rows, checks = [], []
    for (kind, how), m in zip(CONTESTANTS, mine.values(), strict=True):
        module, dcp = mine.get(f"module, {how}"), mine.get(f"{kind}, dcp")
        over_module = m["cpu"] / module["cpu"] if module is not None else None
        over_dcp = m["cpu"] / dcp["cpu"] if dcp is not None else None
        seconds = [f"{m[key]:.4f}" for key in ("call", "blocked", "fence", "cpu")]
        spans = "-" if how == "dcp" else f"{100 * m['unaccounted']:.1f}"
        rows.append((kind, how, *seconds, *("-" if r is None else f"{r:.2f}" for r in (over_module, over_dcp)), spans))
        if how == "dcp" or kind == "module":
            continue
        assert over_module is not None and over_dcp is not None and dcp is not None
        checks.append(at_most(f"CPU time in that of a module's save, {kind}, caller {how}: {where}", over_module, LIMIT))
        checks.append(at_most(f"CPU time of the whole save over DCP's, {kind}, caller {how}: {where}", over_dcp, 1.0))
        checks.append(at_most(f"share of the save without a span, {kind}, caller {how}: {where}", m["unaccounted"], UNACCOUNTED))
        checks.append(
            at_most(f"what a save blocks the caller for, over DCP's, {kind}, caller {how}: {where}", m["call"] / dcp["call"], BLOCKED)
        )
    return Finding(
        scenario="async",
        title=f"plain states beside a module, {where}, {nbytes / 1e6:,.0f} MB per rank",
        columns=("state", "caller", "call s", "fence s", "captured s", "CPU s", "of module's", "of dcp's", "unaccounted %"),
        rows=rows,
        figures={"medians": mine, "samples": samples},
        checks=checks,
        notes=(
            "fence: until the caller may change the state, if it asks at once; captured: the same where it never asks; CPU of all ranks "
            "and threads until the save is durable; unaccounted: time of the save in which no thread of the rank is in a span",
        ),
    )


# ------------------------------------------------------------------------------------------------------------- on the ranks


def build(rank: Rank, *, ranks: int, size: int) -> int:
    """A perceptron under FSDP2 with AdamW, and copies of its state as plain tensors of this rank and as DTensors; the bytes of each."""
    rank.kept.clear()
    torch.manual_seed(0)
    layers = max(1, round(size * ranks / 12 / WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = DeviceMesh.from_group(rank.groups[ranks], "cpu")
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    local = {
        f"{name}.{part}": torch.randn(WIDTH // ranks, WIDTH)
        for name, _ in model.named_parameters()
        for part in ("weight", "first", "second")
    }
    rank.kept["module"] = {"model": model, "optimizer": optimizer}
    rank.kept["DTensors"] = {"state": {name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for name, t in local.items()}}
    # Each rank's own: tensors of one name would be replicas, of which it writes a part.
    mine = {f"{rank.number}.{name}": t.clone() for name, t in local.items()}
    rank.kept["tensors"], rank.kept["tensors, dcp"] = {"state": ckpt.PerRank(mine)}, {"state": mine}
    rank.kept["dcp"] = blocking.DcpSaver(rank.second[ranks])
    rank.kept["ranks"] = ranks
    return sum(t.nbytes for t in local.values())


def save(rank: Rank, *, kind: str, how: str, directory: str) -> dict[str, float]:
    """One save. ``call``, and ``blocked``, with a fence right after it (0 if the caller goes on); ``fence``, until all was captured; CPU
    seconds until it is durable; ``unaccounted``, the share of the save without a span."""
    group = rank.groups[rank.kept["ranks"]]
    gc.collect()
    dist.barrier(group)
    cpu, began = cpu_seconds(), time.perf_counter()
    if how == "dcp":
        future = rank.kept["dcp"].save(directory, rank.kept.get(f"{kind}, dcp", rank.kept[kind]))
        called = fenced = captured = time.perf_counter()
        future.result()
    else:
        handle = ckpt.save_async(directory, rank.kept[kind], process_group=group)
        called = time.perf_counter()
        if how == "waits":
            handle.fence()
        fenced = time.perf_counter()
        captured = _outlive(handle) if how == "goes on" else fenced
        handle.result()
    cpu = cpu_seconds() - cpu
    dist.barrier(group)
    spent = {"call": called - began, "blocked": fenced - began, "fence": captured - began, "cpu": cpu}
    return spent | {"unaccounted": 0.0 if how == "dcp" else _unaccounted(directory, rank.number)}


def _outlive(handle: ckpt.SaveHandle) -> float:
    """Go on without a wait that the save could see, until it is over; when all was captured."""
    captured: list[float] = []
    handle.captured.add_done_callback(lambda _: captured.append(time.perf_counter()))
    while not handle.done():
        time.sleep(0.002)
    return captured[0]


def _unaccounted(directory: str, rank: int) -> float:
    table: Any = read_save(directory).tables[rank]
    end = covered = 0
    for span in sorted(table.spans, key=lambda span: span.start):
        covered += max(0, span.start + span.duration - max(end, span.start))
        end = max(end, span.start + span.duration)
    return 1 - covered / end
