"""``ckpt watch`` beside saves that go on: it shows them, names who is waited for, and says how they end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.formats.native.runlog import read_log
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.alone, pytest.mark.skipif(sys.platform != "linux", reason="stops a rank")]

MIB = 1 << 18
"""Elements of float32."""


class SlowWrites(FaultyProcess):
    """A process whose storage takes half a second for each write of a data file."""

    def operate(self, what: str, effect: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        if half is not None:
            time.sleep(0.5)
        return super().operate(what, effect, half)


def save_slowly(folder: str) -> None:
    from ckpt.engine.save import job as progress

    progress._UNBEGUN = 1.0
    rank = dist.get_rank()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    with wrap_backends(SlowWrites().wrap):
        ckpt.save(f"{folder}/run/step-1", {"own": ckpt.PerRank(torch.full((16 * MIB,), float(rank)))}, job=ckpt.Job(threads=1))
    dist.barrier()
    end = time.monotonic() + 30
    while rank == 2 and not Path(folder, "seen").exists() and time.monotonic() < end:
        time.sleep(0.05)
    ckpt.save(f"{folder}/run/step-2", {"x": torch.zeros(8)})


def watch(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["watch", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]) if result.stdout else {}


def until(wanted: Callable[[dict[str, Any]], bool], url: str, seconds: float = 30.0) -> tuple[int, dict[str, Any]]:
    end = time.monotonic() + seconds
    while True:
        code, seen = watch("--once", url)
        if wanted(seen):
            return code, seen
        assert time.monotonic() < end, seen
        time.sleep(0.1)


def test_a_save_is_watched_and_a_rank_that_stops_is_named(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.runs.report.history.patience", lambda interval: 2.0)
    run = str(tmp_path / "run")
    os.mkdir(run)
    job = threading.Thread(target=ranks.run, args=(4, save_slowly, str(tmp_path)), daemon=True)
    job.start()

    def all_write(seen: dict[str, Any]) -> bool:
        """A rank has a host once it has said what it does."""
        now = seen.get("progress") or {"phases": [], "slowest": []}
        return any(phase["done"] for phase in now["phases"]) and all(one["host"] for one in now["slowest"])

    code, seen = until(all_write, run)
    assert code == 0 and seen["state"] == "saving" and seen["url"] == f"{run}/step-1"
    progress = seen["progress"]
    assert progress["ranks"] == progress["awaited"] == 4 and progress["phase"] == "write"
    (phase,) = progress["phases"]
    assert phase["phase"] == "write" and phase["ranks"] == 4 and 0 < phase["done"] < phase["total"] <= 4 * 16 * 4 * MIB
    assert {one["rank"] for one in progress["slowest"]} == {0, 1, 2, 3} and all(one["host"] for one in progress["slowest"])

    stopped = int((tmp_path / "pid-2").read_text())
    os.kill(stopped, signal.SIGSTOP)
    try:
        code, seen = until(lambda seen: seen.get("state") == "hangs", run)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert code == 31 and [one["rank"] for one in seen["silent"]] == [2] and seen["silent"][0]["seconds"] >= 2
    assert seen["silent"][0]["host"] == os.uname().nodename
    text = CliRunner().invoke(cli, ["watch", "--once", f"{run}/step-1"]).stdout
    assert "step-1" in text and "rank 2" in text and len(text.splitlines()) == 1

    code, seen = watch(run, "--interval", "0.1")  # until it ends
    assert code == 0 and seen["state"] == "committed" and seen["url"] == f"{run}/step-1"
    assert seen["tensor_bytes"] == 4 * 16 * 4 * MIB and seen["seconds"] > 1.5
    assert not list((tmp_path / "run").rglob("progress.json"))

    code, seen = until(lambda seen: bool(seen["url"].endswith("step-2") and seen["progress"]), run)  # rank 2 comes late
    (tmp_path / "seen").touch()
    assert seen["progress"]["phase"] == "begin" and [one["rank"] for one in seen["progress"]["slowest"]] == [2]
    job.join(30)
    assert not job.is_alive() and watch("--once", run)[1]["state"] == "committed"
    assert not list((tmp_path / "run").rglob("progress.json")) and len(list((tmp_path / "run" / "step-2").glob("index-*"))) == 1


def save_with_a_mesh(root: str) -> None:
    layout = ckpt.Layout({"dp": 2, "tp": 2}, rules=[("w", ckpt.Shard(0, "tp"))])
    with ckpt.Checkpointer(root, layout=layout) as c:
        c.save(1, {"w": torch.full((4,), float(dist.get_rank() % 2))})
        c.wait()
        assert c.restore({"w": torch.zeros(4)}) == 1


def test_ranks_say_where_they_are(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, save_with_a_mesh, str(tmp_path))
    found = json.loads(CliRunner().invoke(cli, ["stats", "--ranks", "--json", str(tmp_path / "step-00000001")]).stdout)["ranks"]
    assert {one["rank"]: one["coordinates"] for one in found} == {r: {"dp": r // 2, "tp": r % 2} for r in range(4)}
    assert {one["host"] for one in found} == {os.uname().nodename}
    (load,) = read_log(open_backend(str(tmp_path)))
    assert (load.kind, load.step, load.ranks, load.error) == ("load", 1, 4, None)
    assert set(load.tables) == {0, 1, 2, 3} and all("match" in table.sums for table in load.tables.values())


def save_with_a_wrong_setting(folder: str) -> None:
    os.environ["CKPT_PROGRESS"] = "soon"
    for save in (ckpt.save, ckpt.save_async):
        began = time.monotonic()
        with pytest.raises(ckpt.errors.UsageError, match="soon"):
            save(f"{folder}/a", {"x": torch.zeros(4)}, job=ckpt.Job(timeout=20))
        assert time.monotonic() - began < 15, "it waited for the deadline"
    del os.environ["CKPT_PROGRESS"]
    ckpt.save(f"{folder}/b", {"x": torch.zeros(4)}, job=ckpt.Job(timeout=20))


def test_a_wrong_setting_fails_on_all_ranks_at_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_with_a_wrong_setting, str(tmp_path))
