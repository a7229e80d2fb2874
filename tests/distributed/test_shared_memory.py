"""Memory that ranks of one machine hand over: never that of another process than the one that filled it, and where it cannot be opened the
bytes go over the connection."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

import ckpt
from tests.distributed.ranks import Ranks
from tests.distributed.test_exchange import in_small_pieces
from tests.distributed.test_read_exchange import load_columns, save_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_DUMPABLE = 4
CAP_SYS_PTRACE = 19


def _system(name: str, *args: Any) -> None:
    """A call of the C library that raises."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(ctypes.get_errno(), name)


def namespaces_of_processes() -> bool:
    """Whether this user may make them."""
    pid = os.fork()
    if not pid:
        os._exit(bool(ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWPID)))
    return os.waitpid(pid, 0)[1] == 0


def in_a_namespace_of_its_own(work: Callable[[], Any], result: Path) -> None:
    """Run ``work`` as process 1 of a namespace with its own /proc, as on a machine of its own."""
    _system("unshare", CLONE_NEWNS | CLONE_NEWPID)
    _system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    pid = os.fork()
    if not pid:
        try:
            _system("mount", b"proc", b"/proc", b"proc", 0, None)
            result.write_text(json.dumps(work()))
        except BaseException as err:  # noqa: BLE001  the test shows it
            result.write_text(json.dumps(repr(err)))
        os._exit(0)
    os.waitpid(pid, 0)


def notices() -> list[str]:
    """What ckpt logs from now on."""
    texts: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logging.getLogger("ckpt").addHandler(Kept(logging.WARNING))
    return texts


def load_as_one_machine(url: str, threads: int) -> tuple[list[tuple[int, int]], int, list[str]]:
    """Compared with what was saved, by ranks that all think that they are on one machine. Processes and numbers of files of rings,
    bytes received, and what was logged."""
    from ckpt.engine.load import shared_reads
    from ckpt.net.shared_memory import SlotPool

    shared_reads.machine = lambda: "one and the same"
    in_small_pieces()
    pools, make, create = [], SlotPool.__init__, os.memfd_create

    def numbered(*args: Any) -> int:
        """The same number on all ranks, however many files each of them has open."""
        file, number = create(*args), 500 + len(pools)
        os.dup2(file, number)
        os.close(file)
        return number

    def made(self: SlotPool, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        pools.append((os.getpid(), self.file))

    os.memfd_create = numbered  # type: ignore[assignment]
    SlotPool.__init__ = made  # type: ignore[method-assign]
    texts = notices()
    return pools, load_columns(url, threads=threads).bytes_received, texts


def load_on_a_machine_like_others(url: str, port: int, folder: str, rank: int, world: int, threads: int) -> None:
    def work() -> Any:
        dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world)
        return load_as_one_machine(url, threads)

    in_a_namespace_of_its_own(work, Path(folder) / f"{rank}.json")


def one_of_many(folder: str, url: str, port: int, world: int, threads: int) -> None:
    """Ranks without a group do not know their numbers."""
    for rank in range(world):
        try:
            os.close(os.open(f"{folder}/{rank}.taken", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        load_on_a_machine_like_others(url, port, folder, rank, world, threads)
        return


@pytest.mark.parametrize("threads", [1, 4])
def test_machines_that_look_alike(ranks: Ranks, tmp_path: Path, threads: int) -> None:
    """Process and file of another rank's memory lead to this rank's own, which has the same shape."""
    if not namespaces_of_processes():
        pytest.skip("this user may not make namespaces")
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(3, one_of_many, str(tmp_path), url, store.port, 3, threads, process_group=False)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(isinstance(result, list) for result in results), results
    assert len({json.dumps(pools) for pools, _, _ in results}) == 1  # the situation that the test is about
    for _, received, texts in results:
        assert received > 0
        assert len([t for t in texts if "comes over the connection" in t and "another process" in t]) == 2


def load_protected(url: str, threads: int) -> tuple[int, list[str]]:
    """As a process that others of its user may not inspect."""
    libc, rank = ctypes.CDLL(None), dist.get_rank()
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for i in (0, 1):  # effective, permitted
        data[i] &= ~(1 << CAP_SYS_PTRACE)
    _system("capset", header, data)
    if rank == 0:
        _system("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    _, received, texts = load_as_one_machine(url, threads)
    return received, texts


@pytest.mark.parametrize("threads", [1, 4])
def test_memory_that_may_not_be_opened(ranks: Ranks, tmp_path: Path, threads: int) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    results = ranks.run(3, load_protected, url, threads)
    assert min(received for received, _ in results) > 0
    assert not results[0][1]
    for _, texts in results[1:]:
        (text,) = texts
        assert "shared memory of rank 0" in text and "Permission denied" in text


def load_damaged_slots(url: str, what: str) -> tuple[str, str]:
    from ckpt.net.streams import Feed

    in_small_pieces()
    put = Feed.put_slot

    def damaging(self: Feed, shared_read: int, piece: int, *, generation: int, packed: Any, **given: Any) -> None:
        if what == "bytes":
            packed.args[0][3] ^= 4
        put(self, shared_read, piece, generation=generation + (what == "generation"), packed=packed, **given)

    if dist.get_rank() == 0:
        Feed.put_slot = damaging  # type: ignore[method-assign]
    try:
        load_columns(url)
    except ckpt.CkptError as err:
        return type(err).__name__, str(err)
    return "", ""


@pytest.mark.parametrize("what", ["bytes", "generation"])
def test_damage_in_shared_memory_is_found(ranks: Ranks, tmp_path: Path, what: str) -> None:
    """Bytes that changed after they were read, and a slot that was filled again too early."""
    url = str(tmp_path / "a")
    ranks.run(2, save_rows, url)
    for kind, text in ranks.run(2, load_damaged_slots, url, what):
        assert kind in ("ExchangeError", "RankFailedError") and "what rank 0 sent was damaged on the way" in text
