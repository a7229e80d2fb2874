"""One reader, several sources of bytes: a checkpoint whose chunks lie in memory, and the tensors of a state as chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.catalog import CatalogDefaults, Extent, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.engine.byte_source import BLOCK, ByteSource, MemorySource, StorageSource
from ckpt.engine.digest_reader import DigestReader, Verify
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.errors import CorruptError, NotFoundError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.protocol import Backend
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.state.tensors import LocalShard, LocalTensor, as_bytes


def target_of(name: str, memory: torch.Tensor, box: Box, shape: Sequence[int]) -> LocalTensor:
    dtype = DTYPES[str(memory.dtype).removeprefix("torch.")]
    return LocalTensor(TensorSpec(name, dtype, tuple(shape), TensorLayout(Mesh.flat((0,)))), [LocalShard(box, memory)], name)


def test_a_checkpoint_whose_files_lie_in_memory(tmp_path: Path) -> None:
    """The index is read from storage; of the data files only the headers are right there, so that all other bytes come from memory."""
    state = {"a": torch.randn(300, 70), "b": torch.arange(9, dtype=torch.int64), "large": torch.randn(1500, 1000)}
    ckpt.save(str(tmp_path / "c"), state)
    catalog = open_catalog(str(tmp_path / "c"))
    files = {f.path: bytearray((tmp_path / "c" / f.path).read_bytes()) for f in catalog.files}  # type: ignore[attr-defined]
    for file in catalog.files:  # type: ignore[attr-defined]
        with (tmp_path / "c" / file.path).open("r+b") as out:
            out.seek(file.header)
            out.write(bytes(file.size - file.header))
    source = MemorySource("memory of a test", {path: memoryview(data) for path, data in files.items()})

    def load(source: ByteSource) -> dict[str, torch.Tensor]:
        """Some chunks fill their target, of others a part is wanted."""
        loaded = {"a": torch.zeros(100, 70), "b": torch.zeros(9, dtype=torch.int64), "large": torch.zeros(1500, 1000)}
        boxes = {"a": Box((150, 0), (100, 70)), "b": Box((0,), (9,)), "large": Box((0, 0), (1500, 1000))}
        jobs = [TensorLoad(target_of(n, loaded[n], boxes[n], state[n].shape), catalog.tensors[n]) for n in state]
        reader = Reader(catalog=catalog, source=source, verify="full", threads=2, beat=lambda: None)
        reader.run(reader.plan(jobs))
        assert reader.bytes_unverified == 0
        return loaded

    loaded = load(source)
    assert torch.equal(loaded["a"], state["a"][150:250])
    assert torch.equal(loaded["b"], state["b"])
    assert torch.equal(loaded["large"], state["large"])
    with pytest.raises(CorruptError, match="is damaged: its XXH3-64 digest is"):
        load(StorageSource(catalog.backend))
    for data in files.values():
        data[-1] ^= 1
    with pytest.raises(CorruptError, match="is damaged: its XXH3-64 digest is") as caught:
        load(source)
    assert "memory of a test" in str(caught.value.where)


@dataclass(frozen=True, eq=False)
class LiveCatalog(CatalogDefaults):
    """The tensors of a state as chunks, each in a buffer of its own: what a live state is to a reader."""

    tensors: dict[str, TensorEntry]
    url: str = "a live state"
    format: str = "a live state"
    backend: Backend = field(default_factory=partial(InProcessBackend, "inprocess://nothing"))
    state: Any = None
    world_size: int = 4

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        return {}

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        return self.extents_of([(entry, chunk) for chunk in chunks])

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        return [Extent(f"rank{n}/{e.name}", 0, e.grid.box(n).numel * e.dtype.itemsize, None) for e, n in wanted]


@pytest.mark.parametrize("verify", ["full", "partial"])
def test_the_tensors_of_a_state_are_chunks_in_memory(verify: Verify) -> None:
    """Four ranks have rows of a matrix; it is gathered in columns, without a file."""
    rows = [0, 3, 3 + 5, 3 + 5 + 1, 12]
    matrix = torch.arange(12 * 7, dtype=torch.float32).reshape(12, 7)
    parts = {f"rank{n}/w": matrix[rows[n] : rows[n + 1]].clone() for n in range(4)}
    grid = Grid(cuts=(tuple(rows), (0, 7)), files=np.zeros(1, dtype=np.int32))
    catalog = LiveCatalog({"w": TensorEntry(name="w", dtype=DTYPES["float32"], shape=(12, 7), grid=grid)})
    source = MemorySource("a live state", {path: as_bytes(part) for path, part in parts.items()})
    columns = [torch.zeros(12, 3), torch.zeros(12, 4)]
    jobs = [
        TensorLoad(target_of("w", memory, Box((0, first), (12, size)), (12, 7)), catalog.tensors["w"])
        for memory, first, size in zip(columns, (0, 3), (3, 4), strict=True)
    ]
    reader = Reader(catalog=catalog, source=source, verify=verify, threads=1, beat=lambda: None)
    reader.run(reader.plan(jobs))
    assert torch.equal(torch.cat(columns, dim=1), matrix)


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK + 1, 3 * BLOCK])
def test_memory_keeps_the_table_of_the_port(length: int) -> None:
    data = bytes(np.random.default_rng(0).integers(0, 256, 4 * BLOCK, dtype=np.uint8))
    source, into, parts = MemorySource("m", {"p": memoryview(data)}), bytearray(length), list[bytes]()
    source.read_into("p", 77, memoryview(into), lambda part: parts.append(bytes(part)))
    assert bytes(into) == b"".join(parts) == data[77 : 77 + length]
    assert all(len(part) <= BLOCK for part in parts)


def test_what_memory_has_not_is_an_error() -> None:
    reader = DigestReader(MemorySource("m", {"p": memoryview(bytes(100))}))
    with pytest.raises(NotFoundError, match="no buffer has this name"):
        reader.fill("q", 0, memoryview(bytearray(1)))
    with pytest.raises(CorruptError, match="bytes 90 to 101 are wanted, and it has 100"):
        reader.fill("p", 90, memoryview(bytearray(11)))
    with pytest.raises(CorruptError, match="bytes -8 to 3 are wanted"):  # a slice would begin at the end
        reader.fill("p", -8, memoryview(bytearray(11)))
