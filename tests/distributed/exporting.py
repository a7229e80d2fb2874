"""What the ranks of ``test_exporting.py`` do. The oracle is torch's own gathering of the state, and the ``safetensors`` library."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt import ExportReport, convert, export, settings
from ckpt.converters import export_plan
from ckpt.io_backends import posix_writer as posix_shared
from ckpt.io_backends.posix_writer import PosixSharedObject
from ckpt.io_backends.writer_base import GatheringWriter
from tests.distributed.gathered import differences, full_state
from tests.distributed.models import mesh_of
from tests.distributed.plain import build
from tests.formats.delta_oracle import read_chain

SHARD = 3_000
"""Bytes of a file: several for the small models."""
MEMORY = 9_000
"""Bytes of windows at once: several rounds."""
DEADLINE = 6.0
"""Seconds after which a rank that was killed is named; who is to be killed must not have been given up before."""
SHARED_FILES = posix_shared.COHERENT, posix_shared.PART


def use(way: str) -> None:
    """Let the storage take any ``ranges``, with all that is not whole in windows, or ``parts`` of a page; ``files`` is for storage that has
    no shared ones."""
    settings.WORTH_A_CALL, export_plan.WINDOW, settings.LEAST_MEMORY = 64, 512, 0
    posix_shared.COHERENT, posix_shared.PART = (frozenset(), 4096) if way == "parts" else SHARED_FILES


def everywhere(layout: str, folder: str) -> list[str]:
    """Export a model in a layout as shards, and cast as one file, in all ways: what differs from torch's gathered state, and from a save
    that was converted."""
    trained = build(layout, 3).steps(1)
    state = {"model": trained.model}
    wanted = {n.removeprefix("model."): t for n, t in full_state(trained).items() if n.startswith("model.")}
    cast = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in wanted.items()}
    reports = {}
    for way in ("ranges", "parts", "files"):
        use(way)
        root = f"local://{folder}" if way == "files" else folder
        reports[way] = export(f"{root}/{way}", state, layout=trained.layout, shard_size=SHARD, memory=MEMORY)
        export(f"{root}/{way}.safetensors", state, layout=trained.layout, dtype="bfloat16")
    ckpt.save(f"{folder}/saved", state, layout=trained.layout)
    if dist.get_rank():
        return []
    convert(f"{folder}/saved", f"{folder}/converted", to="hf", shard_size=SHARD)
    expected = contents(f"{folder}/converted")
    problems = []
    for way, report in reports.items():
        problems += differences(loaded(f"{folder}/{way}"), wanted) + differences(load_file(f"{folder}/{way}.safetensors"), cast)
        found = contents(f"{folder}/{way}")
        problems += [f"{way}: {n} is not what convert writes" for n in found.keys() | expected.keys() if found.get(n) != expected.get(n)]
        if len(report.files) < 2 or report.tensor_bytes != sum(t.nbytes for t in wanted.values()):
            problems.append(f"the report: {report}")
    return problems


def loaded(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    return {n: t for path in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(path).items()}


def contents(folder: str) -> dict[str, bytes]:
    """All files of a directory, hidden ones too."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def translated(whole: dict[str, torch.Tensor], config: dict[str, Any], folder: str, way: str) -> None:
    """Shard tensors in all manners over a mesh of 2 × 2, and export them under other names."""
    use(way)
    mesh = mesh_of(dp=2, tp=2)
    manners = [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())]
    state = {}
    for i, (name, tensor) in enumerate(whole.items()):
        manner = manners[i % len(manners)]
        fits = all(not isinstance(p, Shard) or p.dim < tensor.ndim for p in manner)
        state[name] = distribute_tensor(tensor, mesh, manner if fits else manners[0])
    export(folder, state, translation=ckpt.Translation(names="llama", convention="huggingface"), config=config, shard_size="40KB")


def some(seed: int) -> tuple[dict[str, torch.Tensor], ckpt.Layout]:
    """Tensors cut by rows, by columns, in flat ranges, and with padding, and a small one that all ranks have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, columns, flat, table, small = whole_of(seed).values()
    length, padding = -(-flat.numel() // size), torch.full((-len(table) % size, table.shape[1]), 5.0)
    state = {
        "rows": rows.chunk(size)[rank].clone(),
        "columns": columns.chunk(size, 1)[rank].clone(),
        "flat": flat.flatten()[rank * length : (rank + 1) * length].clone(),
        "table": torch.cat([table, padding]).chunk(size)[rank].clone(),
        "small": small,
    }
    rules = [
        ("rows", ckpt.Shard(0, "tp")),
        ("columns", ckpt.Shard(1, "tp")),
        ("flat", ckpt.Flat("tp"), ckpt.GlobalShape(tuple(flat.shape))),
        ("table", ckpt.Shard(0, "tp"), ckpt.Padded(0, len(table))),
        ("small", ckpt.Replicate()),
    ]
    return state, ckpt.Layout({"tp": size}, rules)


def whole_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"rows": (60, 80), "columns": (32, 96), "flat": (7, 11), "table": (5, 3), "small": (7,)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def export_some(url: str, seed: int, options: dict[str, Any]) -> ExportReport:
    state, layout = some(seed)
    return export(url, state, layout=layout, job=ckpt.Job(timeout=20), **options)


def called_alike(folder: str) -> list[str]:
    """Ranks 1 and 2 each have an expert of the same name, then rank 0 has another gate, then each rank an expert of its own; what each
    export raised."""
    rank = dist.get_rank()
    gate = {"gate": torch.ones(4)}
    experts = gate | ({"expert": torch.full((4,), float(rank))} if rank else {})
    exports: list[tuple[str, dict[str, torch.Tensor], dict[str, Any]]] = [
        ("experts", experts, {}),
        ("gates", {"gate": torch.full((4,), float(rank > 0))}, {}),
        ("gate.safetensors", experts, {"exclude": "expert"}),
        ("unchecked.safetensors", experts, {"check_replicas": False}),
        ("own.safetensors", gate | {f"expert.{rank}": torch.full((4,), float(rank))}, {}),
    ]
    found = []
    for name, state, options in exports:
        try:
            export(f"{folder}/{name}", state, **options)
            found.append("nothing")
        except ckpt.errors.ReplicaError as err:
            found.append(err.message)
    return found


def die_at_write(url: str, seed: int, options: dict[str, Any], at: int) -> None:
    """Rank 1 is killed when it is about to write for the time ``at``."""
    use("ranges")
    done: list[int] = []

    def dies(write: Any) -> Any:
        def dying(self: Any, offset: int, parts: Any) -> None:
            done.append(offset)
            if dist.get_rank() == 1 and len(done) > at:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, offset, parts)

        return dying

    for kind in (PosixSharedObject, GatheringWriter):
        kind.write = dies(kind.write)  # type: ignore[attr-defined]
    state, layout = some(seed)
    export(url, state, layout=layout, job=ckpt.Job(timeout=DEADLINE), **options)


def die_while_publishing(url: str, seed: int, options: dict[str, Any], at: int) -> None:
    """The leader is killed when some files have their names."""
    publish, done = PosixSharedObject.complete, []

    def dying(self: PosixSharedObject, receipts: Any, *, replace: bool) -> None:
        done.append(replace)
        if len(done) > at:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(self, receipts, replace=replace)

    PosixSharedObject.complete = dying  # type: ignore[method-assign]
    state, layout = some(seed)
    export(url, state, layout=layout, job=ckpt.Job(timeout=DEADLINE), **options)


def fail_at_write(url: str, seed: int, options: dict[str, Any]) -> str:
    """Rank 1's storage is full; gives what each rank raised."""

    def full(self: PosixSharedObject, offset: int, parts: Any) -> None:
        raise ckpt.errors.NoSpaceError("the disk is full")

    if dist.get_rank() == 1:
        PosixSharedObject.write = full  # type: ignore[method-assign]
    state, layout = some(seed)
    try:
        export(url, state, layout=layout, job=ckpt.Job(timeout=20), **options)
    except ckpt.errors.CkptError as err:
        return f"{type(err).__name__}: {err.message}"
    return "nothing"


def differ(url: str) -> str:
    """Each rank wants another dtype."""
    state, layout = some(1)
    try:
        export(url, state, layout=layout, job=ckpt.Job(timeout=20), dtype=("bfloat16", "float16")[dist.get_rank()])
    except ckpt.errors.CkptError as err:
        return type(err).__name__
    return "nothing"


def deltas(layout: str, folder: str) -> list[str]:
    """Export a model in a layout, train on, export what changed; on both kinds of storage: what differs from torch's gathered state."""
    use("ranges")
    trained = build(layout, 3).steps(1)
    state = {"model": trained.model}
    problems = []
    export(f"{folder}/full", state, layout=trained.layout, shard_size=SHARD, memory=MEMORY)
    trained.steps(1)
    reports = [export(f"{folder}/first", state, layout=trained.layout, since=f"{folder}/full", shard_size=SHARD, memory=MEMORY)]
    with torch.no_grad():
        for number, parameter in enumerate(trained.model.parameters()):
            if number % 2:
                parameter.mul_(-1)
    second = f"local://{folder}/second"
    reports.append(export(second, state, layout=trained.layout, since=f"{folder}/first", memory=MEMORY))
    wanted = {n.removeprefix("model."): t for n, t in full_state(trained).items() if n.startswith("model.")}
    loaded_again = {name: torch.zeros_like(t) for name, t in wanted.items()}
    if dist.get_rank():
        return []
    whole = sum(t.numel() for t in wanted.values())
    for report in reports:
        right = report.since is not None and 0 < report.changed <= whole and len(report.files) == dist.get_world_size()
        problems += [] if right else [f"the report: {report}"]
    view = ckpt.open(second)
    for name, tensor in loaded_again.items():
        tensor.copy_(view[name].read())
    return problems + differences(loaded_again, wanted) + differences(read_chain(Path(folder) / "second"), wanted)
