"""``ckpt watch`` of a save to an object store: what the leader notes there is seen, and gone when the save is over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.io_backends import FaultyProcess, open_backend, wrap_backends


class SlowWrites(FaultyProcess):
    """A process whose storage takes a second and a half for each write of a data file, until the save has been watched."""

    watched = threading.Event()

    def operate(self, what: str, effect: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        if half is not None:
            self.watched.wait(1.5)
        return super().operate(what, effect, half)


def watch(url: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["watch", "--once", "--json", url])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]) if result.stdout else {}


def test_a_save_is_watched_through_the_store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PROGRESS", "0.5")
    state = {"w": torch.arange(4 << 20, dtype=torch.int32)}

    def save() -> None:
        with wrap_backends(SlowWrites().wrap):
            ckpt.save(f"{s3_url}/step-1", state, job=ckpt.Job(threads=1))

    job = threading.Thread(target=save)
    job.start()
    end = time.monotonic() + 90
    code, seen = 1, dict[str, Any]()
    while not (seen.get("progress") and seen["state"] == "saving") and time.monotonic() < end:
        code, seen = watch(s3_url)  # which says "hangs" while a machine with too much to do leaves the leader no time for a note
    SlowWrites.watched.set()
    assert (code, seen["state"], seen["url"], seen["progress"]["ranks"]) == (0, "saving", f"{s3_url}/step-1", 1)
    job.join(100)
    assert not job.is_alive()
    assert not [e.path for e in open_backend(f"{s3_url}/step-1").list_prefix() if e.path.endswith("progress.json")]
    code, seen = watch(s3_url)
    assert (code, seen["state"]) == (0, "committed")
