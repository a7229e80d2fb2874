"""``ckpt memory``, against a real daemon; and the commands that read and copy, on ``memory://``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.nodes import memory_client
from ckpt.policies import EverySteps
from tests.cli.running import run as command
from tests.memory.daemons import daemon_in


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of two checkpoints in memory; ``CKPT_MEMORY_DIR`` of its daemon."""
    with daemon_in(tmp_path_factory.mktemp("memory")) as daemon:
        for step in (1, 2):
            ckpt.save(f"memory://runs/a/step-{step:08d}", {"w": torch.arange(1000) * step})
        yield str(daemon.folder)


@pytest.fixture(autouse=True)
def _its_daemon(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", run)


def document(*args: object) -> Any:
    result = command(*args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands_work_on_memory(tmp_path: Path) -> None:
    assert "step-00000002" in command("ls", "memory://runs/a").stdout
    assert command("verify", "memory://runs/a/step-00000001").exit_code == 0
    assert command("diff", "memory://runs/a/step-00000001", "memory://runs/a/step-00000002").exit_code == 3
    assert command("cp", "memory://runs/a/step-00000002", tmp_path / "out").exit_code == 0
    assert command("diff", tmp_path / "out", "memory://runs/a/step-00000002").exit_code == 0
    assert command("cp", tmp_path / "out", "memory://copies/2").exit_code == 0
    assert torch.equal(ckpt.open("memory://copies/2")["w"].read(), torch.arange(1000) * 2)
    assert document("memory", "--json", "drop", "memory://copies")["bytes"] > 8000
    assert command("memory", "drop", "memory://copies").stdout == "nothing lies below memory://copies: dropped 0 B\n"


def test_status(run: str) -> None:
    status = document("memory", "status", "--json", "--listen")
    assert (status["folder"], list(status["by_checkpoint"])) == (run, ["runs/a/step-00000001", "runs/a/step-00000002"])
    text = command("memory", "status").stdout
    assert "memory://runs/a/step-00000002" in text and f"{status['addresses'][0][0]}:{status['addresses'][0][1]}" in text


def test_a_daemon_that_does_not_answer_is_given_up_in_time(run: str) -> None:
    pid = int(document("memory", "--json", "status")["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        result = command("memory", "status", "--timeout", "1s")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert result.exit_code == 30 and "error: the memory daemon has not answered for 1 s" in result.stderr
    assert command("memory", "status").exit_code == 0, "the next command waits as long as ever"
    assert command("memory", "status", "--timeout", "0").exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ["drop"],
        ["drop", "memory://"],
        ["drop", "memory://a", "--all"],
        ["drop", "memory://other:4000/runs/a"],
        ["status", "memory://a"],
        ["stop"],
        ["sleep"],
        *(["status", "--budget", "1GiB"], ["stop", "--all", "--listen"], ["status", "--all"]),
    ],
)
def test_nothing_is_lost_by_mistake(args: list[str]) -> None:
    assert command("memory", *args).exit_code == 2
    assert len(document("memory", "status", "--json")["by_checkpoint"]) == 2


def test_stop_names_the_runs_that_would_be_lost() -> None:
    ckpt.save("memory://runs/of-another-job/step-1", {"w": torch.ones(3)})
    refused = command("memory", "stop")
    assert refused.exit_code == 2
    assert re.search(r"memory://runs/of-another-job \(.* KiB, last saved .* s ago\), memory://runs/a \(", refused.output)
    assert "ckpt memory drop memory://runs/of-another-job" in refused.output and "--all" in refused.output
    assert command("memory", "drop", "memory://runs/of-another-job").exit_code == 0


def test_the_log_of_a_run_is_no_checkpoint() -> None:
    with ckpt.Checkpointer("memory://runs/logged", save=EverySteps(1)) as c:
        c.step(1, {"w": torch.ones(3)})
    with ckpt.Checkpointer("memory://runs/logged", save=EverySteps(1)) as c:
        c.restore({"w": torch.ones(3)})
    assert "runs/logged/ckpt-log.json" in [each.path for each in memory_client.connect().list("runs/logged")]
    assert [path for path in document("memory", "status", "--json")["by_checkpoint"] if "logged" in path] == ["runs/logged/step-00000001"]
    assert command("memory", "drop", "memory://runs/logged").exit_code == 0


def test_what_others_refer_to_is_not_dropped() -> None:
    # Names that no other test saves: a process does not ask again about a tensor that has changed from save to save.
    state = {"kept in memory": torch.arange(300_000.0), "moved in memory": torch.zeros(300_000)}
    ckpt.save("memory://runs/b/step-1", state, reuse=True)
    state["moved in memory"] = torch.ones(300_000)
    ckpt.save("memory://runs/b/step-2", state, reuse="memory://runs/b/step-1")
    refused = command("memory", "drop", "memory://runs/b/step-1")
    assert refused.exit_code == 33 and "memory://runs/b/step-2" in refused.output
    assert torch.equal(ckpt.open("memory://runs/b/step-2")["kept in memory"].read(), torch.arange(300_000.0))
    assert [command("memory", "drop", f"memory://runs/b/step-{n}").exit_code for n in (2, 1)] == [0, 0]


def test_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "own"))
    assert [command("memory", *args).exit_code for args in (["status"], ["drop", "--all"], ["stop"])] == [10] * 3
    with subprocess.Popen([sys.executable, "-m", "ckpt", "memory", "serve", "--budget", "5MiB"], stderr=subprocess.DEVNULL) as daemon:
        end = time.monotonic() + 60
        while command("memory", "status").exit_code:
            assert time.monotonic() < end and daemon.poll() is None
            time.sleep(0.05)
        assert document("memory", "status", "--json")["budget"] == 5 << 20
        assert command("memory", "serve").exit_code == 32  # there is one
        ckpt.save("memory://a", {"w": torch.ones(3)})
        assert command("memory", "stop").exit_code == 2
        assert document("memory", "stop", "--all", "--json") == {"pid": daemon.pid}
        assert daemon.wait(60) == 0


def test_ctrl_c_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "own"))
    with subprocess.Popen([sys.executable, "-m", "ckpt.nodes.memory_daemon", str(tmp_path / "own")], stderr=subprocess.DEVNULL) as daemon:
        while command("memory", "status").exit_code:  # until it has its handlers
            assert daemon.poll() is None
            time.sleep(0.05)
        os.kill(daemon.pid, signal.SIGINT)
        assert daemon.wait(20) == 0
    assert not (tmp_path / "own" / "socket").exists()


def test_a_daemon_of_another_release_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_in(tmp_path) as daemon:
        pid = daemon.status()["pid"]
        monkeypatch.setattr("ckpt.nodes.memory_client._clients", {})
        monkeypatch.setattr("ckpt.nodes.memory_connection.PROTOCOL", 99)
        assert [command("memory", *args).exit_code for args in (["status"], ["stop"])] == [12, 12]
        assert document("memory", "stop", "--all", "--json") == {"pid": None}
        assert not (tmp_path / "socket").exists(), pid
