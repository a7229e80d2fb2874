"""``python -m benchmarks.memory_tier``: what a save into memory costs the trainer, and a load from it, beside memcpy and tmpfs.

One process, contestants in turn, medians of wall and CPU seconds of this process. ``memcpy`` copies the same bytes into warm memory by one
thread. The trainer is blocked for the call, and for the fence after a forward pass of twice a memcpy. *first* is the first round. It and
the second one, in which pages are made, are not part of the medians. The memory of the trainer beside the state, and of the daemon beside
its files, is in MiB; the files are those of two versions, and one that is filled next. dlrover is a contestant where it is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

import ckpt
from ckpt.memory import client

from .memory_dlrover import dlrover_save

TENSORS = 16
_FRESH = 2
"""Rounds in which the daemon has no files yet that were filled before."""
State = dict[str, torch.Tensor]


class Times:
    """Wall and CPU seconds by name."""

    def __init__(self) -> None:
        self.taken: dict[str, list[tuple[float, float]]] = {}

    def take(self, name: str, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.taken.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))

    def print(self) -> None:
        base = [statistics.median(column[_FRESH:]) for column in zip(*self.taken["memcpy"], strict=True)]
        print(f"{'':28}{'wall s':>9}{'x':>7}{'CPU s':>9}{'x':>7}{'first s':>9}")
        for name, rows in self.taken.items():
            wall, cpu = (statistics.median(column[_FRESH:]) for column in zip(*rows, strict=True))
            print(f"{name:28}{wall:9.3f}{wall / base[0]:7.2f}{cpu:9.3f}{cpu / base[1]:7.2f}{rows[0][0]:9.3f}")


def copy(source: State, into: State) -> None:
    for name, tensor in source.items():
        ctypes.memmove(into[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def anonymous(pid: int | str) -> float:
    """MiB that a process has of its own."""
    return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) / 1024


def saves(state: State, times: Times, rounds: int, root: str, dlrover: Callable[[int, State], None] | None) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    weights = torch.nn.ParameterDict(state)
    trained = {"model": weights, "optimizer": torch.optim.SGD(weights.parameters())}
    for number in range(rounds):
        times.take("memcpy", lambda: copy(state, into))
        if dlrover is not None:
            times.take("dlrover: the call", partial(dlrover, number, state))
        pass_seconds = 2 * times.taken["memcpy"][-1][0]
        for capture in ("eager", "lazy"):
            url = f"{root}/{capture}-{number:08d}"
            handles = []
            times.take(f"save {capture}: the call", lambda: handles.append(ckpt.save_async(url, trained, capture=capture)))  # noqa: B023
            if capture == "lazy":
                time.sleep(pass_seconds)
                times.take("save lazy: the fence", handles[0].fence)
            times.take(f"save {capture}: until durable", handles[0].result)
            _forget(f"{root}/{capture}-{number - 1:08d}")


def _forget(url: str) -> None:
    """As retention does: the pages stay with the daemon, to be filled again."""
    daemon = client.connect()
    for known in daemon.list(url.removeprefix("mem://") + "/"):
        daemon.delete(known.path)


def loads(state: State, times: Times, rounds: int, memory: str, tmpfs: str) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for _ in range(rounds):
        times.take("load mem://", lambda: ckpt.load(memory, into))
        times.take("load tmpfs", lambda: ckpt.load(tmpfs, into))
        times.take("memcpy of the load", lambda: copy(state, into))
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    given.rounds = max(given.rounds, _FRESH + 1)
    state = {f"w{i}": torch.randn((given.size << 20) // 4 // TENSORS) for i in range(TENSORS)}
    shared = tempfile.mkdtemp(dir="/dev/shm")
    daemon = client.connect()
    try:
        ckpt.save_async("mem://bench/warm", {"w": torch.ones(5)}).result()
        times, before = Times(), anonymous("self")
        with ExitStack() as stack:
            saves(state, times, given.rounds, "mem://bench", dlrover_save(stack))
        own, usage = anonymous("self") - before, daemon.status()
        files = sum(int(usage[kind]) for kind in ("objects", "lent", "dropped", "spare")) / (given.size << 20)
        ckpt.save(f"{shared}/step", state)
        loads(state, times, given.rounds, f"mem://bench/eager-{given.rounds - 1:08d}", f"{shared}/step")
        times.print()
        pid = daemon.status()["pid"]
        beside = f"trainer {own:.0f} MiB, daemon {anonymous(pid):.0f} MiB"
        print(f"memory beside the state of {given.size} MiB: {beside}; files of the daemon: {files:.2f} × the state")
    finally:
        daemon.drop("bench")
        shutil.rmtree(shared)


if __name__ == "__main__":
    main()
