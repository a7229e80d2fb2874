"""Commands of the command line on runs of many steps, checkpoints of many tensors and saves of many ranks.

Each function gives the CPU seconds of one command in this process, by click's runner.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace

import torch
from click.testing import CliRunner

import ckpt
from benchmarks.measure import cpu_seconds
from ckpt.cli.main import cli
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, IndexFile
from ckpt.formats.native.paths import INDEX_NAMES
from ckpt.policies import EverySteps, Latest
from ckpt.runs.tiers import Tiers


def seconds(*arguments: str, exit_code: int = 0) -> float:
    """CPU seconds of a command."""
    began = cpu_seconds()
    result = CliRunner().invoke(cli, [*arguments], catch_exceptions=False)
    took = cpu_seconds() - began
    if result.exit_code != exit_code:
        raise ValueError(f"{arguments} ends with {result.exit_code}: {result.output[-500:]}")
    return took


def make_step(root: str, number: int) -> None:
    """A committed checkpoint, as far as listings look, that may be referred to."""
    id = f"{number:016d}"
    record = CommitRecord(
        id=id,
        created="2026-01-01T00:00:00.000+00:00",
        writer="benchmark",
        world_size=64,
        index={name: IndexFile(path=f"index-{id}/{name}", size=0, digest="0" * 32) for name in INDEX_NAMES},
        tensor_bytes=1 << 40,
        reusable=True,
    )
    if number % 2:
        record = replace(record, metrics={"loss": 1 / (number + 1)})
    directory = f"{root}/step-{number:08d}"
    os.makedirs(directory)
    with open(f"{directory}/{COMMIT_PATH}", "wb") as file:
        file.write(record.to_bytes())


class Run:
    """A run of ``steps`` that hold no tensors and may be referred to."""

    def __init__(self, steps: int, folder: str) -> None:
        logging.getLogger("ckpt").setLevel(logging.ERROR)
        self.steps, self.root = steps, f"{folder}/{steps}-steps"
        for n in range(steps):
            make_step(self.root, n)
        self.tiers = Tiers(self.root, EverySteps(1, start=1) | Latest(1))  # keeps all but step 0
        self.tiers.steps()

    def ls(self) -> float:
        return seconds("ls", self.root)

    def gc(self) -> float:
        """Of all steps but five; another run has them again for the next time."""
        copy = f"{self.root}-copy"
        shutil.copytree(self.root, copy)
        took = seconds("gc", copy, "--keep", "latest=5", "--yes", "-q")
        if len(os.listdir(copy)) > 6:
            raise ValueError("gc has left steps")
        shutil.rmtree(copy)
        return took

    def retention(self) -> float:
        """After a save, of a process that knows the run: one step goes."""
        make_step(self.root, 0) if not os.path.exists(f"{self.root}/step-{0:08d}") else None
        self.tiers.steps()
        began = cpu_seconds()
        self.tiers.retain_root()
        took = cpu_seconds() - began
        if os.path.exists(f"{self.root}/step-{0:08d}/{COMMIT_PATH}"):
            raise ValueError("retention has left what it should remove")
        return took

    def restore(self) -> float:
        """Of a process that begins: which checkpoint does it go on from?"""
        tiers = Tiers(self.root, Latest(1))
        began = cpu_seconds()
        rows = tiers.copies(None)
        took = cpu_seconds() - began
        if rows[0][0] != self.steps - 1:
            raise ValueError("the newest step was not found")
        return took


class Tensors:
    """A checkpoint of so many tensors of four elements, and one that differs in half of them."""

    def __init__(self, tensors: int, folder: str) -> None:
        self.folder, self.count = f"{folder}/{tensors}-tensors", tensors
        self.state = {f"layers.{i:07}.weight": torch.full((4,), float(i)) for i in range(tensors)}
        self.url, self.other = f"{self.folder}/step-1", f"{self.folder}/step-2"
        self.saves = [self.save(self.url), self.save(self.url)]
        ckpt.save(self.other, {name: tensor + i % 2 for i, (name, tensor) in enumerate(self.state.items())})

    def save(self, url: str | None = None) -> float:
        began = cpu_seconds()
        ckpt.save(url or self._target(), self.state)
        return cpu_seconds() - began

    def load(self) -> float:
        into = {name: torch.zeros(4) for name in self.state}
        began = cpu_seconds()
        ckpt.load(self.url, into)
        return cpu_seconds() - began

    def _target(self) -> str:
        shutil.rmtree(f"{self.folder}/target", ignore_errors=True)
        return f"{self.folder}/target"

    def run(self, *command: str, exit_code: int = 0) -> float:
        """``URL``, ``OTHER`` and ``TARGET`` in a command stand for the two checkpoints and for a place where nothing is."""
        places = {"URL": self.url, "OTHER": self.other}
        words = [self._target() if word == "TARGET" else places.get(word, word) for word in command]
        return seconds(*words, exit_code=exit_code)


class Values:
    """A checkpoint of so many plain values, and one with others."""

    def __init__(self, values: int, folder: str) -> None:
        self.urls = [f"{folder}/{values}-values/step-{n}" for n in range(2)]
        for n, url in enumerate(self.urls):
            ckpt.save(url, {"v": {f"key{i}": i + n / 2 for i in range(values)}})

    def diff(self) -> float:
        return seconds("diff", *self.urls, exit_code=3)
