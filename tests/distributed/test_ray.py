"""``--executor ray`` on a real cluster of two workers, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from tests.distributed.test_dividing import TENSORS, damage, equal, name, state, tensors_of

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # warnings of Ray
MARK = "CKPT_TEST_DIED"


def die_once() -> None:
    """In each worker: the first process that has a durable file is killed."""
    from ckpt.converters.conversion import ConversionJournal

    done = ConversionJournal.done

    def mark(journal: ConversionJournal, number: int) -> None:
        done(journal, number)
        try:
            os.close(os.open(os.environ[MARK], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    ConversionJournal.done = mark  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that is there when a worker has been killed."""
    file = tmp_path_factory.mktemp("ray") / "died"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    environment = {"worker_process_setup_hook": die_once, "env_vars": {MARK: str(file), "PYTHONPATH": os.pathsep.join(os.sys.path)}}  # type: ignore[attr-defined]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield file
    ray.shutdown()


def test_a_killed_worker(died: Path, tmp_path: Path) -> None:
    a, made = str(tmp_path / "a"), str(tmp_path / "made")
    ckpt.save(a, state())
    command = ["convert", "--json", "--executor", "ray", "--to", "native", "--shard-size", "20KB", a, made]
    ended = CliRunner().invoke(cli, command)
    assert ended.exit_code == 0, ended.stderr
    assert died.exists() and ended.stderr.count("was lost with the process that did it") == 1
    report = json.loads(ended.stdout)
    assert (report["finished"], report["written_files"]) == (True, TENSORS)
    assert ckpt.verify(made).ok and equal(tensors_of(made), tensors_of(a))

    damage(tmp_path / "made", state()["model"][name(2)].numpy().tobytes())
    verified = CliRunner().invoke(cli, ["verify", "--json", "--executor", "ray", "--tasks", "3", made])
    assert verified.exit_code == 20
    assert [p["tensor"] for p in json.loads(verified.stdout)["problems"]] == [f"model.{name(2)}"]
    failed = CliRunner().invoke(cli, ["cp", "--executor", "ray", made, str(tmp_path / "copy")])
    assert failed.exit_code == 20 and "(part " in failed.stderr
    assert not (tmp_path / "copy" / "checkpoint.json").exists()
