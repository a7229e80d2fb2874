"""FaultyBackend: each fault does what it says, and a save written against the port survives every one of them."""

from __future__ import annotations

import errno
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckpt.errors import NoSpaceError, StorageError
from ckpt.io_backends import (
    Backend,
    Fault,
    FaultyBackend,
    FaultyProcess,
    InProcessBackend,
    PosixBackend,
    SimulatedCrash,
    join_url,
    open_backend,
    wrap_backends,
)
from ckpt.io_backends.conformance.reading import everything, put, together
from ckpt.io_backends.faulty import FaultyWriter

DATA = bytes(range(256)) * 8
OPERATIONS = ("prepare", "create data/a", "write data/a", "write data/a", "commit data/a", "put_if done", "abort data/a")


def save(backend: Backend) -> None:
    """Operations 0 to 6: the smallest save. ``done`` may exist only beside the whole ``data/a``."""
    backend.prepare()
    with backend.create("data/a", len(DATA)) as writer:
        writer.write(1024, [DATA[1024:]])
        writer.write(0, [DATA[:1000], DATA[1000:1024]])
        writer.commit()
        backend.put_if("done", b"yes", expected=None)


@pytest.fixture(params=["memory", "posix"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    InProcessBackend.reset()
    return InProcessBackend("inprocess://x") if request.param == "memory" else PosixBackend(str(tmp_path / "root"))


def test_counts_operations(inner: Backend) -> None:
    backend = FaultyBackend(inner)
    save(backend)
    assert backend.process.log == OPERATIONS
    assert backend.operations == len(OPERATIONS)
    backend.read("done")
    backend.read_into("done", 0, memoryview(bytearray(3)))
    backend.size("done")
    list(backend.list_prefix("da"))
    backend.list_dir()
    backend.delete("done")
    assert backend.process.log[7:] == ("read done", "read_into done", "size done", "list_prefix da", "list_dir", "delete done")
    assert everything(inner) == {"data/a": DATA}


@pytest.mark.parametrize(("kind", "error", "code"), [("error", StorageError, errno.EIO), ("no_space", NoSpaceError, errno.ENOSPC)])
@pytest.mark.parametrize("at", range(7))
def test_errors_before_the_effect(inner: Backend, kind: str, error: type[StorageError], code: int, at: int) -> None:
    backend = FaultyBackend(inner, Fault(at=at, kind=kind))  # type: ignore[arg-type]
    with pytest.raises(StorageError) as raised:
        save(backend)
    assert type(raised.value) is error
    assert raised.value.errno == code
    assert OPERATIONS[at] in str(raised.value)
    committed = {"data/a": DATA} if at > 4 else {}
    assert everything(inner) == committed | ({"done": b"yes"} if at > 5 else {})
    if at < 5:
        save(backend)  # the fault strikes once
        assert everything(inner) == {"data/a": DATA, "done": b"yes"}


def test_error_after_the_effect(inner: Backend) -> None:
    with pytest.raises(StorageError):
        save(FaultyBackend(inner, Fault(at=5, kind="error", after=True)))
    assert everything(inner) == {"data/a": DATA, "done": b"yes"}


def test_short_write_keeps_half(inner: Backend) -> None:
    backend = FaultyBackend(inner, Fault(at=0, kind="short_write"))
    backend.prepare()
    with backend.create("a", 8) as writer:
        with pytest.raises(StorageError) as error:
            writer.write(0, [b"abc", b"defgh"])
        assert error.value.errno == errno.EIO
        assert inner.read("a")[:4] == b"abcd"
        assert inner.read("a")[4:].strip(b"\0") == b""
        with pytest.raises(StorageError, match="8 bytes were planned, but 4"):
            writer.commit()
        writer.write(4, [b"EFGH"])
        writer.commit()
    assert everything(inner) == {"a": b"abcdEFGH"}


def test_slow(inner: Backend) -> None:
    start = time.monotonic()
    save(FaultyBackend(inner, Fault(at=3, kind="slow", seconds=0.1)))
    assert time.monotonic() - start >= 0.1
    assert everything(inner) == {"data/a": DATA, "done": b"yes"}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(7))
def test_crash_anywhere(inner: Backend, at: int, after: bool) -> None:
    backend = FaultyBackend(inner, Fault(at=at, kind="crash", after=after))
    with pytest.raises(SimulatedCrash, match=OPERATIONS[at]):
        save(backend)
    took_effect = at + after
    found = everything(inner)
    assert ("done" in found) == (took_effect > 5)
    assert ("data/a" in found) == (took_effect > 1)  # no clean-up: the abort on the way out crashed too
    if took_effect > 3:
        assert found["data/a"] == DATA
    assert backend.process.crashed
    assert backend.operations == at + 1


def test_after_a_crash_every_operation_crashes(inner: Backend) -> None:
    put(inner, "old", b"x")
    backend = FaultyBackend(inner, Fault(at=3, kind="crash"))
    writer = backend.create("a", 1)
    entries = backend.list_prefix()
    next(entries)
    writer.write(0, [b"x"])
    calls: list[Callable[[], object]] = [
        writer.commit,
        writer.abort,
        lambda: writer.write(0, [b"x"]),
        backend.prepare,
        lambda: backend.create("b", 1),
        lambda: backend.put_if("b", b"", expected=None),
        lambda: backend.delete("old"),
        lambda: backend.read("old"),
        lambda: backend.read_into("old", 0, memoryview(bytearray(1))),
        lambda: backend.size("old"),
        lambda: backend.list_prefix(),
        lambda: backend.list_dir(),
        lambda: next(entries),
    ]
    for call in calls:
        with pytest.raises(SimulatedCrash):
            call()
    assert set(everything(inner)) == {"a", "old"}
    assert not issubclass(SimulatedCrash, Exception)


@pytest.mark.parametrize("at", range(7))
def test_power_loss_keeps_what_was_committed(inner: Backend, at: int) -> None:
    for seed, after in itertools.product(range(4), (False, True)):
        for entry in list(inner.list_prefix()):
            inner.delete(entry.path)
        with pytest.raises(SimulatedCrash):
            save(FaultyBackend(inner, Fault(at=at, kind="crash", after=after, lose_unsynced=True, seed=seed)))
        found = everything(inner)
        assert ("done" in found) == (at + after > 5)
        if at + after > 4:
            assert found["data/a"] == DATA
        elif "data/a" in found:
            full = DATA if at + after > 3 else bytes(1024) + DATA[1024:]
            assert full.startswith(found["data/a"])
        elif at + after <= 1:
            assert found == {}


def test_power_loss_cuts_and_removes_by_the_seed(inner: Backend) -> None:
    def left(seed: int) -> int | None:
        with pytest.raises(SimulatedCrash):
            save(FaultyBackend(inner, Fault(at=4, kind="crash", lose_unsynced=True, seed=seed)))
        size = len(everything(inner)["data/a"]) if "data/a" in everything(inner) else None
        inner.delete("data/a")
        return size

    sizes = [left(seed) for seed in range(30)]
    assert sizes == [left(seed) for seed in range(30)]
    assert None in sizes
    assert len({size for size in sizes if size is not None and size < len(DATA)}) > 10


def test_what_was_committed_meanwhile_is_not_lost(inner: Backend) -> None:
    writer = FaultyWriter(inner, "a", len(DATA), FaultyProcess())
    writer.write(0, [DATA])
    writer.commit()
    for seed in range(5):
        writer.lose(random.Random(seed))
    assert everything(inner) == {"a": DATA}


def test_no_result_reaches_a_crashed_process(inner: Backend) -> None:
    backend = FaultyBackend(inner, Fault(at=1, kind="crash"))

    def crash_in_another_place() -> str:
        with pytest.raises(SimulatedCrash):
            backend.prepare()
        return "result"

    with pytest.raises(SimulatedCrash):
        backend.process.operate("outer", crash_in_another_place)


def test_backends_of_one_process_crash_together() -> None:
    InProcessBackend.reset()
    process = FaultyProcess(Fault(at=2, kind="crash"))
    with wrap_backends(process.wrap):
        run = open_backend("inprocess://run")
        step = open_backend(join_url("inprocess://run", "step-1"))
    run.list_dir()
    step.put_if("a", b"x", expected=None)
    with pytest.raises(SimulatedCrash):
        run.delete("step-1/a")
    with pytest.raises(SimulatedCrash):
        step.read("a")
    assert process.log == ("list_dir", "put_if a", "delete step-1/a")
    assert InProcessBackend("inprocess://run").read("step-1/a") == b"x"


def test_crash_reaches_other_threads(inner: Backend) -> None:
    backend = FaultyBackend(inner, Fault(at=50, kind="crash", lose_unsynced=True))
    committed: list[str] = []

    def work(name: str) -> str:
        try:
            for i in range(100):
                put(backend, f"{name}-{i}", DATA)
                committed.append(f"{name}-{i}")
        except SimulatedCrash:
            return "crashed"
        return "finished"

    assert together(*[partial(work, name) for name in "abc"]) == ["crashed"] * 3
    assert backend.operations == 51
    found = everything(inner)
    assert len(committed) > 8
    assert all(found.pop(name) == DATA for name in committed)
    assert all(content in (DATA[: len(content)], bytes(len(content))) for content in found.values())
