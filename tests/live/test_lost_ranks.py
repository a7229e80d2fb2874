"""Ranks that die or hang while versions are published and taken: replicas stand in, or an error names them and the old version is whole."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError, CorruptError, TornError
from ckpt.live import Sink, Source
from ckpt.live.segment import DATA
from tests.distributed.ranks import Lost, Ranks
from tests.live import jobs
from tests.live.jobs import Job, fsdp_state, leave, replicated_state, step_of, tp_state, until, wait_for

TIMEOUT = 3.0


def trainer(folder: Path, make: str, victim: int, blow: int) -> None:
    """Publishes steps 1 and 2; before the second is taken, one rank is struck."""
    state = {"fsdp": fsdp_state, "replicated": replicated_state}[make](0)
    with Source("tcp://127.0.0.1:0/actor", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        if dist.get_rank() == 0:
            leave(folder / "address", source.address)
        for step in (1, 2):
            for name, tensor in state.items():
                with torch.no_grad():
                    jobs.local_of(tensor).copy_(jobs.full_like(tensor, name, step)[0])
            source.publish(step, capture="eager").result(20)
            dist.barrier()
            if dist.get_rank() == 0:
                leave(folder / f"published-{step}", "")
            wait_for(folder / "taken-1")
        if dist.get_rank() == victim:
            leave(folder / "struck", "")
            os.kill(os.getpid(), blow)
        wait_for(folder / "stop")


def engine(folder: Path, local: str) -> tuple[list[Any], float]:
    """What happened in each take: the step that the state has, and the error."""
    os.environ["CKPT_LIVE_LOCAL"] = local
    state = tp_state()
    outcomes: list[Any] = []
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=TIMEOUT)) as sink:
        wait_for(folder / "published-1")
        version = sink.take()
        outcomes.append((step_of(state), None))
        dist.barrier()
        leave(folder / "taken-1", "")
        wait_for(folder / "struck")
        time.sleep(0.3)
        began = time.monotonic()
        try:
            sink.take(newer_than=version, timeout=TIMEOUT)
            report = sink.report
            assert report is not None
            outcomes.append((step_of(state), dict(report.lost)))
        except CkptError as err:
            assert sink.version == version
            outcomes.append((step_of(state), str(err)))
        return outcomes, time.monotonic() - began


CASES = [
    ("replicated", 3, signal.SIGKILL, "off"),
    ("replicated", 2, signal.SIGSTOP, "off"),
    ("fsdp", 3, signal.SIGKILL, "on"),
    ("fsdp", 0, signal.SIGKILL, "on"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("replicated", 3, signal.SIGKILL, "on"),
            ("replicated", 2, signal.SIGSTOP, "on"),
            ("fsdp", 3, signal.SIGKILL, "off"),
            ("fsdp", 0, signal.SIGSTOP, "on"),
        )
    ),
]


@pytest.mark.alone
@pytest.mark.parametrize(("make", "victim", "blow", "local"), CASES)
def test_a_rank_of_the_source_is_lost(ranks: Ranks, tmp_path: Path, make: str, victim: int, blow: int, local: str) -> None:
    source = Job(ranks, 4, trainer, tmp_path, make, victim, int(blow), allow_death=True, await_stopped=False, timeout=90)
    try:
        outcomes = ranks.run(2, engine, tmp_path, local, timeout=40)
    finally:
        leave(tmp_path / "stop", "")
    for (first, second), seconds in outcomes:
        assert first == (1, None)
        step, said = second
        if victim == 0:  # the leader: there is nobody to ask for a version
            assert step == 1 and "source" in said
        elif make == "replicated":
            assert step == 2
        elif local == "on" and blow == signal.SIGSTOP:
            assert step == 2  # its memory is there
        else:
            assert step == 1 and f"rank {victim}" in said
        assert seconds < 4 * TIMEOUT
    if make == "replicated" and local == "off":  # at least one of the two needed it
        assert any(victim in lost for (_, (_, lost)), _ in outcomes)
    assert isinstance(source.result()[victim], Lost)


def dying_engine(folder: Path, victim: int, phase: str) -> tuple[Any, Any, float]:
    import ckpt.live.sink as module

    state = tp_state()
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=TIMEOUT)) as sink:
        version = sink.take()
        dist.barrier()
        if dist.get_rank() == victim:

            def die(*args: Any, **options: Any) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(module, phase, die)
        leave(folder / f"go-{dist.get_rank()}", "")
        wait_for(folder / "published-2")
        began = time.monotonic()
        try:
            sink.take(newer_than=version)
        except CkptError as err:
            known = sink.version
            assert known is not None
            return step_of(state) == known.step and known.step, str(err), time.monotonic() - began
        return step_of(state), None, time.monotonic() - began


def publisher(folder: Path) -> None:
    state = fsdp_state(1)
    with Source("tcp://127.0.0.1:0/actor", state, job=ckpt.Job(timeout=20)) as source:
        source.publish(1).result()
        if dist.get_rank() == 0:
            leave(folder / "address", source.address)
        wait_for(folder / "go-0")
        wait_for(folder / "go-1")
        for name, tensor in state.items():
            jobs.local_of(tensor).copy_(jobs.full_like(tensor, name, 2)[0])
        source.publish(2, capture="eager").result()
        if dist.get_rank() == 0:
            leave(folder / "published-2", "")
        wait_for(folder / "stop")


def survivor(folder: Path) -> int | None:
    state = tp_state()
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=20)) as sink:
        version = sink.take()
        assert sink.take(newer_than=version, timeout=40).step == 2
    return step_of(state)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        (0, "stage_take"),
        (1, "switch_take"),
        pytest.param(1, "stage_take", marks=pytest.mark.slow),
        pytest.param(0, "match_take", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_a_sink_dies_and_the_others_are_whole(ranks: Ranks, tmp_path: Path, victim: int, phase: str) -> None:
    source = Job(ranks, 2, publisher, tmp_path, timeout=60)
    other = Job(ranks, 1, survivor, tmp_path, timeout=60)
    try:
        outcomes = ranks.run(2, dying_engine, tmp_path, victim, phase, allow_death=True, timeout=40)
        assert other.result() == [2]
    finally:
        leave(tmp_path / "stop", "")
    source.result()
    assert isinstance(outcomes[victim], Lost) and outcomes[victim].exitcode == -signal.SIGKILL
    assert not isinstance(outcomes[1 - victim], Lost), outcomes[1 - victim].text
    step, said, seconds = outcomes[1 - victim]
    assert step == (2 if phase == "switch_take" else 1)
    assert f"rank {victim}" in said and seconds < 4 * TIMEOUT


def corrupt(source: Source, at: int) -> None:
    """Flip a byte of what is published, as a bad memory chip does."""

    segment = source._published[max(source._published)].segment
    segment._whole[DATA + at] ^= 1


@pytest.mark.parametrize("local", ["on", "off"])
@pytest.mark.parametrize("switch", ["double", "in-place"])
def test_a_flipped_byte_is_named_and_only_a_take_in_place_over_the_network_is_torn(
    local: str, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LIVE_LOCAL", local)
    state = {"a": torch.zeros(4_000_000), "b": torch.zeros(1000)}
    into = {name: torch.full_like(t, -1) for name, t in state.items()}
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, into, switch=switch, job=ckpt.Job(timeout=TIMEOUT)) as sink,
    ):
        source.publish(1).result()
        version = sink.take()
        for tensor in state.values():
            tensor.fill_(2)
        source.publish(2).result()
        corrupt(source, 15_000_001)
        with pytest.raises(CorruptError, match=r"tensor a: bytes 14680064 to 15728640.*have changed since they were published"):
            sink.take(newer_than=version)
        if switch == "in-place" and local == "off":
            with pytest.raises(TornError, match="a mix of step 1 .* and step 2"):
                _ = sink.version
            assert set(into["a"].unique().tolist()) == {0.0, 2.0}
        else:
            assert sink.version == version and not any(t.any() for t in into.values())
        for tensor in state.values():
            tensor.fill_(3)
        source.publish(3).result()
        repaired = sink.take()
        assert repaired.step == 3 and sink.version == repaired
        assert all(bool((t == 3).all()) for t in into.values())


def failing_trainer(folder: Path, victim: int) -> tuple[str | None, float]:
    """Publishes step 1; a rank dies while it seals step 2."""
    state = fsdp_state(1)
    with Source("tcp://127.0.0.1:0/actor", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        if dist.get_rank() == 0:
            leave(folder / "address", source.address)
        dist.barrier()
        if dist.get_rank() == victim:
            import ckpt.live.source as module

            module.seal_image = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        began, said = time.monotonic(), None
        try:
            source.publish(2).result()
        except CkptError as err:
            said = str(err)
        seconds = time.monotonic() - began
        leave(folder / "failed", "")
        wait_for(folder / "stop")
        return said, seconds


@pytest.mark.alone
def test_a_rank_dies_while_it_publishes_and_the_others_say_which(ranks: Ranks, tmp_path: Path) -> None:
    source = Job(ranks, 3, failing_trainer, tmp_path, 2, allow_death=True, timeout=60)
    try:
        wait_for(tmp_path / "failed")
        assert ranks.run(1, take_what_is_there, tmp_path, timeout=40) == [True]
    finally:
        leave(tmp_path / "stop", "")
    survivors = source.result()[:2]
    assert all("rank 2" in said and seconds < 4 * TIMEOUT for said, seconds in survivors)


def take_what_is_there(folder: Path) -> bool:
    """Step 1 is still the newest, and the dead rank's part of it is gone; whether the state is as it was."""
    state = {name: torch.full(shape, -1.0) for name, shape in jobs.SHAPES.items()}
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=TIMEOUT)) as sink:
        with pytest.raises(CkptError, match="rank 2"):
            sink.take()
        return sink.version is None and all(bool((t == -1).all()) for t in state.values())


def slow_engine(folder: Path) -> None:
    """Stops in the middle of a take, with segments mapped."""
    import ckpt.live.sink as module

    module.switch_take = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
    with Sink(wait_for(folder / "address"), tp_state(), job=ckpt.Job(timeout=TIMEOUT)) as sink:
        leave(folder / "taking", str(os.getpid()))
        sink.take()


def test_a_sink_that_hangs_holds_up_nobody(ranks: Ranks, tmp_path: Path) -> None:
    state = {name: jobs.full(name, 1) for name in jobs.SHAPES}
    patience = 30.0  # which nobody needs
    with Source("tcp://127.0.0.1:0/actor", state, keep=1, job=ckpt.Job(timeout=patience)) as source:
        leave(tmp_path / "address", source.address)
        source.publish(1).result()
        hanging = Job(ranks, 1, slow_engine, tmp_path, allow_death=True, timeout=3 * patience)
        pid = int(wait_for(tmp_path / "taking"))
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T"))
        began = time.monotonic()
        for step in range(2, 6):
            for name, tensor in state.items():
                tensor.copy_(jobs.full(name, step))
            assert source.publish(step).result(patience).step == step
            into = {name: torch.full_like(t, -1) for name, t in state.items()}
            with Sink(source.address, into, job=ckpt.Job(timeout=patience)) as sink:
                assert sink.take().step == step and step_of(into) == step
        assert time.monotonic() - began < patience
        (seen, *_) = source.report().sinks
        assert seen.state == "taking" and seen.late
        os.kill(pid, signal.SIGKILL)
    assert isinstance(hanging.result()[0], Lost)


def corrupting_trainer(folder: Path) -> None:
    """Publishes a version of which one of two replicas is damaged in memory."""
    state = replicated_state(1)
    with Source("tcp://127.0.0.1:0/actor", state, job=ckpt.Job(timeout=20)) as source:
        source.publish(1, capture="eager").result()
        if dist.get_rank() == 1:
            for at in range(0, source._published[1].segment.capacity, 1 << 20):
                corrupt(source, at)
        dist.barrier()
        if dist.get_rank() == 0:
            leave(folder / "address", source.address)
        wait_for(folder / "stop")


def test_another_replica_stands_in_for_damaged_memory(ranks: Ranks, tmp_path: Path) -> None:
    source = Job(ranks, 4, corrupting_trainer, tmp_path, timeout=60)
    try:
        (outcome,) = ranks.run(1, take_past_damage, tmp_path, timeout=40)
    finally:
        leave(tmp_path / "stop", "")
    source.result()
    assert outcome == (1, [1])


def take_past_damage(folder: Path) -> tuple[int | None, list[int]]:
    state = tp_state()
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=20)) as sink:
        sink.take()
        report = sink.report
        assert report is not None
        assert all("have changed since they were published" in text for text in report.lost.values())
        return step_of(state), list(report.lost)
