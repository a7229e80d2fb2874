"""What it costs to divide one piece of offline work over processes: CPU seconds of all together, and wall time, against one process.

    python -m benchmarks.dividing [--processes 4] [--size 1024] [--dir /dev/shm]

Each process runs each command twice: on hardly any data, which counts as *start* (interpreter, libraries), then on all of it, the *work*.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import ckpt
from ckpt.cli.main import cli

FILES = 16
ROUNDS = 3


class Cost(NamedTuple):
    """Seconds of one command, of all of its processes."""

    cpu: float
    wall: float


def make(root: Path, nbytes: int) -> None:
    """A checkpoint of ``FILES`` files."""
    whole = root.with_name(f"{root.name}-whole")
    ckpt.save(str(whole), {f"w{i:02}": torch.randn(nbytes // 4 // FILES) for i in range(FILES)})
    ckpt.convert(str(whole), str(root), to="native", shard_size=nbytes // FILES)
    shutil.rmtree(whole)


def run(commands: list[list[str]], processes: int) -> list[Cost]:
    """The commands one after another, in as many processes, which have imported everything before the second one."""
    ports = []
    for _ in commands:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        parts = list(pool.map(run_part, [commands] * processes, [ports] * processes, range(processes), [processes] * processes))
    return [Cost(sum(part[n].cpu for part in parts), max(part[n].wall for part in parts)) for n in range(len(commands))]


def run_part(commands: list[list[str]], ports: list[int], rank: int, processes: int) -> list[Cost]:
    """One process's part of each; the first one counts from the start of the interpreter."""
    costs = []
    before, began = 0.0, time.perf_counter()
    for arguments, port in zip(commands, ports, strict=True):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            cli.main([*arguments, "-q"])
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{arguments} ended with {ended.code}") from None
        costs.append(Cost(time.process_time() - before, time.perf_counter() - began))
        before, began = time.process_time(), time.perf_counter()
    return costs


def command(kind: str, source: Path, target: Path) -> list[str]:
    if kind == "verify":
        return ["verify", str(source)]
    if kind == "cp":
        return ["cp", str(source), str(target)]
    shard = str(max(1, sum(path.stat().st_size for path in source.glob("data/*")) // FILES))
    if kind == "convert":
        return ["convert", "--to", "hf", "--no-config", "--dtype", "bfloat16", "--shard-size", shard, str(source), str(target)]
    return ["merge", "--shard-size", shard, str(target), str(source), str(source)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--size", type=int, default=1024, help="MiB")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("commands", nargs="*", default=["verify", "cp", "convert", "merge"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        folder = Path(name)
        large, small, target = folder / "large", folder / "small", folder / "target"
        make(large, given.size << 20)
        make(small, 1 << 14)
        print(f"{given.size} MiB in {FILES} files; CPU seconds of all processes; the least of {given.rounds} rounds in turn")
        print(f"{'command':8} {'processes':>9} {'start':>8} {'work':>8} {'wall':>8} {'CPU x':>8}")
        for kind in given.commands:
            costs: dict[int, list[list[Cost]]] = {1: [], given.processes: []}
            for _ in range(given.rounds):
                for processes in costs:
                    both = [command(kind, small, target / "small"), command(kind, large, target / "large")]
                    costs[processes].append(run(both, processes))
                    shutil.rmtree(target, ignore_errors=True)
            alone = min(work.cpu for _, work in costs[1])
            for processes, rounds in costs.items():
                start, work = (min(one[n] for one in rounds) for n in (0, 1))
                print(f"{kind:8} {processes:9} {start.cpu:8.2f} {work.cpu:8.2f} {work.wall:8.2f} {work.cpu / alone:8.2f}", flush=True)


if __name__ == "__main__":
    main()
