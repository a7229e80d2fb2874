"""The checkpoints that the fuzzer starts from, by kind: every file as bytes."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.failures.damage import sealed

TESTS = Path(__file__).parent.parent
KINDS = ("native", "coded", "virtual", "safetensors", "torch", "dcp", "deepspeed", "fsdp", "megatron")

Files = dict[str, bytes]
_MOST = 4 << 20
"""Bytes of a checkpoint that is worth mutating: larger ones only take longer."""


@cache
def seeds(kind: str) -> tuple[Files, ...]:
    """All of one kind, the smallest first."""
    found = sorted((files for files in _of(kind) if files), key=lambda files: sum(map(len, files.values())))
    return tuple(files for files in found if sum(map(len, files.values())) <= _MOST) or tuple(found[:1])


def _of(kind: str) -> Iterator[Files]:
    accept = TESTS / "conformance" / "accept"
    fixtures = TESTS / "fixtures"
    if kind == "native":
        yield _directory(TESTS / "golden" / "v1")
        yield from (_directory(accept / case) for case in ("grids", "names", "values", "objects", "members"))
    elif kind == "coded":
        yield _directory(TESTS / "golden" / "v1-codecs")
        yield _directory(accept / "codecs")
    elif kind == "virtual":
        yield _pointing_at(_directory(accept / "virtual"), accept / "virtual-sources")
    elif kind == "safetensors":
        yield from (_directory(p) for p in sorted((fixtures / "hf").iterdir()))
    elif kind in ("torch", "dcp"):
        yield _written(kind)
    elif kind == "megatron":
        for archive in sorted((fixtures / "megatron").glob("*.tar.xz")):
            yield from _archived(archive)
    else:
        yield from (_directory(p) for p in sorted((fixtures / kind).iterdir()) if p.is_dir())


def _directory(path: Path) -> Files:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def _pointing_at(files: Files, sources: Path) -> Files:
    """The virtual checkpoint of the conformance set, with its sources where they lie here."""
    import pyarrow as pa
    from xxhash import xxh3_128_hexdigest

    record = json.loads(files["checkpoint.json"])
    entry = record["index"]["sources.arrow"]
    table = pa.ipc.open_file(files[entry["path"]]).read_all()
    roots = pa.array([str(sources)] * table.num_rows, pa.utf8())
    table = table.set_column(table.schema.get_field_index("root"), table.schema.field("root"), roots)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = bytes(sink.getvalue())
    entry.update(size=len(data), digest=xxh3_128_hexdigest(data))
    return files | {entry["path"]: data, "checkpoint.json": sealed(record)}


def _archived(archive: Path) -> Iterator[Files]:
    """The checkpoints of a job: one for each format that it wrote, two directories deep."""
    files: Files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is not None:
                files[member.name.removeprefix("./")] = stream.read()
    for top in sorted({"/".join(name.split("/")[:2]) for name in files} - {name for name in files if name.count("/") < 2}):
        if not top.endswith("/memory"):  # what the ranks had in memory
            yield {name.removeprefix(f"{top}/"): data for name, data in files.items() if name.startswith(f"{top}/")}


def _written(kind: str) -> Files:
    """What torch writes."""
    import io
    import tempfile

    import torch
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "tied": [torch.ones(2)] * 2, "text": "x"}
    if kind == "torch":
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return {"model.pt": buffer.getvalue()}
    with tempfile.TemporaryDirectory() as directory:
        dcp.save(state, checkpoint_id=directory, no_dist=True)
        return _directory(Path(directory))
