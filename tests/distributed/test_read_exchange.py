"""Moving shared reads in situations that are rare on one machine: many threads and receivers, loads that fail before anything moves."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.io_backends.protocol import IOHints
from tests.distributed.ranks import Ranks
from tests.distributed.test_exchange import apart, in_small_pieces

SHAPE = (96, 64)
TENSORS = 16


def state(dim: int, start: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    return {f"w{i}": distribute_tensor(full * start + i, mesh, [Shard(dim)]) for i in range(TENSORS)}


def save_rows(url: str) -> None:
    ckpt.save(url, state(0, 1.0))


def load_columns(url: str, threads: int | None = None) -> ckpt.LoadReport:
    """Load, and compare what this rank got."""
    found = state(1, 0.0)
    report = ckpt.load(url, found, read=ckpt.ReadOptions(exchange=True), job=ckpt.Job(timeout=8, threads=threads))
    for name, wanted in state(1, 1.0).items():
        assert torch.equal(found[name].to_local(), wanted.to_local()), name
    return report


def as_from(hints: IOHints) -> None:
    """From now on files are read as storage with these hints is."""
    from ckpt.io_backends.posix_backend import PosixBackend

    PosixBackend.io_hints = property(lambda self: hints)  # type: ignore[assignment,method-assign]


def load_on_many_threads(url: str) -> int:
    """As from storage that asks for more calls at once than there are threads; all slots are filled before any piece is packed."""
    from ckpt.engine.digest_reader import DigestReader

    apart()
    in_small_pieces()
    fill = DigestReader.fill

    def slowly(self: DigestReader, *args: Any) -> None:
        time.sleep(0.02)
        fill(self, *args)

    DigestReader.fill = slowly  # type: ignore[method-assign]
    as_from(IOHints(concurrency=16))
    return load_columns(url, threads=2).bytes_received


def test_more_threads_than_asked_for_read(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    assert min(ranks.run(2, load_on_many_threads, url)) > 0


def load_in_calls(url: str, pieces: list[int], where: str) -> list[int]:
    """How many bytes each read of data had, where storage has so many best at once."""
    from ckpt.engine.digest_reader import DigestReader

    if where == "apart":
        apart()
    in_small_pieces()
    fill, lengths = DigestReader.fill, []

    def counted(self: DigestReader, path: str, offset: int, memory: memoryview, *more: Any) -> None:
        lengths.append(len(memory))
        fill(self, path, offset, memory, *more)

    DigestReader.fill = counted  # type: ignore[method-assign]
    as_from(IOHints(read_size=pieces[dist.get_rank()]))
    assert (load_columns(url).bytes_received > 0) == (pieces[0] == pieces[1])
    return lengths


@pytest.mark.parametrize("where", ["together", "apart"])
def test_pieces_are_as_long_as_storage_has_them_best(ranks: Ranks, tmp_path: Path, where: str) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    whole = 4 * SHAPE[0] * SHAPE[1] // 2
    for piece in (0, 4096, 1 << 20):
        lengths = [n for found in ranks.run(2, load_in_calls, url, [piece] * 2, where) for n in found]
        assert sum(lengths) == 2 * TENSORS * whole
        assert max(lengths) == min(whole, max(piece, 1024))


def test_ranks_that_cut_otherwise_do_not_share(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    ranks.run(2, load_in_calls, url, [0, 4096], "apart")


def load_on_two_machines(url: str, threads: int) -> int:
    from ckpt.engine.load import shared_reads

    in_small_pieces()
    shared_reads.machine = lambda: f"{dist.get_rank() // 2}"
    return load_columns(url, threads=threads).bytes_received


@pytest.mark.parametrize("threads", [1, 4])
def test_some_ranks_are_near_and_some_are_not(ranks: Ranks, tmp_path: Path, threads: int) -> None:
    """A piece goes packed to one rank, and in a slot to another."""
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    assert min(ranks.run(4, load_on_two_machines, url, threads)) > 0


def load_with_few_connections(url: str) -> int:
    import ckpt.net.exchange

    apart()
    in_small_pieces()
    ckpt.net.exchange.CONNECTIONS = 1
    return load_columns(url).bytes_received


def test_more_receivers_than_connections_of_an_exchange(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(3, save_rows, url)
    assert min(ranks.run(3, load_with_few_connections, url)) > 0


def save_rows_by_dcp(path: str) -> None:
    dcp.save(state(0, 1.0), checkpoint_id=path)


def load_with_a_hole(url: str, exchange: bool) -> tuple[str, str]:
    found = state(1, 0.0)
    try:
        ckpt.load(url, found, read=ckpt.ReadOptions(exchange=exchange))
    except ckpt.errors.CkptError as err:
        return type(err).__name__, str(err)
    return "", ""


@pytest.mark.parametrize("exchange", [True, False])
def test_a_hole_between_chunks_is_found(ranks: Ranks, tmp_path: Path, exchange: bool) -> None:
    """Whoever reads them: memory is never left as it was."""
    ranks.run(2, save_rows_by_dcp, str(tmp_path))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    first, second = metadata.state_dict_metadata["w3"].chunks
    metadata.state_dict_metadata["w3"].chunks[1] = type(second)(offsets=first.offsets, sizes=second.sizes)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for kind, text in ranks.run(2, load_with_a_hole, str(tmp_path), exchange):
        assert kind == "CorruptError" and "tensor w3, not one" in text


def load_damaged(url: str) -> tuple[list[str], int]:
    errors = []
    for _ in range(2):
        try:
            load_columns(url)
        except ckpt.errors.CkptError as err:
            errors.append(str(err))
    open_files = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return errors, sum("ckpt-pool" in name for name in open_files)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_a_load_that_fails_early_keeps_no_memory(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    os.truncate(sorted((tmp_path / "a" / "data").iterdir())[-1], 100)
    for errors, pools in ranks.run(2, load_damaged, url):
        assert len(errors) == 2 and pools == 0
