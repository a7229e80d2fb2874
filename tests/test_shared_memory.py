"""Memory that ranks of one machine hand over: a slot comes back when all that copy from it have said so, and not before."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from ckpt.errors import DeadlineError
from ckpt.net import shared_memory
from ckpt.net.shared_memory import Announcement, AttachedPool, BrokenPoolError, SlotPool, machine

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def test_a_slot_comes_back_when_all_have_copied() -> None:
    ring = SlotPool(2, 4096, 3, shared=True, timeout=5)
    try:
        other = AttachedPool(ring.announcement())
        first = ring.take(lambda: None)
        ring.data(first)[:5] = list(b"hello")
        ring.lend(first, (7, 8, 9), [0, 2])
        ring.release(first)
        assert other.data(first)[:5].tobytes() == b"hello"
        second = ring.take(lambda: None)
        assert second != first
        steps = [lambda: other.done(first, 0), lambda: other.done(first, 2)]
        assert ring.take(lambda: steps.pop(0)()) == first
        assert not steps
        ring.hold(second)
        ring.release(second)
        threading.Timer(0.1, ring.release, (second,)).start()
        assert ring.take(lambda: time.sleep(0.01)) == second
    finally:
        ring.close()


def test_who_does_not_take_is_named() -> None:
    ring = SlotPool(1, 4096, 3, shared=False, timeout=0.1)
    ring.lend(ring.take(lambda: None), (4, 5, 6), [1])
    ring.release(0)
    with pytest.raises(DeadlineError, match="rank 5 took nothing"):
        ring.take(lambda: time.sleep(0.02))


def test_nobody_waits_for_a_broken_pool() -> None:
    ring = SlotPool(1, 4096, 1, shared=False, timeout=5)
    ring.take(lambda: None)
    with pytest.raises(BrokenPoolError):
        ring.take(ring.stop)


def test_a_machine_is_one() -> None:
    assert machine() == machine()


def test_processes_of_other_confinement_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets them open nothing of each other, though they are of one user."""
    stat, here = os.stat, machine()
    namespace = SimpleNamespace(st_ino=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path, **kw: namespace if path == "/proc/self/ns/user" else stat(path, **kw))
        assert machine() == machine() != here
    monkeypatch.setattr(shared_memory, "_label", lambda: "other (enforce)")
    assert machine() == machine() != here


def test_processes_that_cannot_be_inspected_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert machine() != machine()


def test_memory_of_another_ring_is_refused() -> None:
    """Of the same shape, at the place where the announced one should be; and what is no ring at all."""
    ours, other = (SlotPool(2, 4096, 3, shared=True, timeout=5) for _ in range(2))
    smaller = SlotPool(1, 4096, 3, shared=True, timeout=5)
    there, back = os.pipe()
    try:
        for file, why in ((other.file, "another process"), (smaller.file, "another size"), (there, "not shared memory of ckpt")):
            with pytest.raises(OSError, match=why):
                AttachedPool(ours.announcement()._replace(file=file))
        with pytest.raises(FileNotFoundError):
            AttachedPool(ours.announcement()._replace(file=9999))
        assert Announcement.unpack(ours.announcement().pack()) == ours.announcement()
    finally:
        for kept in (ours, other, smaller):
            kept.close()
        os.close(there)
        os.close(back)
