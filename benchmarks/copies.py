"""``python -m benchmarks.copies``: what second copies and parity cost, in memory of machines with a rank each, by how the state is spread.

*network* is what crossed to other machines, *alone* what only one machine has of the state, *mirrored* what ranks wrote for others, and
*memory* the data files, copies and parity of one checkpoint, in MiB of all ranks. CPU seconds are those of all ranks, from the call of the
save until all copies are there; medians of the rounds but the first. Each layout is measured three times: with mirrors; with
``check_replicas=False``, where all copies cross the network; and with parity over all machines. The machines are memory daemons of their
own, and the network is the loopback device.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

from .pool import Pool, Rank

LAYOUTS = {"data parallel": (4, 1), "HSDP": (2, 2), "FSDP": (1, 4), "FSDP, 3 machines": (1, 3)}
"""Replicas × shards."""
WAYS = ("mirrors", "network only", "parity")
TENSORS = 8

Way = Literal["mirrors", "network only", "parity"]


def run(rank: Rank, folder: str, layout: str, way: Way, *, size: int, rounds: int) -> list[dict[str, float]]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import ckpt
    from ckpt.memory import client

    os.environ.update(CKPT_DOMAIN=f"machine{rank.number}", CKPT_MEMORY_DIR=f"{folder}/daemon{rank.number}")
    mesh = init_device_mesh("cpu", LAYOUTS[layout], mesh_dim_names=("replicate", "shard"))
    rows = (size << 20) // 4 // TENSORS // 1024
    state: dict[str, Any] = {
        f"w{n}": distribute_tensor(torch.full((rows, 1024), float(n)), mesh, [Replicate(), Shard(0)]) for n in range(TENSORS)
    }
    alone = size if LAYOUTS[layout][0] == 1 else 0
    measured = []
    root = f"{folder}/{layout}-{way}".replace(" ", "-")
    ranks = LAYOUTS[layout][0] * LAYOUTS[layout][1]
    memory = ckpt.Memory(parity=ranks) if way == "parity" else ckpt.Memory(copies=1)
    with ckpt.Checkpointer(root, memory=memory, check_replicas=way != "network only", timeout=300) as c:
        for step in range(1, rounds + 1):
            for tensor in state.values():
                tensor.to_local().add_(1)
            assert c._spread is not None
            before, given = _cpu(), c._spread._copier.copied if c._spread._copier is not None else 0
            c.step(step, state)
            assert c.handle is not None
            report = c.handle.result()
            assert c._spread.finish() == () and c._spread._copier is not None
            network = c._spread._copier.copied - given
            counts = {"network": network, "mirrored": report.mirrored_bytes, "alone": alone / ranks * 2**20}
            measured.append({"cpu": _cpu() - before, **counts})
        names = [known for known in client.connect().list() if Path(root).name in known.path and f"step-{rounds:08}" in known.path]
        measured[-1]["memory"] = sum(known.size for known in names if known.path.endswith((".safetensors", ".xor")))
    return measured


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def stop(rank: Rank, folder: str) -> None:
    from ckpt.memory import client

    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{rank.number}"
    client.connect().stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    folder = tempfile.mkdtemp()
    print(f"{'':18}{'copies':>14}{'alone':>9}{'network':>9}{'x':>7}{'mirrored':>10}{'memory':>9}{'CPU s':>8}")
    try:
        for layout, mesh in LAYOUTS.items():
            on = mesh[0] * mesh[1]
            with Pool(on) as pool:
                try:
                    for way in WAYS:
                        ranks = pool.run(run, on=on, folder=folder, layout=layout, way=way, size=given.size, rounds=given.rounds)
                        _print(layout, f"parity={on}" if way == "parity" else way, ranks)
                finally:
                    pool.run(stop, on=on, folder=folder)
    finally:
        shutil.rmtree(Path(folder))


def _print(layout: str, how: str, ranks: list[list[dict[str, float]]]) -> None:
    of_round = [{name: sum(row[name] for row in rows) for name in rows[0]} for rows in zip(*ranks, strict=True)][1:]
    cpu = statistics.median(row["cpu"] for row in of_round)
    alone, network, mirrored, memory = (of_round[-1][name] / 2**20 for name in ("alone", "network", "mirrored", "memory"))
    ratio = f"{network / alone:7.3f}" if alone else f"{'':7}"
    print(f"{layout:18}{how:>14}{alone:9.1f}{network:9.1f}{ratio}{mirrored:10.1f}{memory:9.1f}{cpu:8.2f}")


if __name__ == "__main__":
    main()
