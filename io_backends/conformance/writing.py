"""The rows of the behaviour tables that say how objects are written, published and deleted. See ``conformance``."""

from __future__ import annotations

import mmap
import random
import threading
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import pytest

from ckpt.errors import ConflictError, StorageError, UsageError
from ckpt.io_backends.protocol import Backend, ObjectMeta, Writer

from .reading import BYTES, everything, put, together


def _write_in_parts(writer: Writer, data: memoryview, start: int, stop: int) -> None:
    """Write one range of the object: most of it as one part, between small ones."""
    with data[start : start + 10] as head, data[start + 10 : stop - 3] as body, data[stop - 3 : stop] as tail:
        writer.write(start, [head, body, tail])


class WritingRows:
    exclusive_create: ClassVar[bool] = True
    """Whether of two callers of ``create`` for one path at most one can commit."""

    def test_writes_in_any_order(self, backend: Backend) -> None:
        with backend.create("deep/er/a", 1024) as writer:
            writer.write(512, [BYTES[512:700], BYTES[700:]])
            writer.write(0, [])
            writer.write(1024, [b""])
            writer.write(0, [memoryview(BYTES)[:512]])
            writer.commit()
        assert everything(backend) == {"deep/er/a": BYTES}

    def test_many_parts_in_one_write(self, backend: Backend) -> None:
        random_bytes = random.Random(0)
        parts = [random_bytes.randbytes(random_bytes.choice([0, 1, 3, 50, 4097])) for _ in range(3000)]
        joined = b"".join(parts)
        with backend.create("a", len(joined) + 5) as writer:
            writer.write(5, parts)
            writer.write(0, [b"first"])
            writer.commit()
        assert backend.read("a") == b"first" + joined

    def test_writes_any_contiguous_buffer(self, backend: Backend) -> None:
        numbers: Any = memoryview(BYTES[:96]).cast("d", (3, 4))
        with backend.create("a", 96) as writer:
            writer.write(0, [numbers])
            writer.commit()
        assert backend.read("a") == BYTES[:96]

    def test_hashes_what_it_writes(self, backend: Backend) -> None:
        hashed = bytearray()
        with backend.create("a", 1024) as writer:
            writer.write_hashed(0, memoryview(BYTES)[:700], hashed.extend)
            writer.write_hashed(700, memoryview(BYTES)[700:], hashed.extend)
            writer.commit()
        assert hashed == BYTES == backend.read("a")

    def test_parallel_writes(self, backend: Backend) -> None:
        data = random.Random(1).randbytes(1 << 20)
        cuts = [0, 1, 4096, 70_000, 70_001, 300_000, 512 << 10, 1 << 20]
        with backend.create("a", len(data)) as writer:
            halves = ([data[lo : (lo + hi) // 2], data[(lo + hi) // 2 : hi]] for lo, hi in pairwise(cuts))
            results = together(*[partial(writer.write, lo, parts) for lo, parts in zip(cuts, halves, strict=False)])
            writer.commit()
        assert results == [None] * 7
        assert backend.read("a") == data

    @pytest.mark.parametrize("skew", [0, 512, 64, 1])
    @pytest.mark.parametrize("edge", [0, 100])
    def test_large_writes_from_pages_of_memory(self, backend: Backend, skew: int, edge: int) -> None:
        """Parts of one MiB and more: those are where backends take short cuts that depend on addresses and offsets."""
        size = (6 << 20) + 77
        data = random.Random(skew + edge).randbytes(size)
        with mmap.mmap(-1, size + 4096) as memory:  # begins at a page
            memory[skew : skew + size] = data
            with memoryview(memory) as memory_view, memory_view[skew : skew + size] as view, backend.create("a", size) as writer:
                cuts = [0, *(edge + (mib << 20) for mib in (1, 2, 4, 5)), size]
                results = together(*[partial(_write_in_parts, writer, view, lo, hi) for lo, hi in pairwise(cuts)])
                writer.commit()
        assert results == [None] * 5
        assert backend.read("a") == data

    def test_copies_within_the_storage_or_not_at_all(self, backend: Backend) -> None:
        """Whatever the storage copies by itself is right, and what it does not copy is not there."""
        data = random.Random(0).randbytes((6 << 20) + 5000)
        with backend.create("a", len(data)) as writer:
            writer.write(0, [data])
            writer.commit()
        source = backend.copy_source("a")
        with backend.create("b", len(data)) as writer:
            if source is None or not writer.copy_range(0, source, 0, len(data)):
                writer.write(0, [data])
            writer.commit()
        assert backend.read("b") == data
        if source is None:
            return
        with backend.create("c", len(data) + 10) as writer:
            with pytest.raises(UsageError):
                writer.copy_range(11, source, 0, len(data))
            assert not writer.copy_range(10, source, 0, len(data)), "10 is no multiple of the size of a block"
            with pytest.raises(StorageError):
                writer.commit()
        assert [e.path for e in backend.list_prefix()] == ["a", "b"]
        with pytest.raises(UsageError):
            writer.copy_range(0, source, 0, len(data))

    def test_empty_object(self, backend: Backend) -> None:
        with backend.create("a", 0) as writer:
            writer.commit()
        assert list(backend.list_prefix()) == [ObjectMeta("a", 0)]
        assert backend.read("a") == b""

    def test_rewriting_counts_once(self, backend: Backend) -> None:
        with backend.create("a", 8) as writer:
            writer.write(0, [b"aaaa"])
            writer.write(2, [b"bbbb"])
            with pytest.raises(StorageError) as error:
                writer.commit()
            assert "8" in str(error.value)
            assert "6" in str(error.value)
            writer.write(6, [b"cc"])
            writer.commit()
        assert backend.read("a") == b"aabbbbcc"

    @pytest.mark.parametrize(("offset", "parts"), [(-1, [b"ab"]), (7, [b"ab"]), (0, [b"abcd", b"efghi"]), (9, [])])
    def test_refuses_ranges_outside(self, backend: Backend, offset: int, parts: list[bytes]) -> None:
        with backend.create("a", 8) as writer:
            writer.write(0, [b"01234567"])
            with pytest.raises(UsageError):
                writer.write(offset, parts)
            writer.commit()
        assert backend.read("a") == b"01234567"

    def test_refuses_parts_that_are_not_contiguous(self, backend: Backend) -> None:
        with backend.create("a", 8) as writer:
            writer.write(0, [b"01234567"])
            with pytest.raises(UsageError):
                writer.write(0, [b"abcd", memoryview(b"efghijkl")[::2]])
            writer.commit()
        assert backend.read("a") == b"01234567"

    def test_refuses_a_taken_path(self, backend: Backend) -> None:
        put(backend, "d/a", b"old")
        with pytest.raises(ConflictError):
            put(backend, "d/a", b"new")
        assert everything(backend) == {"d/a": b"old"}

    def test_refuses_a_negative_size(self, backend: Backend) -> None:
        with pytest.raises(UsageError):
            backend.create("d/a", -1)
        assert backend.list_dir() == []

    def test_two_creators(self, backend: Backend) -> None:
        if not self.exclusive_create:
            pytest.skip("the backend says that it cannot promise this")
        values = [bytes([i]) * 64 for i in range(4)]
        results = together(*[partial(put, backend, "a", v) for v in values])
        winners = [v for v, result in zip(values, results, strict=True) if result is None]
        assert [type(r) for r in results if r is not None] == [ConflictError] * 3
        assert everything(backend) == {"a": winners[0]}

    def test_nothing_is_left_without_commit(self, backend: Backend) -> None:
        put(backend, "kept/a")
        with backend.create("kept/b", 4) as writer:
            writer.write(0, [b"1234"])
        with pytest.raises(UsageError), backend.create("new/dir/c", 4) as writer:
            writer.write(3, [b"12"])
        writer = backend.create("new/d", 4)
        writer.abort()
        writer.abort()
        assert everything(backend) == {"kept/a": b"x"}
        assert backend.list_dir() == ["kept/"]
        put(backend, "new/d", b"again")
        assert backend.read("new/d") == b"again"

    def test_committed_stays(self, backend: Backend) -> None:
        with backend.create("a", 1) as writer:
            writer.write(0, [b"x"])
            writer.commit()
            writer.abort()
        for call in (writer.commit, lambda: writer.write(0, [b"y"])):
            with pytest.raises(UsageError):
                call()
        assert everything(backend) == {"a": b"x"}

    def test_aborted_stays(self, backend: Backend) -> None:
        writer = backend.create("a", 1)
        writer.abort()
        for call in (writer.commit, lambda: writer.write(0, [b"y"])):
            with pytest.raises(UsageError):
                call()
        assert everything(backend) == {}

    def test_removed_while_written(self, backend: Backend) -> None:
        put(backend, "d/b")
        writer = backend.create("d/a", 1)
        writer.write(0, [b"x"])
        if "d/a" not in everything(backend):
            pytest.skip("the backend shows nothing before commit")
        backend.delete("d/a")
        with pytest.raises(StorageError):
            writer.commit()
        writer.abort()
        assert everything(backend) == {"d/b": b"x"}

    def test_replaced_while_written(self, backend: Backend) -> None:
        writer = backend.create("a", 1)
        if "a" not in everything(backend):
            pytest.skip("the backend shows nothing before commit")
        backend.delete("a")
        put(backend, "a", b"of another")
        writer.abort()
        assert everything(backend) == {"a": b"of another"}


class PublishingRows:
    def test_publishes_new(self, backend: Backend) -> None:
        backend.put_if("new/dir/a", BYTES, expected=None)
        backend.put_if("empty", b"", expected=None)
        assert everything(backend) == {"empty": b"", "new/dir/a": BYTES}

    @pytest.mark.parametrize("old", [b"", b"old", BYTES])
    def test_replaces(self, backend: Backend, old: bytes) -> None:
        backend.put_if("d/a", old, expected=None)
        backend.put_if("d/a", b"new", expected=old)
        assert everything(backend) == {"d/a": b"new"}

    @pytest.mark.parametrize("expected", [None, b"", b"ol", b"older", b"OLD"])
    def test_conflict_changes_nothing(self, backend: Backend, expected: bytes | None) -> None:
        backend.put_if("d/a", b"old", expected=None)
        with pytest.raises(ConflictError) as error:
            backend.put_if("d/a", b"new", expected=expected)
        assert "d/a" in str(error.value)
        assert everything(backend) == {"d/a": b"old"}

    def test_same_content_is_a_conflict_too(self, backend: Backend) -> None:
        backend.put_if("a", b"same", expected=None)
        with pytest.raises(ConflictError):
            backend.put_if("a", b"same", expected=None)

    @pytest.mark.parametrize("expected", [b"", b"old"])
    def test_replacing_what_is_absent(self, backend: Backend, expected: bytes) -> None:
        put(backend, "kept/a")
        for path in ("new/dir/a", "kept/b"):
            with pytest.raises(ConflictError):
                backend.put_if(path, b"new", expected=expected)
        assert everything(backend) == {"kept/a": b"x"}
        assert backend.list_dir() == ["kept/"]

    @pytest.mark.parametrize("expected", [None, b"old"])
    def test_one_of_many_publishers_wins(self, backend: Backend, expected: bytes | None) -> None:
        if expected is not None:
            backend.put_if("d/a", expected, expected=None)
        values = [bytes([i]) * 999 for i in range(6)]
        results = together(*[partial(backend.put_if, "d/a", v, expected=expected) for v in values])
        winners = [v for v, result in zip(values, results, strict=True) if result is None]
        assert len(winners) == 1
        assert [type(r) for r in results if r is not None] == [ConflictError] * 5
        assert everything(backend) == {"d/a": winners[0]}

    def test_readers_see_whole_contents(self, backend: Backend) -> None:
        values = [bytes([i]) * (3000 + 17 * i) for i in range(20)]
        backend.put_if("a", values[0], expected=None)
        done = threading.Event()

        def write() -> None:
            try:
                for old, new in pairwise(values):
                    backend.put_if("a", new, expected=old)
            finally:
                done.set()

        def read() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(backend.read("a"))
            return seen

        written, seen = together(write, read)
        assert written is None
        assert seen <= set(values)
        assert backend.read("a") == values[-1]


class DeletingRows:
    def test_deletes_and_prunes(self, backend: Backend) -> None:
        for path in ("a/b/c/d", "a/b/e", "f"):
            put(backend, path)
        backend.delete("a/b/c/d")
        assert backend.list_dir("a/b") == ["e"]
        backend.delete("a/b/e")
        assert backend.list_dir() == ["f"]

    @pytest.mark.parametrize("path", ["no", "no/no", "d", "d/no", "d/a/no"])
    def test_absent_and_directories_are_left_alone(self, backend: Backend, path: str) -> None:
        put(backend, "d/a")
        backend.delete(path)
        assert everything(backend) == {"d/a": b"x"}

    def test_the_root_stays(self, backend: Backend) -> None:
        backend.prepare()
        put(backend, "a")
        backend.delete("a")
        assert backend.list_dir() == []
        put(backend, "b")
        assert backend.list_dir() == ["b"]

    def test_deletes_many(self, backend: Backend) -> None:
        names = [f"d/{n % 3}/{n}" for n in range(40)]
        for path in (*names, "d/stays", "e"):
            put(backend, path)
        backend.delete_many([*names, *names[:5], "no", "no/no", "d"])
        assert everything(backend) == {"d/stays": b"x", "e": b"x"}
        assert backend.list_dir("d") == ["stays"]
        backend.delete_many([])
        backend.delete_many(["e"])
        backend.delete_many({"d/stays", "d/0/0"})
        assert backend.list_dir() == []

    def test_writing_beside_pruning(self, backend: Backend) -> None:
        def come_and_go(name: str) -> int:
            for _ in range(30):
                put(backend, f"d/e/{name}", b"x")
                backend.delete(f"d/e/{name}")
                backend.put_if(f"d/e/{name}", b"y", expected=None)
                backend.delete(f"d/e/{name}")
            return 30

        assert together(*[partial(come_and_go, n) for n in "abc"]) == [30, 30, 30]
        assert backend.list_dir() == []


class PreparingRows:
    def test_says_whether_it_shares_files(self, backend: Backend) -> None:
        shared = backend.create_shared("d/a", 3)
        assert backend.shares_files == (shared is not None)
        if shared is not None:
            shared.abort()
            shared.close()
        assert everything(backend) == {}

    def test_prepare_adds_nothing(self, backend: Backend) -> None:
        backend.prepare()
        put(backend, "d/a")
        backend.prepare()
        assert everything(backend) == {"d/a": b"x"}
        assert backend.list_dir() == ["d/"]
