"""The scenario ``foreign``: one tensor out of somebody else's checkpoint of 10 GB, an import of it, and tools of others that copy it.

The checkpoints are made of holes (``sparse``), so that 10 GB take no room; what tools write is of ``--size``. Tools run as whole processes,
as their users run them, and ``ckpt`` beside them does too. DeepSpeed's are left out, with a line that says so, where it is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ckpt
from ckpt.converters.virtual.importer import import_checkpoint
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends

from .findings import Finding, at_least, at_most, medians
from .measure import RankCost, Sample, cost_of, cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .report import Check
from .scenarios import Settings, Tell, turns
from .sparse import MAKERS, can_make, make_dcp, make_zero

LARGE = 10_000_000_000
FEWER = 512
"""Of those that tools convert: a model of some 60 tensors on 8 ranks."""
BESIDE = 1 << 20
"""Most bytes that are read beside those of the tensor."""
SOON = 2.0
"""Seconds of an import, at most."""
FASTER = 50
"""Least times that an import is faster than a tool that copies 10 GB."""
WORTH = 100_000_000
"""Bytes from which on tools are compared: of less, it would be their start."""
_CKPT = "-c from\0ckpt.cli.main\0import\0main;main()"
_DEEPSPEED = "-m deepspeed"
_FOLDERS = "--input_folder {source} --output_folder {target}"


@dataclass(frozen=True)
class Tool:
    """``command`` of the interpreter, from the checkpoint ``{source}`` to ``{target}``; ``beside`` names ours that does the same."""

    name: str
    source: str
    command: str
    beside: str = ""


_TOOLS = (
    Tool("import of DCP", "dcp", f"{_CKPT} import {{source}} {{target}}"),
    Tool("dcp_to_torch", "dcp", "-m torch.distributed.checkpoint.format_utils dcp_to_torch {source} {target}", "import of DCP"),
    Tool("import of ZeRO", "zero", f"{_CKPT} import {{source}} {{target}}"),
    Tool("ds_to_universal", "zero", f"{_DEEPSPEED}.checkpoint.ds_to_universal {_FOLDERS}", "import of ZeRO"),
    Tool("ZeRO to hf", "zero", f"{_CKPT} convert --to hf {{source}} {{target}}"),
    Tool("zero_to_fp32", "zero", f"{_DEEPSPEED}.utils.zero_to_fp32 --safe_serialization -t . {{source}} {{target}}", "ZeRO to hf"),
)
TOOLS = {tool.name: tool for tool in _TOOLS}


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Both tables; nothing where this torch cannot leave out elements when it saves."""
    if not can_make():
        tell("foreign: this torch has no torch.serialization.skip_data, which makes checkpoints of holes")
        return []
    return [_parts(settings, pool, place, tell), *([_tools(settings, place, tell)] if settings.size >= WORTH else [])]


# --------------------------------------------------------------------------------------------------------- one tensor


def _parts(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    rows, checks, figures = [], list[Check](), {}
    for kind in MAKERS:
        source = place.fresh("foreign-source")
        os.mkdir(source)
        name = MAKERS[kind](Path(source), LARGE, settings.foreign_parts)
        (read,) = pool.run(one_tensor, on=1, source=source, name=name)
        samples = []
        for repetition in range(min(settings.repeat, 3) + 1):
            sample = Sample.of(pool.run(imported, on=1, source=source, target=place.fresh("foreign-target")))
            samples += [{"wall": sample.wall, "cpu": sample.cpu}] if repetition else []
        found = medians(samples) | read | {"parts": sample.said[0]["chunks"]}
        tell(f"foreign, {place.label}: {kind} {found['beside'] / 1e3:.0f} kB beside the tensor, import {found['cpu']:.2f} s CPU")
        where = f"{kind}, 10 GB, {place.label}"
        checks.append(at_most(f"bytes beside one tensor: {where}", found["beside"], BESIDE))
        checks.append(at_most(f"seconds of an import: {where}", found["wall"], SOON))
        cells = [f"{found['tensors']:,}", f"{found['parts']:,}", f"{found['beside']:,}", f"{found['reads']}"]
        rows.append((kind, *cells, f"{found['wall']:.2f}", f"{found['cpu']:.2f}"))
        figures[kind] = found
    place.fresh("foreign-source")
    place.fresh("foreign-target")
    return Finding(
        scenario="foreign",
        title=f"one tensor out of 10 GB, and an import, {place.label}",
        columns=("", "tensors", "parts", "bytes beside it", "reads", "import s", "CPU s"),
        rows=rows,
        figures={"place": place.label, "kinds": figures},
        checks=checks,
    )


def one_tensor(rank: Rank, *, source: str, name: str) -> dict[str, int]:
    """Open a checkpoint and read one tensor: what that takes beside the tensor's bytes, opening included."""
    del rank
    with _counted() as reads:
        view = ckpt.open(source)
        nbytes = view[name].read().nbytes
    return {"beside": sum(reads) - nbytes, "reads": len(reads), "tensors": len(view), "tensor_bytes": nbytes}


def imported(rank: Rank, *, source: str, target: str) -> RankCost:
    """One import."""
    del rank
    return cost_of(lambda: {"chunks": import_checkpoint(source, target).chunks})


class _Counted:
    """A storage that notes how many bytes each read gives."""

    def __init__(self, inner: Backend, reads: list[int]) -> None:
        self._inner = inner
        self._reads = reads
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._inner.read(path, offset, length)
        self._note(len(data))
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(path, offset, buffer)
        self._note(memoryview(buffer).nbytes)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        self._inner.read_hashed(path, offset, buffer, update)
        self._note(memoryview(buffer).nbytes)

    def _note(self, count: int) -> None:
        with self._lock:
            self._reads.append(count)


@contextmanager
def _counted() -> Iterator[list[int]]:
    reads: list[int] = []
    wrap: Callable[[Backend], Any] = lambda backend: _Counted(backend, reads)  # noqa: E731
    with wrap_backends(wrap):
        yield reads


# -------------------------------------------------------------------------------------------------------------- tools


def _tools(settings: Settings, place: Place, tell: Tell) -> Finding:
    """All tools in turns, on checkpoints of ``--size``."""
    here = [n for n, tool in TOOLS.items() if not tool.command.startswith(_DEEPSPEED) or find_spec("deepspeed") is not None]
    sources = {"dcp": make_dcp, "zero": make_zero}
    for name, make in sources.items():
        os.mkdir(directory := place.fresh(f"foreign-{name}"))
        make(Path(directory), settings.size, FEWER)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in here}
    for repetition, name in turns(here, min(settings.repeat, 3)):
        os.mkdir(target := place.fresh("foreign-target"))
        found = _process(TOOLS[name], f"{place.path}/foreign-{TOOLS[name].source}", f"{target}/made")
        tell(f"foreign, {place.label}: {name} {found['wall']:.2f} s, {found['cpu']:.2f} s CPU")
        if repetition:
            samples[name].append(found)
    for name in (*sources, "target"):
        place.fresh(f"foreign-{name}")
    return _tools_finding(settings, place, {name: medians(found) for name, found in samples.items()})


def _tools_finding(settings: Settings, place: Place, found: dict[str, dict[str, float]]) -> Finding:
    where = f"{settings.size / 1e6:,.0f} MB, {place.label}"
    rows, checks = [], list[Check]()
    for name, figures in found.items():
        beside = found.get(TOOLS[name].beside)
        ratio = figures["wall"] / beside["wall"] if beside else None
        rows.append((name, f"{figures['wall']:.2f}", f"{figures['cpu']:.2f}", "" if ratio is None else f"{ratio:.1f}"))
        if ratio is not None and (settings.size >= LARGE or name == "zero_to_fp32"):
            checks.append(at_least(f"{name} in times of {TOOLS[name].beside}: {where}", ratio, 1 if name == "zero_to_fp32" else FASTER))
    return Finding(
        scenario="foreign",
        title=f"tools as whole processes, {where}",
        columns=("", "wall s", "CPU s", "times ours"),
        rows=rows,
        figures={"place": place.label, "bytes": settings.size, "medians": found},
        checks=checks,
        notes=() if "ds_to_universal" in found else ("DeepSpeed is not installed: its tools are left out",),
    )


def _process(tool: Tool, source: str, target: str) -> dict[str, float]:
    """Wall and CPU seconds of one run of a tool, the interpreter's start included.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, *(word.format(source=source, target=target).replace("\0", " ") for word in tool.command.split())]
    began, cpu = time.monotonic(), cpu_seconds()
    done = subprocess.run(command, env=os.environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed\n{done.stderr[-3000:]}")
    return {"wall": time.monotonic() - began, "cpu": cpu_seconds() - cpu}
