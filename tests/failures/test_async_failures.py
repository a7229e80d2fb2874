"""What goes wrong while a save is in the background: storage that fails, ranks that die, and programs that end."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.save.capture import Capture
from ckpt.errors import CkptError, NoSpaceError, StorageError
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from tests.distributed.ranks import ROOT, Lost, Ranks, at_once

BIG = 300_000


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((BIG,), value), "small": torch.full((3,), value)}


def stored(url: str) -> list[float]:
    view = ckpt.open(url)
    return sorted({*view["w"].read().unique().tolist(), *view["small"].read().tolist()})


def files(url: str) -> dict[str, int]:
    return {entry.path: entry.size for entry in open_backend(url).list_prefix()}


def save(url: str, value: float, fault: Fault | None = None) -> tuple[FaultyProcess, BaseException | None]:
    process = FaultyProcess(fault)
    with wrap_backends(process.wrap):
        handle = ckpt.save_async(url, state(value))
        assert handle.wait(30), "the save hangs"
    return process, handle.durable.exception()


AT_ANY_OPERATION = [
    ("posix", "no_space", NoSpaceError),
    ("memory", "error", StorageError),
    pytest.param("posix", "error", StorageError, marks=pytest.mark.slow),
    pytest.param("memory", "no_space", NoSpaceError, marks=pytest.mark.slow),
]
"""All of a synchronous save are in ``test_every_operation``."""


@pytest.mark.parametrize(("root", "kind", "error"), AT_ANY_OPERATION, indirect=["root"])
def test_storage_that_fails_at_any_operation_leaves_what_was_there(root: str, kind: str, error: type[CkptError]) -> None:
    save(f"{root}/counted", 1.0)
    log = save(f"{root}/counted", 2.0)[0].log
    publish = log.index("put_if checkpoint.json")
    for n, what in enumerate(log):
        url, where = f"{root}/{n}", f"{kind} at operation {n}, {what}"
        ckpt.save(url, state(1.0))
        before = files(url)
        found = save(url, 2.0, Fault(at=n, kind=kind))[1]  # type: ignore[arg-type]
        if n > publish:
            assert found is None and stored(url) == [2.0], where
            continue
        assert type(found) is error, where
        assert stored(url) == [1.0] and files(url) == before, where
        ckpt.save_async(url, state(3.0)).result(30)
        assert stored(url) == [3.0], where


def test_the_error_keeps_its_class_and_the_place_where_it_happened(directory: str) -> None:
    with wrap_backends(FaultyProcess(Fault(at=2, kind="no_space")).wrap):
        handle = ckpt.save_async(directory, state(1.0))
        handle.wait(30)
    with pytest.raises(NoSpaceError) as found:
        handle.result()
    assert "faulty.py" in "".join(traceback.format_exception(found.value))


def test_a_defect_that_is_no_error_of_ours_is_raised_too(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("my own defect")

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "_fill", broken)  # captures in the background what an optimizer steps
        model = torch.nn.Linear(64, 64)
        handle = ckpt.save_async(directory, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
        handle.wait(30)
    with pytest.raises(ZeroDivisionError, match="my own defect"):
        ckpt.save(directory, state(1.0))
    ckpt.save(directory, state(2.0))
    assert stored(directory) == [2.0]


# -------------------------------------------------------------------------------------------------------- a rank dies


def die(url: str, who: int, at: str) -> tuple[str, float]:
    """Rank ``who`` is killed at an operation of its storage, in the background."""
    rank = dist.get_rank()

    class Dying(FaultyProcess):
        def _begin(self, what: str, *, is_write: bool) -> Fault | None:
            if rank == who and what.startswith(at):
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._begin(what, is_write=is_write)

    own = {"own": ckpt.PerRank(torch.ones(BIG))}
    ckpt.save(url, state(1.0) | own)
    dist.barrier()
    began = time.monotonic()
    with wrap_backends(Dying().wrap):
        handle = ckpt.save_async(url, state(2.0) | own, job=ckpt.Job(timeout=4.0))
        try:
            handle.result(50)
        except CkptError as err:
            return f"{type(err).__name__}: {err}", time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.alone
def test_a_rank_that_dies_ends_the_save_of_the_others_in_time(ranks: Ranks, directory: str) -> None:
    def check(who: int, at: str) -> None:
        url = f"{directory}/{at.replace('/', '')}"
        found = ranks.run(2, die, url, who, at, allow_death=True)
        assert isinstance(found[who], Lost)
        text, seconds = found[1 - who]
        assert text.startswith("DeadlineError") and f"rank {who}" in text and seconds < 30.0
        assert stored(url) == [1.0]

    at_once(check, [(1, "write data/"), (1, "commit data/"), (0, "create index-")])


ENDS = {"falls off": ("", 0), "raises": ("raise ValueError('my own mistake')", 1), "exits": ("sys.exit(3)", 3), "fails": ("", 0)}
"""How programs end, and with which code; the last one's save fails."""

PROGRAMS = """
import os, sys, time, torch, ckpt
import ckpt.engine.save.save
from ckpt.engine.save.writer import RankWriter
codes = {}
for name in ENDS:
    child = os.fork()  # each goes on as a program that has just imported torch, and ends as any program does
    if not child:
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(codes)
    sys.exit()
os.dup2(os.open(f"{sys.argv[1]}/{name}.err", os.O_WRONLY | os.O_CREAT), 2)
run = RankWriter.run
def slow(self):
    time.sleep(0.5)
    return run(self)
RankWriter.run = slow
state = {"w": torch.full((300000,), 6.0), "small": torch.full((3,), 6.0)}
ckpt.save_async(f"{sys.argv[1]}/{name}", state)
exec(ENDS[name][0])
"""


def test_a_program_that_ends_completes_its_save(directory: str) -> None:
    """Or says that the save failed."""
    Path(directory, "fails").write_text("a file where a directory should be")
    program = [sys.executable, "-c", f"{ENDS = }{PROGRAMS}", directory]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    assert ast.literal_eval(done.stdout) == {name: code for name, (_, code) in ENDS.items()}
    said = {name: Path(directory, f"{name}.err").read_text() for name in ENDS}
    assert {name: stored(f"{directory}/{name}") for name in ENDS if name != "fails"} == {
        "falls off": [6.0],
        "raises": [6.0],
        "exits": [6.0],
    }
    assert said["falls off"] == said["exits"] == ""
    assert said["raises"].rstrip().endswith("ValueError: my own mistake") and said["raises"].count("Traceback") == 1
    assert "in the background failed" in said["fails"] and f"{directory}/fails" in said["fails"]


def test_threads_of_a_failed_save_end(directory: str) -> None:
    others = set(threading.enumerate())
    for _ in range(20):
        save(directory, 1.0, Fault(at=3, kind="error"))
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
    assert [t.name for t in set(threading.enumerate()) - others if t.name.startswith("ckpt")] == []
