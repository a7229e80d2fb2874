"""Objects that a daemon fetches from that of another machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.memory.client import MemoryClient
from tests.memory.daemons import daemon_in

MIB = 1 << 20


def test_objects_arrive_with_their_digest(daemon: MemoryClient, tmp_path: Path) -> None:
    ckpt.save("mem://run/step-00000001", {"w": torch.arange(3 * MIB)})
    wanted = [known.path for known in daemon.list()]
    with daemon_in(tmp_path / "other") as other:
        other.pull(daemon.address(), wanted, secret=daemon.secret())
        assert {row["state"] for row in await_pulls(other)} == {"complete"}
        here, there = other.list(), {known.path: known for known in daemon.list()}
        assert [(k.path, k.size, k.digest) for k in here] == [(p, there[p].size, there[p].digest) for p in wanted]
        assert all(known.digest for known in here)
        assert torch.equal(ckpt.open("mem://run/step-00000001")["w"].read(), torch.arange(3 * MIB))


def test_what_is_wrong_is_not_kept(daemon: MemoryClient, tmp_path: Path) -> None:
    loan = daemon.lend(5 * MIB)
    loan.put("run/damaged", digest="0" * 32)
    with daemon_in(tmp_path / "other") as other:
        other.pull(daemon.address(), ["run/damaged", "run/absent"], secret=daemon.secret())
        damaged, absent = await_pulls(other)
        assert (damaged["state"], damaged["error"]["type"]) == ("failed", "CorruptError")
        assert (absent["state"], absent["error"]["type"]) == ("failed", "NotFoundError")
        assert list(other.list()) == [] and other.status()["lent"] == 0


def test_the_pace_is_kept(daemon: MemoryClient, tmp_path: Path) -> None:
    daemon.lend(9 * MIB).put("run/f")
    with daemon_in(tmp_path / "other") as other:
        began = time.monotonic()
        other.pull(daemon.address(), ["run/f"], secret=daemon.secret(), pace=18 * MIB)
        await_pulls(other)
        assert time.monotonic() - began > 0.4


def test_only_the_same_bytes_count_as_copied(daemon: MemoryClient, tmp_path: Path) -> None:
    """Another step has the same sizes."""
    daemon.put("run/same", b"equal")
    daemon.put("run/other", b"right")
    with daemon_in(tmp_path / "other") as other:
        other.put("run/same", b"equal")
        other.put("run/other", b"wrong")
        other.pull(daemon.address(), ["run/same", "run/other"], secret=daemon.secret())
        same, different = await_pulls(other)
        assert same["state"] == "complete"
        assert (different["state"], different["error"]["type"]) == ("failed", "ConflictError")
        assert "another object of that name" in str(different["error"])


def await_pulls(daemon: MemoryClient) -> list[dict[str, Any]]:
    end = time.monotonic() + 30
    while True:
        rows = list(daemon.pulls())
        if all(row["state"] in ("complete", "failed") for row in rows):
            return rows
        assert time.monotonic() < end, rows
        time.sleep(0.02)
