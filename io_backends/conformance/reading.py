"""The rows of the behaviour tables that say how objects are named, read and listed. See ``conformance``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pytest

from ckpt.errors import CkptError, CorruptError, NotFoundError, UsageError
from ckpt.io_backends.protocol import Backend, ObjectMeta
from ckpt.io_backends.registry import open_backend

NOT_PATHS = ["", "/a", "a/", "a//b", ".", "..", "./a", "a/./b", "../a", "a/../b", "a\0b"]
NOT_PREFIXES = ["/", "/a", "a//", "a//b", "..", "../a", "a/../b", "./a"]
BYTES = bytes(range(256)) * 4


def put(backend: Backend, path: str, data: bytes = b"x") -> None:
    """Write a whole object."""
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()


def everything(backend: Backend) -> dict[str, bytes]:
    """All objects and their bytes."""
    return {entry.path: backend.read(entry.path) for entry in backend.list_prefix()}


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once, one thread each; gives results, and our errors in place of results."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return call()
        except CkptError as err:
            return err

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class ArgumentsRows:
    @pytest.mark.parametrize("path", NOT_PATHS)
    def test_refuses_what_is_no_path(self, backend: Backend, path: str) -> None:
        for call in (
            lambda: backend.read(path),
            lambda: backend.read_into(path, 0, memoryview(bytearray(1))),
            lambda: backend.size(path),
            lambda: backend.create(path, 0),
            lambda: backend.put_if(path, b"x", expected=None),
            lambda: backend.delete(path),
        ):
            with pytest.raises(UsageError):
                call()
        assert everything(backend) == {}

    @pytest.mark.parametrize("prefix", NOT_PREFIXES)
    def test_refuses_what_is_no_prefix(self, backend: Backend, prefix: str) -> None:
        with pytest.raises(UsageError):
            list(backend.list_prefix(prefix))
        with pytest.raises(UsageError):
            backend.list_dir(prefix)

    def test_refuses_path_objects(self, backend: Backend) -> None:
        with pytest.raises(UsageError, match="str"):
            backend.read(PurePosixPath("a"))  # type: ignore[arg-type]

    def test_url_opens_the_same_root(self, backend: Backend) -> None:
        put(backend, "a/b", BYTES)
        assert everything(open_backend(backend.url)) == {"a/b": BYTES}


class ReadingRows:
    @pytest.mark.parametrize(
        ("offset", "length"), [(0, None), (0, 0), (0, 1024), (7, 100), (1000, None), (1023, 1), (1024, 0), (1024, None)]
    )
    def test_reads_exactly(self, backend: Backend, offset: int, length: int | None) -> None:
        put(backend, "d/a", BYTES)
        expected = BYTES[offset:] if length is None else BYTES[offset : offset + length]
        assert backend.read("d/a", offset, length) == expected
        buffer = bytearray(b"\xaa" * len(expected))
        backend.read_into("d/a", offset, memoryview(buffer))
        assert buffer == expected

    @pytest.mark.parametrize(("offset", "length"), [(0, 1025), (1000, 25), (1024, 1), (1025, 0), (1025, None), (5000, 3)])
    def test_reading_past_the_end_is_corrupt(self, backend: Backend, offset: int, length: int | None) -> None:
        put(backend, "d/a", BYTES)
        with pytest.raises(CorruptError) as error:
            backend.read("d/a", offset, length)
        for part in ("d/a", str(offset), str(offset + (length or 0)), "1024"):
            assert part in str(error.value)
        with pytest.raises(CorruptError, match="1024"):
            backend.read_into("d/a", offset, memoryview(bytearray(length or 0)))

    def test_hashes_what_it_reads(self, backend: Backend) -> None:
        put(backend, "a", BYTES)
        buffer, hashed = bytearray(900), bytearray()
        backend.read_hashed("a", 100, memoryview(buffer), hashed.extend)
        assert buffer == hashed == BYTES[100:1000]

    def test_reads_into_any_contiguous_buffer(self, backend: Backend) -> None:
        put(backend, "a", BYTES)
        buffer = bytearray(96)
        numbers: Any = memoryview(buffer).cast("d", (3, 4))
        backend.read_into("a", 3, numbers)
        assert buffer == BYTES[3:99]

    def test_read_whole(self, backend: Backend) -> None:
        """All bytes, or an error where there are more than the caller takes; ``evict`` changes nothing that is read."""
        put(backend, "d/a", BYTES)
        backend.evict("d/a")
        backend.evict("d/a", 3, 5)
        backend.evict("absent")
        assert backend.read_whole("d/a", len(BYTES)) == BYTES
        with pytest.raises(CorruptError, match=f"has {len(BYTES):,} bytes; at most {len(BYTES) - 1:,} are read"):
            backend.read_whole("d/a", len(BYTES) - 1)
        for path in ("absent", "d"):
            with pytest.raises(NotFoundError):
                backend.read_whole(path, 10)

    def test_read_start(self, backend: Backend) -> None:
        put(backend, "d/a", BYTES)
        put(backend, "d/empty", b"")
        for length in (0, 1, len(BYTES), len(BYTES) + 1):
            assert backend.read_start("d/a", length) == (BYTES[:length], len(BYTES))
            assert backend.read_start("d/empty", length) == (b"", 0)
        with pytest.raises(UsageError):
            backend.read_start("d/a", -1)
        for path in ("absent", "d"):
            with pytest.raises(NotFoundError):
                backend.read_start(path, 10)

    def test_refuses_buffers_it_cannot_fill(self, backend: Backend) -> None:
        put(backend, "a", BYTES)
        with pytest.raises(UsageError):
            backend.read_into("a", 0, memoryview(b"read-only"))
        with pytest.raises(UsageError):
            backend.read_into("a", 0, memoryview(bytearray(8))[::2])

    @pytest.mark.parametrize("path", ["no", "d", "d/no", "d/a/no"])
    def test_absent_and_directories_are_not_found(self, backend: Backend, path: str) -> None:
        put(backend, "d/a", BYTES)
        for call in (
            lambda: backend.read(path),
            lambda: backend.read(path, 0, 0),
            lambda: backend.read_into(path, 0, memoryview(bytearray(1))),
            lambda: backend.read_into(path, 0, memoryview(bytearray())),
            lambda: backend.size(path),
        ):
            with pytest.raises(NotFoundError) as error:
                call()
            assert path in str(error.value)

    def test_refuses_negative_ranges(self, backend: Backend) -> None:
        put(backend, "a", BYTES)
        for call in (
            lambda: backend.read("a", -1),
            lambda: backend.read("a", 0, -1),
            lambda: backend.read_into("a", -1, memoryview(bytearray(1))),
        ):
            with pytest.raises(UsageError):
                call()

    def test_size(self, backend: Backend) -> None:
        put(backend, "a", BYTES)
        put(backend, "empty", b"")
        assert (backend.size("a"), backend.size("empty")) == (1024, 0)

    def test_modified(self, backend: Backend) -> None:
        put(backend, "d/a", BYTES)
        modified = backend.modified("d/a")
        if modified is None:
            pytest.skip("the storage keeps no times")
        assert abs(modified - time.time()) < 120
        for path in ("no", "d", "d/no"):
            with pytest.raises(NotFoundError):
                backend.modified(path)

    def test_now(self, backend: Backend) -> None:
        """It is the clock of ``modified``, and to ask changes nothing."""
        put(backend, "d/a", BYTES)
        before, now, written = everything(backend), backend.now(), backend.modified("d/a")
        assert everything(backend) == before
        if now is None:
            pytest.skip("the storage does not say what time it is")
        assert written is None or -2 < now - written < 120

    def test_nothing_is_a_link_unless_it_is_one(self, backend: Backend) -> None:
        put(backend, "d/a", BYTES)
        assert [backend.link(path) for path in ("", "d", "d/a", "no")] == [None] * 4

    def test_parallel_reads(self, backend: Backend) -> None:
        put(backend, "a", BYTES)
        parts = together(*[partial(backend.read, "a", i * 128, 128) for i in range(8)])
        assert b"".join(parts) == BYTES


class ListingRows:
    PATHS = ("a", "a.txt", "b.x", "b/a/x", "b0", "data/ab", "data/abc", "data/b", "data/sub/ab", "é/z")

    @pytest.fixture
    def listed(self, backend: Backend) -> Backend:
        for path in reversed(self.PATHS):
            put(backend, path, path.encode())
        return backend

    @pytest.mark.parametrize(
        "prefix", ["", "a", "a.", "b", "b/", "b/a/", "data", "data/", "data/a", "data/ab", "data/s", "data/sub/a", "é/", "no", "no/"]
    )
    def test_list(self, listed: Backend, prefix: str) -> None:
        expected = [ObjectMeta(p, len(p.encode())) for p in sorted(self.PATHS) if p.startswith(prefix)]
        assert list(listed.list_prefix(prefix)) == expected

    @pytest.mark.parametrize(
        ("prefix", "names"),
        [
            ("", ["a", "a.txt", "b.x", "b/", "b0", "data/", "é/"]),
            ("b", ["a/"]),
            ("b/a", ["x"]),
            ("data", ["ab", "abc", "b", "sub/"]),
            ("dat", []),
            ("data/a", []),
            ("data/ab", []),
            ("no/no", []),
        ],
    )
    def test_children(self, listed: Backend, prefix: str, names: list[str]) -> None:
        assert listed.list_dir(prefix) == names
        if prefix:
            assert listed.list_dir(prefix + "/") == names

    def test_version_tokens(self, backend: Backend) -> None:
        for path in ("a/mark", "b/mark", "c/data/mark", "mark", "d/mark.txt", "e/x/mark"):
            backend.put_if(path, b"old", expected=None)
        before = backend.version_tokens(list("abcde"), "mark", skip="/data/")
        backend.put_if("b/mark", b"new", expected=b"old")
        after = backend.version_tokens(list("abcde"), "mark", skip="/data/")
        if before is not None and after is not None:
            assert before.keys() | after.keys() <= {"a", "b"}
            assert after.get("a", "a") == before.get("a", after.get("a", "a"))
            assert "b" not in before or after.get("b") != before["b"]

    def test_empty_root(self, backend: Backend) -> None:
        assert (list(backend.list_prefix()), backend.list_dir(), backend.list_dir("a")) == ([], [], [])
        backend.prepare()
        assert (list(backend.list_prefix()), backend.list_dir(), backend.list_dir("a")) == ([], [], [])
