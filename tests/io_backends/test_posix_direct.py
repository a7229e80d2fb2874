"""Direct writes of the POSIX backend: which bytes go which way, that all arrive, and what happens where the file system says no."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import NoSpaceError, StorageError, UsageError
from ckpt.io_backends import PosixBackend
from ckpt.io_backends import posix_direct as posix_direct
from ckpt.io_backends import posix_direct as posix_probe
from ckpt.io_backends import posix_writer as posix_writer
from ckpt.io_backends.posix_direct import LARGE_FILE, PAGE, Cost, DirectFile, FileSystem, pays, split
from ckpt.io_backends.posix_files import kind_of_file_system
from ckpt.policies import EverySteps

MIB = 1 << 20
SIZE = 6 * MIB + 1234
DATA = random.Random(7).randbytes(SIZE)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known about any file system, and everything that can be written directly is."""
    monkeypatch.setattr(posix_probe, "_known", {})
    monkeypatch.setenv("CKPT_DIRECT", "on")


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(str(tmp_path / "root"))


@pytest.fixture
def takes_direct(tmp_path: Path) -> None:
    if FileSystem().addresses(str(tmp_path)) is None:
        pytest.skip("the file system of the temporary directory takes no direct writes")


@pytest.fixture
def pages() -> Iterator[memoryview]:
    """``DATA`` in memory that begins at a page."""
    memory = mmap.mmap(-1, SIZE)
    memory[:] = DATA
    with memoryview(memory) as view:
        yield view


def in_memory(path: str) -> bool:
    """Whether a path lies on a file system that keeps everything in memory."""
    return kind_of_file_system(path) in posix_probe._IN_MEMORY


def cached(file: Path, offset: int) -> bool:
    """Whether the page at ``offset`` is in the page cache. File systems in memory have nothing else."""
    if in_memory(str(file)):
        return True
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def from_device(file: Path) -> bytes:
    """The bytes of a file as they are on the device: its clean pages are dropped from the cache first."""
    with open(file, "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return opened.readall()


# ------------------------------------------------------------------------------------------------------------ which way


@given(
    st.lists(st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 2 * PAGE)), max_size=8),
    st.integers(0, 3 * PAGE),
    st.sampled_from([1, 4, 64, 512, PAGE]),
    st.integers(1, 3 * PAGE),
)
def test_runs_are_the_views_cut_at_pages(parts: list[tuple[int, int]], offset: int, multiple: int, large: int) -> None:
    memory = mmap.mmap(-1, 8 * PAGE)
    whole = memoryview(memory)
    whole[:] = random.Random(len(parts)).randbytes(8 * PAGE)
    views = [whole[begin : begin + length] for length, begin in parts]
    runs = split(offset, views, multiple, large=large)
    assert b"".join(b"".join(run.views) for run in runs) == b"".join(views)
    at = offset
    for run in runs:
        assert run.offset == at
        at += sum(view.nbytes for view in run.views)
        assert all(view.nbytes for view in run.views)
        assert not run.direct or (run.offset % PAGE == 0 and at % PAGE == 0 and len(run.views) == 1)
    assert all(a.direct or b.direct for a, b in pairwise(runs))


@given(st.lists(st.integers(1, 12 * PAGE - 1), max_size=12), st.sampled_from([4, 512, PAGE]), st.integers(1, 2 * PAGE))
def test_no_page_is_written_both_ways(cuts: list[int], multiple: int, large: int) -> None:
    memory = mmap.mmap(-1, 12 * PAGE)
    ends = [0, *sorted(set(cuts)), 12 * PAGE]
    ways: dict[bool, list[int]] = {True: [], False: []}
    for lo, hi in pairwise(ends):
        for run in split(lo, [memoryview(memory)[lo:hi]], multiple, large=large):
            stop = run.offset + sum(view.nbytes for view in run.views)
            ways[run.direct] += range(run.offset // PAGE, -(-stop // PAGE))
    assert len(ways[True]) == len(set(ways[True]))
    assert not set(ways[True]) & set(ways[False])
    assert set(ways[True]) | set(ways[False]) == set(range(12))


@pytest.mark.parametrize("skew", [0, 64, 512])
def test_what_can_go_directly_does(skew: int) -> None:
    memory = mmap.mmap(-1, 8 * PAGE)
    view = memoryview(memory)[skew : skew + 4 * PAGE]
    wants_64 = [(run.offset, sum(v.nbytes for v in run.views), run.direct) for run in split(PAGE, [view], 64, large=PAGE)]
    assert wants_64 == [(PAGE, 4 * PAGE, True)]
    wants_page = [run.direct for run in split(PAGE, [view], PAGE, large=PAGE)]
    assert wants_page == [skew == 0]
    ragged = [(run.offset, sum(v.nbytes for v in run.views), run.direct) for run in split(PAGE + 64, [view], 64, large=PAGE)]
    assert ragged == [(PAGE + 64, PAGE - 64, False), (2 * PAGE, 3 * PAGE, True), (5 * PAGE, 64, False)]
    assert not any(run.direct for run in split(0, [view], 4, large=4 * PAGE + 1))


@pytest.mark.usefixtures("takes_direct")
def test_large_parts_leave_the_page_cache_alone(backend: PosixBackend, tmp_path: Path, pages: memoryview) -> None:
    file = tmp_path / "root" / "a"
    with backend.create("a", SIZE) as writer:
        writer.write(0, [pages[: 100 + MIB]])
        writer.write(100 + MIB, [pages[100 + MIB :]])
        writer.commit()
    inner = [PAGE, MIB - PAGE, MIB + PAGE, 3 * MIB, 6 * MIB - PAGE]
    edges = [MIB, SIZE - 1]
    if not in_memory(str(tmp_path)):
        assert [cached(file, at) for at in inner] == [False] * 5
        assert [cached(file, at) for at in edges] == [True] * 2
    assert from_device(file) == DATA


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_small_files_and_off_go_through_the_cache(
    backend: PosixBackend, tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("CKPT_DIRECT", mode)
    with backend.create("a", SIZE) as writer:
        writer.write(0, [pages])
        writer.commit()
    assert cached(tmp_path / "root" / "a", 3 * MIB)
    assert posix_probe._known.get(os.stat(tmp_path).st_dev, FileSystem())._addresses == []  # nobody was asked
    assert from_device(tmp_path / "root" / "a") == DATA


# ----------------------------------------------------------------------------------------------------------- all arrive


def _random_cuts(chance: random.Random, size: int) -> list[int]:
    """Cuts at pages, beside pages and anywhere; ranges from one byte to megabytes."""
    inside = {chance.randrange(1, size) for _ in range(12)} | {chance.randrange(1, size // PAGE) * PAGE for _ in range(6)}
    beside = {cut + chance.choice([-1, 1, 64, 511]) for cut in list(inside)[:8]}
    return [0, *sorted(cut for cut in inside | beside if 0 < cut < size), size]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("skew", [0, 64])
def test_random_cuts_from_many_threads(
    backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, skew: int
) -> None:
    monkeypatch.setattr(posix_direct, "LARGE", 2 * PAGE)  # many direct ranges beside many buffered ones
    chance = random.Random(seed)
    memory = mmap.mmap(-1, SIZE + PAGE)
    memory[skew : skew + SIZE] = DATA
    view = memoryview(memory)[skew : skew + SIZE]
    cuts = _random_cuts(chance, SIZE)
    ranges = [(lo, chance.randrange(lo, hi), hi) for lo, hi in pairwise(cuts)]
    chance.shuffle(ranges)
    with backend.create("a", SIZE) as writer:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda r: writer.write(r[0], [view[r[0] : r[1]], b"", view[r[1] : r[2]]]), ranges))
        writer.commit()
    assert from_device(tmp_path / "root" / "a") == DATA


def test_the_last_write_of_a_range_holds(backend: PosixBackend, tmp_path: Path, pages: memoryview) -> None:
    zeros = memoryview(mmap.mmap(-1, SIZE))
    with backend.create("a", SIZE) as writer:
        writer.write(1, [bytes(zeros)[: SIZE - 1]])  # buffered, then directly over it
        writer.write(0, [pages])
        writer.write(0, [zeros[: 2 * MIB]])  # directly, then buffered over it
        writer.write(5, [DATA[5 : 2 * MIB]])
        writer.write(0, [DATA[:5]])
        writer.commit()
    assert from_device(tmp_path / "root" / "a") == DATA


def test_read_only_memory_is_written_too(backend: PosixBackend, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    with open(source, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        writer = backend.create("a", SIZE)
        writer.write(0, [view])
        writer.commit()
    assert from_device(tmp_path / "root" / "a") == DATA


# ------------------------------------------------------------------------------------------- when the file system says no


def instead_of_direct_writes(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, memoryview, int], int]) -> None:
    """``answer(number, data, offset)`` expected direct writes after the probe; the number counts from 0."""
    pwrite, calls = os.pwrite, []

    def watched(fd: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)"):  # the probe
            return pwrite(fd, data, offset)
        calls.append(offset)
        return answer(len(calls) - 1, data, offset)

    monkeypatch.setattr(os, "pwrite", watched)


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refused_write_goes_through_the_cache(
    backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    pwrite = os.pwrite

    def refuse_the_rest(number: int, data: memoryview, offset: int) -> int:
        if number == 0:
            return pwrite(target(), data[: 3 * PAGE], offset)
        raise OSError(code, os.strerror(code))

    def target() -> int:
        return next(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}").endswith("root/a"))

    instead_of_direct_writes(monkeypatch, refuse_the_rest)
    for path in ("a", "b"):
        with backend.create(path, SIZE) as writer:
            writer.write(0, [pages])
            writer.commit()
        assert backend.read(path) == DATA
    assert [(r.levelname, os.strerror(code) in r.getMessage()) for r in caplog.records if r.levelname != "DEBUG"] == [("WARNING", True)]


class Spoilt:
    """A file system that refuses the third direct write of a file, and from then on every write through descriptors that are open, as some
    with FUSE do. ``late``: closing the direct descriptor then tells that an earlier write failed."""

    def __init__(self, patch: pytest.MonkeyPatch, *, late: bool) -> None:
        self.direct: list[int] = []
        self.refused = False
        self.count = 0
        self.late = late
        self.known: set[int] = set()
        self.real = os.open, os.pwrite, os.pwritev, os.close
        for name in ("open", "pwrite", "pwritev", "close"):
            patch.setattr(os, name, getattr(self, name))

    def open(self, path: Any, flags: int, *args: int, **options: Any) -> int:
        fd = self.real[0](path, flags, *args, **options)
        if str(path).endswith("root/a"):
            self.known.discard(fd)
            if flags & os.O_DIRECT:
                self.direct.append(fd)
            elif not self.refused:
                self.known.add(fd)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd in self.direct:
            self.count += 1
            self.refused = self.refused or self.count > 2
            self._check()
        return self.real[1](fd, data, offset)

    def pwritev(self, fd: int, parts: Any, offset: int) -> int:
        if fd in self.known and self.refused:
            self._check()
        return self.real[2](fd, parts, offset)

    def _check(self) -> None:
        if self.refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def close(self, fd: int) -> None:
        self.real[3](fd)
        self.known.discard(fd)
        if fd in self.direct:
            self.direct.remove(fd)
            if self.refused and self.late:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def write_in_blocks(backend: PosixBackend, pages: memoryview) -> None:
    """Every second block is hashed on its way, and once, however often it has to be written."""

    def write(at: int) -> None:
        block = pages[at : at + MIB]
        if at % (2 * MIB):
            writer.write(at, [block])
        else:
            hashed = bytearray()
            writer.write_hashed(at, block, hashed.extend)
            assert hashed == block

    with backend.create("a", SIZE) as writer, ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(0, SIZE, MIB)))
        writer.commit()


@pytest.mark.usefixtures("takes_direct")
def test_after_a_refusal_nothing_goes_through_old_descriptors(
    backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    spoilt = Spoilt(monkeypatch, late=False)
    write_in_blocks(backend, pages)
    assert spoilt.refused and backend.read("a") == DATA
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("takes_direct")
def test_a_refusal_that_comes_late_fails_the_file_and_leaves_nothing(
    backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = Spoilt(monkeypatch, late=True)
    with pytest.raises(StorageError, match=r"may be lost: Invalid argument.*\n.*save again"):
        write_in_blocks(backend, pages)
    gc.collect()  # the error's frames have views of the pages
    assert spoilt.refused and backend.list_dir() == []
    spoilt.refused = False
    write_in_blocks(backend, pages)  # through the page cache
    assert backend.read("a") == DATA and spoilt.direct == []


@pytest.mark.usefixtures("takes_direct")
def test_a_writer_that_cannot_be_closed_is_aborted_all_the_same(
    backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, failed = os.close, []

    def broken(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if name.endswith("root/a"):
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", broken)
    writer = backend.create("a", SIZE)
    writer.write(0, [pages])
    writer.abort()
    assert len(failed) == 2 and backend.list_dir() == []


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("taken", [PAGE, 3 * PAGE + 512, 0])
def test_short_writes_are_continued(backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    pwrite, open_file, direct = os.pwrite, os.open, []

    def watch(path: Any, flags: int, *args: int, **options: Any) -> int:
        fd = open_file(path, flags, *args, **options)
        if flags & os.O_DIRECT and str(path).endswith("root/a"):
            direct.append(fd)
        return fd

    monkeypatch.setattr(os, "open", watch)
    instead_of_direct_writes(monkeypatch, lambda _, data, offset: pwrite(direct[0], data[:taken], offset) if taken else 0)
    with backend.create("a", SIZE) as writer:
        writer.write(0, [pages])
        writer.commit()
    assert backend.read("a") == DATA


@pytest.mark.usefixtures("takes_direct")
def test_a_full_disk_is_told(backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with backend.create("a", SIZE) as writer:
        with monkeypatch.context() as patch:
            instead_of_direct_writes(patch, full)
            with pytest.raises(NoSpaceError):
                writer.write(0, [pages])
        with pytest.raises(StorageError, match="but 0 were written"):
            writer.commit()
        writer.write(0, [pages])
        writer.commit()
    assert backend.read("a") == DATA


def no_direct(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    open_file = os.open

    def refuse(path: Any, flags: int, *args: int, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return open_file(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize(("mode", "told"), [("on", 1), ("auto", 0)])
def test_a_file_system_without_direct_writes(
    backend: PosixBackend, pages: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, told: int
) -> None:
    monkeypatch.setenv("CKPT_DIRECT", mode)
    monkeypatch.setattr(posix_writer, "LARGE_FILE", MIB)
    no_direct(monkeypatch, errno.EINVAL)
    for path in ("a", "b"):
        with backend.create(path, SIZE) as writer:
            writer.write(0, [pages])
            writer.commit()
    assert backend.read("a") == backend.read("b") == DATA
    assert backend.list_dir() == ["a", "b"]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == told


def test_a_file_made_anew_by_somebody_else_is_not_touched(backend: PosixBackend, tmp_path: Path, pages: memoryview) -> None:
    file = tmp_path / "root" / "a"
    writer = backend.create("a", SIZE)
    file.unlink()
    file.write_bytes(b"theirs")
    writer.write(0, [pages])
    with pytest.raises(StorageError, match="removed"):
        writer.commit()
    assert file.read_bytes() == b"theirs"


def test_a_late_direct_write_reaches_no_other_file(backend: PosixBackend, tmp_path: Path, pages: memoryview, monkeypatch: Any) -> None:
    started, aborted, pwrite = threading.Event(), threading.Event(), os.pwrite

    def slow(fd: int, data: memoryview, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)"):  # not the probe
            started.set()
            assert aborted.wait(10)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    if FileSystem().addresses(str(tmp_path)) is None:
        pytest.skip("the file system of the temporary directory takes no direct writes")
    before = len(os.listdir("/proc/self/fd"))
    writer = backend.create("a", SIZE)
    thread = threading.Thread(target=writer.write, args=(0, [pages]))
    thread.start()
    assert started.wait(10)
    writer.abort()
    with open(tmp_path / "other", "w+b", buffering=0) as other:
        aborted.set()
        thread.join()
        assert other.read() == b""
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_is_leaked(backend: PosixBackend, pages: memoryview) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("committed", "aborted", "dropped"):
        writer = backend.create(path, SIZE)
        writer.write(0, [pages])
        if path == "committed":
            writer.commit()
        elif path == "aborted":
            writer.abort()
        del writer
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------------------ the probe


@pytest.mark.parametrize(
    ("direct", "buffered", "worth"),
    [
        ((1.0, 1.0), (1.0, 1.0), True),
        ((1.2, 2.0), (1.0, 1.0), True),
        ((1.3, 0.9), (1.0, 1.0), False),
        ((1.9, 0.4), (1.0, 1.0), True),
        ((2.1, 0.0), (1.0, 1.0), False),
    ],
)
def test_when_direct_writes_pay(direct: tuple[float, float], buffered: tuple[float, float], worth: bool) -> None:
    assert pays(Cost(wall=direct[0], cpu=direct[1]), Cost(wall=buffered[0], cpu=buffered[1])) is worth


@pytest.mark.usefixtures("takes_direct")
def test_the_probe_answers_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, seen = os.pwritev, []

    def watched(fd: int, views: list[memoryview], offset: int) -> int:
        seen.append(os.listdir(tmp_path))
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    before = len(os.listdir("/proc/self/fd"))
    system = FileSystem()
    first = system.pays(str(tmp_path)), system.addresses(str(tmp_path))
    written = len(seen)
    assert (system.pays(str(tmp_path)), system.addresses(str(tmp_path))) == first
    assert first[1] in (4, 64, 512, PAGE)
    assert len(seen) == written
    assert seen == [[]] * written  # what a kill would leave at any of these moments
    assert written >= 32 or in_memory(str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_never_pays() -> None:
    if not os.path.isdir("/dev/shm") or not in_memory("/dev/shm"):
        pytest.skip("no file system in memory")
    assert FileSystem().pays("/dev/shm") is False


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSPC, errno.EACCES])
def test_a_probe_that_fails_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    no_direct(monkeypatch, code)
    system = FileSystem()
    assert system.addresses(str(tmp_path)) is None
    assert system.pays(str(tmp_path)) is False
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("takes_direct")
def test_auto_asks_the_file_system_for_large_files(backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_DIRECT", "auto")
    cached_by_answer = {}
    for answer in (True, False):
        monkeypatch.setattr(posix_probe, "_known", {})
        monkeypatch.setattr(FileSystem, "pays", lambda *_, answer=answer: answer)
        with mmap.mmap(-1, MIB) as block, memoryview(block) as view, backend.create("a", LARGE_FILE) as writer:
            for at in range(0, LARGE_FILE, MIB):
                view[:8] = at.to_bytes(8, "little")
                writer.write(at, [view])
            writer.commit()
        cached_by_answer[answer] = cached(tmp_path / "root" / "a", 3 * MIB)
        assert [int.from_bytes(backend.read("a", at, 8), "little") for at in range(0, LARGE_FILE, MIB)] == [*range(0, LARGE_FILE, MIB)]
        backend.delete("a")
    assert cached_by_answer == {True: in_memory(str(tmp_path)), False: True}


@pytest.mark.parametrize("text", ["", "yes", "ON"])
def test_the_variable_is_checked(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CKPT_DIRECT", text)
    with pytest.raises(UsageError, match="CKPT_DIRECT"):
        backend.create("a", 1)
    assert backend.list_dir() == []


@pytest.mark.usefixtures("takes_direct")
def test_saves_of_a_loop_go_past_the_page_cache_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, write = [0], DirectFile.write

    def counted(self: DirectFile, view: memoryview, offset: int) -> int:
        taken = write(self, view, offset)
        direct[0] += taken
        return taken

    monkeypatch.setattr(DirectFile, "write", counted)
    model = torch.nn.Linear(1 << 10, 3000)  # 12 MB, twice more for the optimizer; none ends at a page
    odd = torch.arange((1 << 20) + 3, dtype=torch.float64)[3:]
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "odd": odd, "n": 0}
    root, saved = str(tmp_path / "run"), dict[int, dict[str, torch.Tensor]]()
    with ckpt.Checkpointer(root, save=EverySteps(1)) as c:
        for n in (1, 2):
            model(torch.ones(2, 1 << 10)).square().sum().backward()
            optimizer.step()
            odd += 1
            state["n"] = n
            c.step(n, state)
            saved[n] = {"odd": odd.clone(), **{f"model.{k}": v.clone() for k, v in model.state_dict().items()}}
        assert c.handle is not None
        c.handle.result()
    assert direct[0] > 80 * MIB, "the device took them from memory"
    for n, tensors in saved.items():
        assert not verify(f"{root}/step-{n:08d}").problems
        into = {"model": torch.nn.Linear(1 << 10, 3000), "odd": torch.zeros_like(odd), "n": 0}
        ckpt.load(f"{root}/step-{n:08d}", into, only=["model.*", "odd", "n"])
        assert into["n"] == n and torch.equal(into["odd"], tensors["odd"])
        assert all(torch.equal(value, tensors[f"model.{name}"]) for name, value in into["model"].state_dict().items())
