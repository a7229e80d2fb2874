"""``python -m benchmarks.averaging DIRECTORY``: ``ckpt merge`` of three checkpoints beside ``ckpt cp`` of the same bytes, in one process.

The contestants take turns. ``cp`` copies all three: it reads what the merge reads, and writes three times as much. CPU seconds of the
process and wall seconds are the least of all rounds but the first; *speed* is that of merging over that of copying.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import time
from pathlib import Path

import torch

import ckpt
from ckpt.cli.main import cli

MARK = 0.8
"""Least speed of a merge, of that of ``cp``."""
TENSORS = 16


def cost(*arguments: str) -> tuple[float, float]:
    """Wall and CPU seconds of a command."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        cli.main([*arguments, "-q"])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{arguments} ended with {ended.code}") from None
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(root: Path, nbytes: int, dtype: torch.dtype, rounds: int) -> dict[str, list[tuple[float, float]]]:
    sources = [root / f"source-{i}" for i in range(3)]
    for i, source in enumerate(sources):
        torch.manual_seed(i)
        ckpt.save(source, {f"w{n:02}": torch.randn(nbytes // dtype.itemsize // TENSORS).to(dtype) for n in range(TENSORS)})
    costs: dict[str, list[tuple[float, float]]] = {"cp": [], "merge": []}
    for _ in range(rounds + 1):
        costs["merge"].append(cost("merge", str(root / "merged"), *map(str, sources)))
        shutil.rmtree(root / "merged")
        copies = [cost("cp", str(source), str(root / f"copy-{i}")) for i, source in enumerate(sources)]
        costs["cp"].append((sum(wall for wall, _ in copies), sum(cpu for _, cpu in copies)))
        for i in range(3):
            shutil.rmtree(root / f"copy-{i}")
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty place of its own on the storage to be measured")
    parser.add_argument("--size", type=int, default=512, help="MiB of each checkpoint")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    root = given.directory / "averaging"
    print(f"three of {given.size} MiB; {'':8}{'wall s':>9}{'CPU s':>9}")
    for dtype in (torch.float32, torch.bfloat16):
        shutil.rmtree(root, ignore_errors=True)
        costs = measure(root, given.size << 20, dtype, given.rounds)
        least = {name: [min(column[1:]) for column in zip(*rows, strict=True)] for name, rows in costs.items()}
        for name, row in least.items():
            print(f"{str(dtype)[6:]:16}{name:8}" + "".join(f"{seconds:9.3f}" for seconds in row))
        speeds = [copy / merge for copy, merge in zip(least["cp"], least["merge"], strict=True)]
        print(f"{'':16}{'speed':8}" + "".join(f"{speed:9.2f}" for speed in speeds) + f"   mark {MARK}")
    shutil.rmtree(root)
    print(f"most memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()
