"""The POSIX backend beyond the tables: roots, links, odd system calls, refusals and full disks."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import AccessError, ConflictError, CorruptError, NoSpaceError, NotFoundError, StorageError, UsageError
from ckpt.io_backends import ObjectMeta, PosixBackend
from ckpt.io_backends.conformance.reading import put
from ckpt.io_backends.posix_files import SLICE
from tests.mounts import small_file_system

BYTES = bytes(range(256))
WRITES: dict[str, Callable[[PosixBackend], object]] = {
    "create": lambda b: b.create("new/a", 1),
    "publish": lambda b: b.put_if("new/a", b"x", expected=None),
    "prepare": lambda b: b.prepare(),
}


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(str(tmp_path / "root"))


# ---------------------------------------------------------------------------------------------------------------- roots


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/a/b/", "/a/b"),
        ("//a//b/../c", "/a/c"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a", "/a"),
        ("file:/a", "/a"),
        ("file:///a%20b/100%25", "/a b/100%"),
        ("/a%20b", "/a%20b"),
        ("~/x", "/home/somebody/x"),
        ("rel/x", "/started-here/rel/x"),
        ("/", "/"),
    ],
)
def test_root(url: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(os, "getcwd", lambda: "/started-here")
    assert PosixBackend(url).url == root


@pytest.mark.parametrize("url", ["file://host/a", "file://runs", "file:", "", "a\0b"])
def test_not_a_root(url: str) -> None:
    with pytest.raises(UsageError):
        PosixBackend(url)


def test_root_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = PosixBackend("run")
    put(backend, "a", b"x")
    monkeypatch.chdir("/")
    assert backend.read("a") == b"x"
    assert (tmp_path / "run" / "a").read_bytes() == b"x"


# ---------------------------------------------------------------------------------------------------------------- files


def test_links_are_read_through_but_not_walked(backend: PosixBackend, tmp_path: Path) -> None:
    put(backend, "step-1/a", b"12")
    put(backend, "blob", b"345")
    root = tmp_path / "root"
    (root / "latest").symlink_to("step-1")
    (root / "model").symlink_to("blob")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    assert list(backend.list_prefix()) == [ObjectMeta("blob", 3), ObjectMeta("model", 3), ObjectMeta("step-1/a", 2)]
    assert list(backend.list_prefix("latest/")) == [ObjectMeta("latest/a", 2)]
    assert backend.list_dir() == ["blob", "latest/", "model", "step-1/"]
    assert backend.read("latest/a") == b"12"
    assert backend.read("model") == b"345"
    with pytest.raises(ConflictError):
        backend.create("dangling", 1)


def test_list_skips_what_vanishes(backend: PosixBackend, tmp_path: Path) -> None:
    for path in ("a", "b", "d/c"):
        put(backend, path)
    entries = backend.list_prefix()
    assert next(entries) == ObjectMeta("a", 1)
    (tmp_path / "root" / "d" / "c").unlink()
    (tmp_path / "root" / "d").rmdir()
    (tmp_path / "root" / "b").unlink()
    assert list(entries) == []


def test_files_follow_the_umask(backend: PosixBackend, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        put(backend, "a")
        backend.put_if("b", b"x", expected=None)
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) for name in "ab"] == [0o640, 0o640]


def test_file_cut_between_size_and_read(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(backend, "a", BYTES)
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: b"x" * min(n, 10))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(CorruptError, match="a"):
        backend.read("a")
    with pytest.raises(CorruptError):
        backend.read_into("a", 0, memoryview(bytearray(256)))


def test_short_reads_are_continued(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(backend, "a", BYTES)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 5), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    assert backend.read("a", 3, 200) == BYTES[3:203]
    buffer = bytearray(100)
    backend.read_into("a", 50, memoryview(buffer))
    assert buffer == BYTES[50:150]


def test_short_writes_are_continued(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: pwrite(fd, b"".join(buffers)[:7], offset))
    parts = [BYTES[:3], BYTES[3:10], b"", BYTES[10:11], BYTES[11:200], BYTES[200:]]
    with backend.create("a", 256) as writer:
        writer.write(0, parts)
        writer.commit()
    backend.put_if("b", BYTES, expected=None)
    assert backend.read("a") == backend.read("b") == BYTES


def test_what_is_hashed_on_the_way_is_what_is_stored(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one slice, of calls that take and give fewer bytes than asked for."""
    data = memoryview(random.Random(3).randbytes(2 * SLICE + 12_345))
    pwritev, preadv = os.pwritev, os.preadv
    written, hashed, seen = hashlib.sha256(), hashlib.sha256(), [0]

    def update(part: memoryview) -> None:
        seen.append(len(part))
        written.update(part)

    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: pwritev(fd, [buffers[0][:100_000]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:100_000]], offset))
    with backend.create("a", len(data) + 5) as writer:
        writer.write(0, [b"first"])
        writer.write_hashed(5, data, update)
        writer.commit()
    buffer = bytearray(len(data))
    backend.read_hashed("a", 5, memoryview(buffer), hashed.update)
    assert buffer == data and backend.read("a") == b"first" + data
    assert written.digest() == hashed.digest() == hashlib.sha256(data).digest()
    assert max(seen) == SLICE
    with pytest.raises(CorruptError, match="a"):
        backend.read_hashed("a", 6, memoryview(buffer), hashed.update)


def test_a_file_that_has_to_be_opened_again_is_hashed_once(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(4).randbytes(3 * SLICE)
    put(backend, "a", data)
    preadv, stale = os.preadv, [False, True, False]

    def stale_once(fd: int, buffers: Any, offset: int) -> int:
        if stale and stale.pop(0):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", stale_once)
    buffer, digest = bytearray(len(data)), hashlib.sha256()
    backend.read_hashed("a", 0, memoryview(buffer), digest.update)
    assert not stale and buffer == data and digest.digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("answers", [[4, 0], [4, OSError(errno.ENOSPC, "full")]])
def test_a_failed_write_does_not_count(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, answers: list[int | OSError]) -> None:
    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return os.pwrite(fd, b"".join(buffers)[:answer], offset)

    with backend.create("a", 8) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            with pytest.raises(StorageError):
                writer.write(0, [b"12345678"])
        with pytest.raises(StorageError, match="8 bytes were planned, but 0"):
            writer.commit()
        writer.write(0, [b"abcdefgh"])
        writer.commit()
    assert backend.read("a") == b"abcdefgh"


def test_a_late_write_reaches_no_other_file(backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, aborted, pwritev = threading.Event(), threading.Event(), os.pwritev

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        started.set()
        assert aborted.wait(10)
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    writer = backend.create("a", 4)
    thread = threading.Thread(target=writer.write, args=(0, [b"late"]))
    thread.start()
    assert started.wait(10)
    with pytest.raises(UsageError, match="running"):
        writer.commit()
    writer.abort()
    with open(tmp_path / "other", "w+b", buffering=0) as other:  # would get the number of a descriptor closed too early
        before = len(os.listdir("/proc/self/fd"))
        aborted.set()
        thread.join()
        assert other.read() == b""
        assert len(os.listdir("/proc/self/fd")) == before - 1  # closed by the write that used it last
    assert list(backend.list_prefix()) == []


@pytest.mark.parametrize("name", ["create", "publish"])
def test_directories_that_others_prune_are_made_again(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    system_open, pruned = os.open, []

    def open_late(path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_CREAT and len(pruned) < 5:
            os.rmdir(os.path.dirname(path))
            pruned.append(path)
        return system_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", open_late)
    WRITES[name](backend)
    assert len(pruned) == 5
    assert backend.list_dir() == ["new/"]


def test_no_descriptor_is_leaked(backend: PosixBackend) -> None:
    def use_everything() -> None:
        put(backend, "a", BYTES)
        backend.create("dropped", 1)
        with backend.create("aborted", 1):
            pass
        backend.put_if("p", b"1", expected=None)
        backend.put_if("p", b"2", expected=b"1")
        for call in (
            lambda: backend.create("a", 1),
            lambda: backend.put_if("p", b"1", expected=b"1"),
            lambda: backend.put_if("p", b"1", expected=None),
            lambda: backend.read("a", 0, 1000),
            lambda: backend.read("no"),
        ):
            with pytest.raises((StorageError, CorruptError, NotFoundError)):
                call()
        for path in ("a", "dropped", "p"):
            backend.delete(path)

    before = len(os.listdir("/proc/self/fd"))
    committed, aborted = backend.create("c", 0), backend.create("d", 0)
    committed.commit()
    aborted.abort()
    use_everything()
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, AccessError),
        (errno.EPERM, AccessError),
        (errno.EROFS, AccessError),
        (errno.EIO, StorageError),
        (errno.ENOENT, StorageError),
        (errno.ENAMETOOLONG, StorageError),
    ],
)
@pytest.mark.parametrize("name", WRITES)
def test_errors_name_file_reason_and_remedy(
    backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, kind: type[StorageError]
) -> None:
    backend.prepare()

    def refuse(path: str, flags: int, mode: int = 0) -> int:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError) as error:
        WRITES[name](backend)
    monkeypatch.undo()
    assert type(error.value) is kind
    assert error.value.errno == code
    assert os.strerror(code) in error.value.message
    assert error.value.where is not None
    assert error.value.where.startswith(str(tmp_path / "root"))
    assert error.value.hint
    assert isinstance(error.value.__cause__, OSError)
    assert backend.list_dir() == []


@pytest.mark.parametrize("name", WRITES)
def test_root_below_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for root in ("file", "file/sub"):
        with pytest.raises(StorageError, match="a part of the path is a file") as error:
            WRITES[name](PosixBackend(str(tmp_path / root)))
        assert error.value.errno == errno.ENOTDIR
    with pytest.raises(NotFoundError):
        PosixBackend(str(tmp_path / "file")).read("a")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_root_where_nobody_makes_directories() -> None:
    with pytest.raises(StorageError):
        PosixBackend("/proc/self/no/such").prepare()


@pytest.fixture
def guarded() -> Iterator[PosixBackend]:
    """A directory that everybody may read and nobody may write, with a file that nobody may read; root becomes somebody else meanwhile."""
    root = tempfile.mkdtemp()
    put(PosixBackend(root), "a")
    os.chmod(f"{root}/a", 0)
    os.chmod(root, 0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield PosixBackend(root)
    finally:
        os.seteuid(user)
        os.chmod(root, 0o700)
        shutil.rmtree(root)


def test_missing_rights(guarded: PosixBackend) -> None:
    for call in (*WRITES.values(), lambda b: b.delete("a"), lambda b: b.read("a")):
        with pytest.raises(AccessError) as error:
            call(guarded)
        assert error.value.errno == errno.EACCES
    assert list(guarded.list_prefix()) == [ObjectMeta("a", 1)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_file_system(tmp_path / "small", "256k") as path:
        yield path


def test_full_disk(small_disk: Path) -> None:
    backend = PosixBackend(str(small_disk))
    backend.put_if("kept", b"old", expected=None)
    with backend.create("data/a", 1 << 20) as writer:
        writer.write(0, [bytes(100_000)])
        with pytest.raises(NoSpaceError):
            writer.write(100_000, [bytes((1 << 20) - 100_000)])
        for call in (
            lambda: backend.put_if("kept", bytes(8000), expected=b"old"),
            lambda: backend.put_if("new/b", bytes(8000), expected=None),
            backend.prepare,
        ):
            with pytest.raises(NoSpaceError):
                call()
        assert backend.list_dir() == ["data/", "kept"]
    assert [entry.path for entry in backend.list_prefix()] == ["kept"]
    assert backend.list_dir() == ["kept"]
    backend.put_if("kept", bytes(8000), expected=b"old")


def test_read_only_file_system(small_disk: Path) -> None:
    backend = PosixBackend(str(small_disk))
    put(backend, "a", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for call in (*WRITES.values(), lambda b: b.delete("a"), lambda b: b.put_if("a", b"y", expected=b"x")):
        with pytest.raises(AccessError):
            call(backend)
    assert backend.read("a") == b"x"


def test_a_file_that_is_written_when_the_program_ends_stays_open(tmp_path: Path) -> None:
    """A thread that still writes it would meet a closed descriptor, or one that is another file by now."""
    code = (
        "import atexit, os, sys; from ckpt.io_backends import open_backend\n"
        "kept = []\n"
        "def end(): kept[0].write(0, [b'x' * 9]); kept[0].commit()\n"
        "atexit.register(end)\n"  # before the descriptor is there: it runs after what would close that
        "kept.append(open_backend(sys.argv[1]).create('a', 9))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "a").read_bytes() == b"x" * 9
