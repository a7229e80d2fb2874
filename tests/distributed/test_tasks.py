"""Commands whose parts are tasks: the result of one process, one error, and parts that are done again. The tasks run here, one after
another, through what a scheduler would carry; ``test_ray`` has the scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

import ckpt
from ckpt.cli import ray_tasks, task_process
from ckpt.cli.main import cli
from ckpt.converters.conversion import ConversionJournal
from ckpt.errors import StorageError
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything
from ckpt.net.channel import Row
from ckpt.net.divided_work import PartOrder
from tests.distributed.test_dividing import TENSORS, damage, equal, name, state, tensors_of

SMALL = ("--shard-size", "20KB")


class HereTasks(ray_tasks.RayTasks):
    """Runs the tasks in this process. ``loses`` says how often the process of a part is lost."""

    loses: ClassVar[dict[int, int]] = {}
    began: ClassVar[list[tuple[int, bool]]] = []

    def run(self, orders: Sequence[PartOrder], report: Callable[[int, int], None]) -> dict[int, Row]:
        rows = {}
        for order in orders:
            while order.number not in rows:
                self.began.append((order.number, order.repeats))
                call = {"version": ckpt.__version__, "arguments": list(self.arguments), "folder": str(Path.cwd()), "variables": {}}
                *_, last = task_process.signs_of_part(json.dumps({**call, "order": order.to_json()}))
                sign = json.loads(last)
                if self.loses.get(order.number, 0):
                    self.loses[order.number] -= 1
                    order = replace(order, repeats=True)
                elif "error" in sign:
                    raise ray_tasks._error_of(order.number, sign["host"], sign["error"])
                else:
                    rows[order.number] = sign["row"]
                    report(*sign["progress"])
        return rows


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> type[HereTasks]:
    @contextmanager
    def tasks(arguments: Sequence[str], *, count: int | None, cpus: int) -> Iterator[HereTasks]:
        yield HereTasks(count=count or 2, cpus=cpus, arguments=arguments)

    monkeypatch.setattr(ray_tasks, "ray_tasks", tasks)
    monkeypatch.setattr(HereTasks, "loses", {})
    monkeypatch.setattr(HereTasks, "began", [])
    return HereTasks


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--executor", "ray"])


def report_of(*arguments: str) -> dict[str, Any]:
    ended = run(*arguments, "--json")
    assert ended.exit_code == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@pytest.fixture
def saved(tmp_path: Path) -> str:
    ckpt.save(str(tmp_path / "a"), state())
    return str(tmp_path / "a")


def test_the_result_is_that_of_one_process(saved: str, tmp_path: Path, here: type[HereTasks]) -> None:
    hf, native, merged, copy, other = (str(tmp_path / folder) for folder in ("hf", "native", "merged", "copy", "other"))
    ckpt.save(other, state(1))
    made = report_of("convert", "--to", "hf", "--no-config", *SMALL, "--tasks", "3", saved, hf)
    assert here.began == [(0, False), (1, False), (2, False)]
    alone = ckpt.convert(saved, str(tmp_path / "alone" / "hf"), to="hf", shard_size=20_000)
    assert (made["finished"], made["written_files"], made["read_bytes"]) == (True, alone.written_files, alone.read_bytes)
    assert everything(open_backend(hf)) == everything(open_backend(alone.target))
    assert report_of("convert", "--to", "native", *SMALL, saved, native)["written_files"] == TENSORS
    assert equal(tensors_of(native), tensors_of(saved))
    report_of("merge", "--weights", "0.3,0.7", *SMALL, merged, saved, other)
    ckpt.merge(str(tmp_path / "alone" / "merged"), [saved, other], weights=[0.3, 0.7], shard_size=20_000)
    assert equal(tensors_of(merged), tensors_of(str(tmp_path / "alone" / "merged")))
    copied = report_of("cp", native, copy)
    assert copied["copied_files"] == copied["files"] and everything(open_backend(copy)) == everything(open_backend(native))
    verified, expected = report_of("verify", "--semantic", native), ckpt.verify(native)
    assert (verified["chunks"], verified["bytes"], verified["semantic"]["ok"]) == (expected.chunks, expected.bytes, True)


def test_parts_without_items_are_no_tasks(saved: str, tmp_path: Path, here: type[HereTasks]) -> None:
    made = report_of("convert", "--to", "native", *SMALL, "--tasks", "50", saved, str(tmp_path / "native"))
    assert made["finished"] and len(here.began) == TENSORS
    assert report_of("convert", "--to", "native", *SMALL, saved, str(tmp_path / "native"))["written_files"] == 0
    assert len(here.began) == TENSORS


def test_what_was_damaged(saved: str, tmp_path: Path) -> None:
    for i in (1, 4):
        damage(tmp_path / "a", state()["model"][name(i)].numpy().tobytes())
    ended = run("verify", "--json", saved)
    assert ended.exit_code == 20
    assert [p["tensor"] for p in json.loads(ended.stdout)["problems"]] == [f"model.{name(i)}" for i in (1, 4)]
    failed = run("convert", "--to", "native", *SMALL, saved, str(tmp_path / "made"))
    assert failed.exit_code == 20 and failed.stderr.count("error: ") == 1 and "(part " in failed.stderr
    assert not (tmp_path / "made" / "checkpoint.json").exists()


def test_a_part_that_is_done_again_keeps_its_files(
    saved: str, tmp_path: Path, here: type[HereTasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is lost in the middle: of its three files, the first one is durable."""
    done, marked = ConversionJournal.done, list[int]()

    def mark(journal: ConversionJournal, number: int) -> None:
        if marked and here.loses[0]:
            raise StorageError("lost")
        marked.append(number)
        done(journal, number)

    monkeypatch.setattr(ConversionJournal, "done", mark)
    here.loses[0] = 1
    made = report_of("convert", "--to", "native", *SMALL, saved, str(tmp_path / "native"))
    assert made["written_files"] == TENSORS and sorted(marked) == list(range(TENSORS))
    assert here.began == [(0, False), (0, True), (1, False)]
    assert ckpt.verify(str(tmp_path / "native")).ok and equal(tensors_of(str(tmp_path / "native")), tensors_of(saved))
    here.loses = {0: 1}
    report_of("cp", str(tmp_path / "native"), str(tmp_path / "copy"))
    assert everything(open_backend(str(tmp_path / "copy"))) == everything(open_backend(str(tmp_path / "native")))


def test_a_task_that_sees_another_checkpoint(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(HereTasks):
        def run(self, orders: Sequence[PartOrder], report: Callable[[int, int], None]) -> dict[int, Row]:
            ckpt.save(saved, state(1))
            return super().run(orders, report)

    monkeypatch.setattr("tests.distributed.test_tasks.HereTasks", Elsewhere)
    ended = run("verify", saved)
    assert ended.exit_code == 22 and "does not see the same checkpoint" in ended.stderr


def test_wrong_use(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CliRunner().invoke(cli, ["verify", "--tasks", "2", saved])
    assert alone.exit_code == 2 and "--executor ray" in alone.stderr
    extract = run("lora", "extract", "--rank", "2", saved, saved, str(tmp_path / "made"))
    assert extract.exit_code == 2 and "--executor" in extract.stderr
    one = run("convert", "--to", "torch", saved, str(tmp_path / "one.pt"))
    assert one.exit_code == 2 and "writes one file" in one.stderr
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, value)
    twice = run("verify", saved)
    assert twice.exit_code == 2 and "a launcher has started some" in twice.stderr
