"""Copies within one object store: the store copies the bytes, and few of them come here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything
from tests.cli.checkpoints import sample, write_checkpoint
from tests.s3.meddling import Seen, answer, watch
from tests.s3.stores import ObjectStore

LARGE = 20 << 20


@dataclass(frozen=True)
class Traffic:
    requests: Counter[str]
    sent: int
    """Bytes of bodies."""
    asked: int
    """Bytes of data files that were asked for."""


def traffic(seen: list[Seen]) -> Traffic:
    sent = asked = 0
    seen = [one for one in seen if "/.prepare-" not in one.path]  # a trial of what the store can do
    for one in seen:
        sent += int(one.request.headers.get("Content-Length", 0) or 0)
        first, _, last = one.request.headers.get("Range", b"").decode().removeprefix("bytes=").partition("-")
        if one.operation == "GetObject" and "/data/" in one.path:
            asked += int(last) - int(first) + 1
    return Traffic(Counter(one.operation for one in seen), sent, asked)


def test_the_store_copies_large_files(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"large{i}": rng.integers(0, 1 << 60, (LARGE // 8,), dtype=np.int64) for i in range(5)}  # more than one request takes
    write_checkpoint(f"{s3_url}/a", {**sample(), **tensors}, ranks=1)
    total = sum(e.size for e in open_backend(f"{s3_url}/a").list_prefix("data/"))
    seen = watch(monkeypatch)
    report = copy_checkpoint(f"{s3_url}/a", f"{s3_url}/b")
    moved = traffic(seen)
    assert report.committed and report.uncompared_bytes == total > 5 * LARGE
    assert moved.requests["UploadPartCopy"] == -(-total // (16 << 20))
    assert moved.requests["UploadPart"] == 0
    assert moved.asked < 100_000 and moved.sent < 100_000  # the header; index files, record
    assert everything(open_backend(f"{s3_url}/b")) == everything(open_backend(f"{s3_url}/a"))
    assert not verify(f"{s3_url}/b").problems
    assert list(open_backend(s3_url).pending_uploads()) == []

    seen.clear()
    shown = CliRunner().invoke(cli, ["cp", "--compare", f"{s3_url}/a", f"{s3_url}/c"])
    assert shown.exit_code == 0 and "by itself" not in shown.stdout
    assert traffic(seen).asked >= total > 100 * traffic(seen).sent  # read and compared, and not sent back
    shown = CliRunner().invoke(cli, ["cp", f"{s3_url}/a", f"{s3_url}/d"])
    assert "by itself: `ckpt verify` compares them" in shown.stdout
    assert everything(open_backend(f"{s3_url}/c")) == everything(open_backend(f"{s3_url}/d"))


def test_one_request_copies_a_file_of_middle_size(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(f"{s3_url}/a", {"large": np.arange(LARGE // 8)}, ranks=1)
    seen = watch(monkeypatch)
    assert copy_checkpoint(f"{s3_url}/a", f"{s3_url}/b").uncompared_bytes > LARGE
    assert traffic(seen).requests["UploadPartCopy"] == 1 and traffic(seen).sent < 100_000
    assert not verify(f"{s3_url}/b").problems


def test_what_is_referred_to_is_copied_by_the_store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {f"frozen{i}": torch.randn(LARGE // 4) for i in range(6)}
    state["frozen3"] += 1
    ckpt.save(f"{s3_url}/run/step-1", state, reuse=True)
    state["frozen3"] += 1
    ckpt.save(f"{s3_url}/run/step-2", state, reuse=f"{s3_url}/run/step-1")
    seen = watch(monkeypatch)
    report = copy_checkpoint(f"{s3_url}/run/step-2", f"{s3_url}/copy")
    moved = traffic(seen)
    # Two runs of chunks, around the one that changed; at their ends are parts that the store cannot copy whole.
    assert report.uncompared_bytes > 4 * LARGE
    assert moved.sent < 3 * (16 << 20) + LARGE
    for name, tensor in state.items():
        assert torch.equal(torch.as_tensor(ckpt.open(f"{s3_url}/copy")[name][...]), tensor)
    assert not verify(f"{s3_url}/copy").problems


@pytest.mark.parametrize("status", [403, 501])
def test_a_store_that_refuses_is_read(s3_url: str, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    write_checkpoint(f"{s3_url}/a", {"x": np.arange(LARGE // 8), "y": np.arange(LARGE // 8)}, ranks=2)

    def refuse(one: Seen) -> Any:
        if one.operation == "UploadPartCopy":
            return answer(one.request, status, "Refused")
        return None

    seen = watch(monkeypatch, refuse)
    report = copy_checkpoint(f"{s3_url}/a", f"{s3_url}/b")
    assert report.committed and report.uncompared_bytes == 0
    assert traffic(seen).requests["UploadPartCopy"] == 1  # it is not asked twice
    assert everything(open_backend(f"{s3_url}/b")) == everything(open_backend(f"{s3_url}/a"))


def test_a_damaged_header_is_seen(object_store: ObjectStore, s3_url: str, tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "a"), {"x": np.arange(LARGE // 8)}, ranks=1)
    copy_checkpoint(str(tmp_path / "a"), f"{s3_url}/a")
    (entry,) = open_backend(f"{s3_url}/a").list_prefix("data/")
    data = bytearray((tmp_path / "a" / entry.path).read_bytes())
    data[200] ^= 1
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    object_store.client.put_object(Bucket=bucket, Key=f"{prefix}/a/{entry.path}", Body=bytes(data))
    with pytest.raises(CorruptError, match="header"):
        copy_checkpoint(f"{s3_url}/a", f"{s3_url}/b")
    assert not any(step.committed for step in ckpt.list_steps(f"{s3_url}/b"))
