"""Commands that several processes divide: the result of one process, one voice, one exit code; kills, and reruns with other numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.cli import dividing
from ckpt.cli.main import cli
from ckpt.errors import UsageError
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything
from ckpt.net.group import LaunchedProcesses, first_host, launched
from tests.distributed.ranks import Lost, Ranks
from tests.ports import free_ports

TENSORS = 6


@dataclass(frozen=True)
class Ended:
    """One command in one process."""

    code: int
    out: str
    err: str


def name(i: int) -> str:
    """As Megatron-Core has it."""
    return f"decoder.layers.{i}.mlp.linear_fc1.weight"


def state(shift: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5 + shift)
    return {"model": {name(i): torch.randn(40 + 10 * i, 100, generator=generator) for i in range(TENSORS)}, "step": 7}


def torchrun_like(port: int, rank: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def srun_like(port: int, rank: int, size: int) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(size)}
    return {**step, "SLURM_PROCID": str(rank), "MASTER_PORT": str(port)}


def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run one command as a process of its own would, up to what it does at its very end."""
    ends: list[Callable[[], object]] = []
    dividing.atexit = type("AtEnd", (), {"register": staticmethod(lambda end, *given: ends.append(lambda: end(*given)))})  # type: ignore[assignment]
    out, err = StringIO(), StringIO()
    os.environ.update(environment)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main(list(arguments))
    except SystemExit as ended:
        for end in ends:
            end()
        return Ended(int(ended.code or 0), out.getvalue(), err.getvalue())
    finally:
        for variable in environment:
            del os.environ[variable]
    raise AssertionError("a command ends with SystemExit")


def run_commands(ports: Sequence[int], commands: Sequence[Sequence[str]], slurm: Sequence[int] = ()) -> list[Ended]:
    rank, size = dist.get_rank(), dist.get_world_size()
    launch = [srun_like if number in slurm else torchrun_like for number in range(len(commands))]
    return [run_command(command, start(port, rank, size)) for port, command, start in zip(ports, commands, launch, strict=True)]


def of_rank(arguments: Sequence[str]) -> list[str]:
    """``{rank}`` in an argument is the rank that it is given to."""
    return [argument.format(rank=dist.get_rank()) for argument in arguments]


def run_different(port: int, arguments: Sequence[str]) -> list[Ended]:
    return run_commands([port], [of_rank(arguments)])


def run_and_die(port: int, arguments: Sequence[str], dying: int, timeout: str) -> list[Ended]:
    """One process is killed when its first file is durable. The first one does not wait long for its last word."""
    from ckpt.converters.conversion import ConversionJournal
    from ckpt.net import divided_work

    divided_work.END = 1.0

    mark = ConversionJournal.done

    def done(journal: ConversionJournal, number: int) -> None:
        mark(journal, number)
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == dying:
        ConversionJournal.done = done  # type: ignore[method-assign]
    os.environ["CKPT_TIMEOUT"] = timeout
    return run_commands([port], [arguments])


def one_voice(ended: Sequence[list[Ended]], number: int, code: int = 0) -> Ended:
    """What the first process said; the others are silent, unless they waited for it for seconds, and end with the same code."""
    first, *others = [processes[number] for processes in ended]
    assert (first.code, {o.code for o in others}) == (code, {code}), [e.err for e in (first, *others)]
    assert {(o.out, re.sub(r"waiting for the other .*\n", "", o.err)) for o in others} == {("", "")}
    return first


def tensors_of(url: str) -> dict[str, torch.Tensor]:
    return {t.name: t.read() for t in ckpt.open(url).tensors()}


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[one], b[one]) for one in a)


def damage(root: Path, tensor: bytes) -> None:
    """Flip a bit in the middle of the tensor's bytes."""
    for path in root.glob("data/*"):
        data = bytearray(path.read_bytes())
        at = data.find(tensor)
        if at >= 0:
            data[at + len(tensor) // 2] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("no file has these bytes")


def test_the_result_is_that_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    a, b, bad = (str(tmp_path / folder) for folder in ("a", "b", "bad"))
    ckpt.save(a, state())
    ckpt.save(b, state(1))
    ckpt.save(bad, state())
    for i in (1, 4):
        damage(tmp_path / "bad", state()["model"][name(i)].numpy().tobytes())
    small = ("--shard-size", "20KB")
    native, hf, merged = (str(tmp_path / folder) for folder in ("native", "hf", "merged"))
    commands = [
        ("convert", "--json", "--to", "native", *small, a, native),
        ("convert", "--json", "--to", "hf", "--no-config", *small, a, hf),
        ("convert", "--json", "--to", "torch_dist", *small, a, str(tmp_path / "dist")),
        ("merge", "--json", "--weights", "0.3,0.7", *small, merged, a, b),
        ("cp", "--json", native, str(tmp_path / "copy")),
        ("verify", "--json", native),
        ("verify", "--json", bad),
        ("convert", "--to", "native", *small, bad, str(tmp_path / "of-bad")),
        ("convert", "--to", "torch", a, str(tmp_path / "one.pt")),
        ("verify", str(tmp_path / "nothing")),
    ]
    ended = ranks.run(3, run_commands, free_ports(len(commands)), commands, (4, 5))
    made = [json.loads(one_voice(ended, number).out) for number in range(6)]

    for report, options in zip(made[:3], ({"to": "native"}, {"to": "hf"}, {"to": "torch_dist"}), strict=True):
        alone = ckpt.convert(a, str(tmp_path / "alone" / options["to"]), shard_size=20_000, **options)
        assert (report["finished"], report["written_files"], report["written_bytes"]) == (True, alone.written_files, alone.written_bytes)
        assert report["read_bytes"] == alone.read_bytes
        assert equal(tensors_of(report["target"]), tensors_of(alone.target))
    assert everything(open_backend(hf)) == everything(open_backend(str(tmp_path / "alone" / "hf")))
    ckpt.merge(str(tmp_path / "alone" / "merged"), [a, b], weights=[0.3, 0.7], shard_size=20_000)
    assert equal(tensors_of(merged), tensors_of(str(tmp_path / "alone" / "merged")))
    assert everything(open_backend(str(tmp_path / "copy"))) == everything(open_backend(native))
    assert made[4]["copied_files"] == made[4]["files"] > 3 and made[4]["committed"]

    alone = ckpt.verify(native)
    assert made[5]["ok"] and (made[5]["chunks"], made[5]["bytes"]) == (alone.chunks, alone.bytes)
    problems = json.loads(one_voice(ended, 6, 20).out)["problems"]
    assert [p["tensor"] for p in problems] == [p.tensor for p in ckpt.verify(bad).problems] == [f"model.{name(i)}" for i in (1, 4)]
    failed = one_voice(ended, 7, 20)
    assert failed.err.count("error: ") == 1 and "linear_fc1" in failed.err
    assert not (tmp_path / "of-bad" / "checkpoint.json").exists()
    assert "writes one file" in one_voice(ended, 8, 2).err and not (tmp_path / "one.pt").exists()
    assert one_voice(ended, 9, 10).err.count("error: ") == 1


def test_a_killed_process_and_a_rerun_with_fewer(ranks: Ranks, tmp_path: Path) -> None:
    a, made = str(tmp_path / "a"), str(tmp_path / "made")
    ckpt.save(a, state())
    command = ("convert", "--json", "--to", "native", "--shard-size", "20KB", a, made)
    first, second, died = ranks.run(3, run_and_die, free_ports(1)[0], command, 2, "15", allow_death=True)
    assert isinstance(died, Lost) and died.exitcode == -signal.SIGKILL
    assert (first[0].code, second[0].code) == (31, 31)
    assert "nothing was heard of rank 2 for 15 s" in first[0].err and "error" not in second[0].err  # it may say that it waits
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "made" / "data").iterdir()}
    durable = len(list((tmp_path / "made").glob("convert-*/0*")))
    assert 3 <= durable < TENSORS
    ended = ranks.run(2, run_commands, free_ports(1), [command])
    report = json.loads(one_voice(ended, 0).out)
    assert (report["finished"], report["written_files"]) == (True, TENSORS - durable)
    assert sum(path.exists() and path.stat().st_mtime_ns == moment for path, moment in written.items()) == durable
    assert ckpt.verify(made).ok and equal(tensors_of(made), tensors_of(a))
    assert json.loads(one_voice(ranks.run(2, run_commands, free_ports(1), [command]), 0).out)["written_files"] == 0


def test_other_arguments_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "a"), state())
    command = ("convert", "--to", "native", "--shard-size", "2{rank}KB", str(tmp_path / "a"), str(tmp_path / "made"))
    failed = one_voice(ranks.run(2, run_different, free_ports(1)[0], command), 0, 22)
    assert "--shard-size is 21000 in process 1, and 20000 in process 0" in failed.err
    assert not (tmp_path / "made").exists()


def run_slowly(port: int, arguments: Sequence[str]) -> list[Ended]:
    """The first process takes longer over its own part than the others wait for its last word."""
    from ckpt.converters import semantic
    from ckpt.net import divided_work

    check, end = semantic.check_semantic, divided_work.END
    divided_work.END = 1.0
    semantic.check_semantic = lambda *given, **options: (time.sleep(3), check(*given, **options))[1]  # type: ignore[assignment]
    try:
        return run_commands([port], [arguments])
    finally:
        semantic.check_semantic, divided_work.END = check, end


def test_all_wait_for_the_process_that_checks_what_values_mean(ranks: Ranks, tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(3)).sum().backward()
    optimizer.step()
    for moments in optimizer.state.values():
        moments["exp_avg_sq"].neg_()
    ckpt.save(str(tmp_path / "a"), {"model": linear, "optimizer": optimizer})
    ended = ranks.run(2, run_slowly, free_ports(1)[0], ("verify", "--semantic", "--json", str(tmp_path / "a")))
    report = json.loads(one_voice(ended, 0, 22).out)
    assert report["ok"] and report["semantic"]["problems"]


def test_what_the_environment_tells() -> None:
    assert launched({}) is launched(torchrun_like(1, 0, 1)) is None
    agent = launched({**torchrun_like(7, 0, 2), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"})
    assert isinstance(agent, LaunchedProcesses) and (agent.serves, agent.attempt, agent.port) == (False, "3", 7)
    step = {**srun_like(0, 1, 4), "SLURM_STEP_NODELIST": "gpu[03-05],login"}
    del step["MASTER_PORT"]
    first, other = (launched({**step, "SLURM_PROCID": rank}) for rank in "01")
    assert first is not None and other is not None and first.serves and not other.serves
    assert (first.host, first.port) == (other.host, other.port) and first.host == "gpu03"
    assert launched({**step, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, without srun
    assert launched({"RANK": "1", "WORLD_SIZE": "2"}, apart=True) is None
    for wrong in ({"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {**step, "SLURM_PROCID": "4"}):
        with pytest.raises(UsageError) as caught:
            launched(wrong)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("gpu[003-017,20],login1", "gpu003"), ("a,b[1-2]", "a"), ("r[1-2]n[05,7]-ib,x", "r1n05-ib")]
)
def test_the_first_machine_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
