"""What the POSIX backend syncs and in which order, what failures leave, and publishing where links or locks are missing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import ConflictError, NoSpaceError, StorageError, UsageError
from ckpt.io_backends import Backend, PosixBackend, posix_files
from ckpt.io_backends.conformance.reading import put
from ckpt.io_backends.conformance.writing import PublishingRows


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(str(tmp_path / "root"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """``sync <path>``, ``link <path>`` and ``rename <path>`` in order, relative to ``tmp_path``; files set aside show as ``aside``."""
    seen: list[str] = []

    def shown(path: str) -> str:
        relative = os.path.relpath(path, tmp_path)
        return "aside" if os.path.basename(path).startswith(".publish-") else relative

    def watch(name: str, path_of: Callable[..., str]) -> None:
        call = getattr(os, name)

        def watched(*args: Any) -> None:
            call(*args)
            seen.append(f"{name} {shown(path_of(*args))}")

        monkeypatch.setattr(os, name, watched)

    watch("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    watch("link", lambda source, target: target)
    watch("rename", lambda source, target: target)
    return seen


def test_commit_syncs_the_file_then_its_directories(backend: PosixBackend, events: list[str]) -> None:
    with backend.create("data/sub/a", 1) as writer:
        writer.write(0, [b"x"])
        assert events == []
        writer.commit()
    assert events == ["fsync root/data/sub/a", "fsync root/data/sub", "fsync root/data", "fsync root", "fsync ."]
    events.clear()
    put(backend, "data/b")  # whoever made data/ may not have synced it yet
    assert events == ["fsync root/data/b", "fsync root/data", "fsync root"]


def test_prepare_syncs_what_it_makes(backend: PosixBackend, events: list[str], tmp_path: Path) -> None:
    PosixBackend(str(tmp_path / "x" / "y")).prepare()
    assert sorted(events) == ["fsync .", "fsync x", "fsync x/y"]
    events.clear()
    PosixBackend(str(tmp_path / "x" / "y")).prepare()
    assert events == []


def test_publish_syncs_content_before_name(backend: PosixBackend, events: list[str]) -> None:
    backend.prepare()
    events.clear()
    backend.put_if("a", b"1", expected=None)
    assert events == ["fsync aside", "link root/a", "fsync root"]
    events.clear()
    backend.put_if("a", b"2", expected=b"1")
    assert events == ["fsync aside", "rename root/a", "fsync root"]


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int = errno.EIO) -> None:
    def failing(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, failing)


def test_commit_that_could_not_sync_cannot_be_repeated(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = backend.create("d/a", 1)
    writer.write(0, [b"x"])
    with monkeypatch.context() as patch:
        fail(patch, "fsync")
        with pytest.raises(StorageError) as error:
            writer.commit()
    assert error.value.errno == errno.EIO
    with pytest.raises(UsageError):
        writer.commit()
    writer.abort()
    assert backend.list_dir() == []


def test_directories_that_cannot_be_synced_are_no_error(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def only_files(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", only_files)
    put(backend, "d/a", b"x")
    backend.put_if("d/b", b"y", expected=None)
    assert (backend.read("d/a"), backend.read("d/b")) == (b"x", b"y")


@pytest.mark.parametrize("name", ["pwritev", "fsync", "link"])
def test_failed_publish_of_a_new_file_leaves_nothing(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patch:
        fail(patch, name)
        with pytest.raises(StorageError) as error:
            backend.put_if("new/dir/a", b"x", expected=None)
    assert type(error.value) is StorageError
    assert backend.list_dir() == []


@pytest.mark.parametrize("name", ["pwritev", "fsync", "rename"])
def test_failed_replacing_leaves_the_old(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    backend.put_if("a", b"old", expected=None)
    with monkeypatch.context() as patch:
        fail(patch, name)
        with pytest.raises(StorageError):
            backend.put_if("a", b"new", expected=b"old")
    assert backend.list_dir() == ["a"]
    assert backend.read("a") == b"old"


def test_link_whose_answer_got_lost(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lost(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", target)

    monkeypatch.setattr(os, "link", lost)
    backend.put_if("a", b"x", expected=None)
    with pytest.raises(FileExistsError):
        backend.put_if("a", b"y", expected=None)
    assert backend.list_dir() == ["a"]
    assert backend.read("a") == b"x"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("links", [True, False])
def test_rename_whose_answer_got_lost(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, number: int, links: bool) -> None:
    rename = os.rename

    def lost(source: str, target: str) -> None:
        rename(source, target)
        raise OSError(number, os.strerror(number), source)

    monkeypatch.setattr(os, "rename", lost)
    if not links:
        fail(monkeypatch, "link", errno.EPERM)
    backend.put_if("a", b"x", expected=None)
    backend.put_if("a", b"y", expected=b"x")
    assert backend.list_dir() == ["a"]
    assert backend.read("a") == b"y"


def test_a_process_that_is_forked_inside_the_lock_does_not_keep_it(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.put_if("a", b"x", expected=None)
    rename, children = os.rename, list[int]()

    def forking(source: str, target: str) -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.pause()
            finally:
                os._exit(0)
        children.append(child)
        rename(source, target)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", forking)
            backend.put_if("a", b"y", expected=b"x")
        monkeypatch.setattr("ckpt.io_backends.posix_files._LOCK_SECONDS", 2.0)
        backend.put_if("a", b"z", expected=b"y")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(children) == 1
    assert backend.read("a") == b"z"


def no_flock(fd: int, operation: int) -> None:
    raise OSError(errno.EBADF, "Bad file descriptor")


class TestWithoutLinks(PublishingRows):
    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        fail(monkeypatch, "link", errno.EPERM)
        return PosixBackend(str(tmp_path / "root"))


class TestWithoutDirectoryLocks(PublishingRows):
    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setattr(fcntl, "flock", no_flock)
        return PosixBackend(str(tmp_path / "root"))


class TestWithoutLinksAndLocks(PublishingRows):
    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        fail(monkeypatch, "link", errno.EPERM)
        monkeypatch.setattr(fcntl, "flock", no_flock)
        return PosixBackend(str(tmp_path / "root"))


def test_lock_file_of_a_dead_process_is_named_and_kept(backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.put_if("a", b"old", expected=None)
    (tmp_path / "root" / ".publish.lock").write_text("host process 1\n")
    monkeypatch.setattr(fcntl, "flock", no_flock)
    monkeypatch.setattr(posix_files, "_LOCK_SECONDS", 0.05)
    with pytest.raises(StorageError, match=r"\.publish\.lock") as error:
        backend.put_if("a", b"new", expected=b"old")
    assert not isinstance(error.value, ConflictError)
    assert backend.list_dir() == [".publish.lock", "a"]
    (tmp_path / "root" / ".publish.lock").unlink()
    backend.put_if("a", b"new", expected=b"old")
    assert backend.list_dir() == ["a"]


def test_lock_file_that_could_not_be_written_is_removed(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.put_if("a", b"old", expected=None)
    monkeypatch.setattr(fcntl, "flock", no_flock)
    fail(monkeypatch, "write", errno.ENOSPC)
    with pytest.raises(NoSpaceError):
        backend.put_if("a", b"new", expected=b"old")
    assert backend.list_dir() == ["a"]
    assert backend.read("a") == b"old"


COUNT = """
import sys
from ckpt.errors import ConflictError
from ckpt.io_backends import PosixBackend

backend = PosixBackend(sys.argv[1])
done = 0
while done < 40:
    now = backend.read("count")
    try:
        backend.put_if("count", b"%d" % (int(now) + 1), expected=now)
        done += 1
    except ConflictError:
        pass
"""

REPLACE_FOREVER = """
import sys
from ckpt.io_backends import PosixBackend

backend = PosixBackend(sys.argv[1])
old = backend.read("a")
while True:
    new = bytes([(old[0] + 1) % 256]) * (5000 + old[0])
    backend.put_if("a", new, expected=old)
    old = new
"""


def test_processes_do_not_lose_each_others_updates(backend: PosixBackend) -> None:
    backend.put_if("count", b"0", expected=None)
    processes = [subprocess.Popen([sys.executable, "-c", COUNT, backend.url]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert backend.read("count") == b"120"
    assert backend.list_dir() == ["count"]


def test_killed_publisher_leaves_whole_content_and_no_lock(backend: PosixBackend) -> None:
    backend.put_if("a", b"\0" * 4999, expected=None)
    process = subprocess.Popen([sys.executable, "-c", REPLACE_FOREVER, backend.url])
    while backend.read("a") == b"\0" * 4999:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = backend.read("a")
    assert found == bytes([found[0]]) * (5000 + (found[0] - 1) % 256)
    backend.put_if("a", b"after", expected=found)
    assert backend.read("a") == b"after"
