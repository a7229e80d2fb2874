"""Ranks that die while nothing travels: the others name them within a second, long before the deadline."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from ckpt.live import Sink, Source, reshard
from ckpt.net import liveness
from ckpt.net.liveness import LivenessLinks
from tests.distributed.ranks import Lost, Ranks
from tests.live.jobs import Job, leave, until, wait_for

TIMEOUT = 60.0
"""Of all that takes part: nobody is found by his silence."""
SECONDS = 20.0
"""Within which the dead are named: one, and more for machines that do something else, too."""


def die(folder: Path) -> None:
    """As ``kill -9`` does it. A child lives on, as a data loader's worker does, with all that was open when it was forked."""
    if os.fork() == 0:
        signal.alarm(20)
        wait_for(folder / "stop")
        os._exit(0)
    leave(folder / "struck", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def seconds_since(folder: Path) -> float:
    return time.monotonic() - float(wait_for(folder / "struck"))


def trainer(folder: Path, at: str) -> Any:
    """Publishes a version. Rank 2 dies ``"idle"``, or in the middle of the second publication (``"seal"``)."""
    rank = dist.get_rank()
    with Source("tcp://127.0.0.1:0/actor", {"a": torch.arange(8.0)}, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        if rank == 0:
            leave(folder / "address", source.address)
        wait_for(folder / "go")
        if rank == 2:
            if at == "idle":
                die(folder)
            import ckpt.live.source as module

            module.seal_image = lambda *args: die(folder)  # type: ignore[assignment, return-value]
        noticed = 0.0
        if at == "idle":
            wait_for(folder / "struck")
            if rank == 0:
                assert until(lambda: source.report().lost_ranks) == (2,)
                noticed = seconds_since(folder)
                leave(folder / "noticed", "")
            wait_for(folder / "noticed")
        try:
            began = time.monotonic()
            source.publish(2).result()
        except CkptError as err:
            after = time.monotonic() - began if at == "idle" else seconds_since(folder)
            return type(err).__name__, str(err), getattr(err, "ranks", None), noticed, after
        finally:
            wait_for(folder / "stop")


@pytest.mark.alone
@pytest.mark.parametrize("at", ["idle", "seal"])
def test_a_rank_of_the_source_dies(ranks: Ranks, tmp_path: Path, at: str) -> None:
    job = Job(ranks, 3, trainer, tmp_path, at, allow_death=True, timeout=40)
    try:
        with Sink(wait_for(tmp_path / "address"), {"a": torch.zeros(8)}, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            version = sink.take()
            leave(tmp_path / "go", "")
            with pytest.raises(CkptError, match=r"the source has no version newer than .*: its rank 2 died"):
                sink.take(newer_than=version)
            assert seconds_since(tmp_path) < SECONDS
            time.sleep(0.5)
    finally:
        leave(tmp_path / "stop", "")
    outcomes = job.result()
    assert isinstance(outcomes[2], Lost) and outcomes[2].exitcode == -signal.SIGKILL
    for kind, message, named, noticed, after in outcomes[:2]:
        assert (kind, named) == ("RankFailedError", (2,)), message
        assert message.startswith("publish: rank 2 died, as its connection has ended"), message
        assert noticed < SECONDS and after < SECONDS


def engine(folder: Path, victim: int, at: str) -> Any:
    """Takes a version. One rank dies while all wait for the next (``"waiting"``), or when none does anything (``"idle"``)."""
    with Sink(wait_for(folder / "address"), {"a": torch.zeros(8)}, job=ckpt.Job(timeout=TIMEOUT)) as sink:
        version = sink.take()
        dist.barrier()
        if dist.get_rank() == victim:
            if at == "waiting":
                time.sleep(1)  # the others wait by then
            die(folder)
        if at == "idle":
            wait_for(folder / "stop")
        try:
            sink.take(newer_than=version)
        except CkptError as err:
            return type(err).__name__, str(err), getattr(err, "ranks", None), seconds_since(folder)


@pytest.mark.alone
@pytest.mark.parametrize(("victim", "at"), [(1, "waiting"), (0, "waiting"), (2, "idle")])
def test_a_rank_of_a_sink_dies(ranks: Ranks, tmp_path: Path, victim: int, at: str) -> None:
    with Source("tcp://127.0.0.1:0/actor", {"a": torch.arange(8.0)}, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        leave(tmp_path / "address", source.address)
        job = Job(ranks, 3, engine, tmp_path, victim, at, allow_death=True, timeout=40)
        try:
            wait_for(tmp_path / "struck")
            (seen,) = until(lambda: [s for s in source.report().sinks if s.state == "lost"])
            assert seconds_since(tmp_path) < SECONDS
        finally:
            leave(tmp_path / "stop", "")
        outcomes = job.result()
        (seen,) = source.report().sinks
    if victim:
        assert (seen.state, seen.lost_ranks) == ("lost", (victim,))
    assert isinstance(outcomes.pop(victim), Lost)
    for kind, message, named, after in outcomes:
        assert (kind, named) == ("RankFailedError", (victim,)), message
        assert f"take: rank {victim} died, as its connection has ended" in message
        assert at == "idle" or after < SECONDS


def leaving_engine(folder: Path) -> str | None:
    with Sink(wait_for(folder / "address"), {"a": torch.zeros(8)}, job=ckpt.Job(timeout=TIMEOUT)) as sink:
        version = sink.take()
        dist.barrier()
        if dist.get_rank() == 1:
            return None
        with pytest.raises(CkptError) as caught:
            sink.take(newer_than=version)
        return str(caught.value)


@pytest.mark.alone
def test_a_rank_that_closed_its_sink_is_not_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    with Source("tcp://127.0.0.1:0/actor", {"a": torch.arange(8.0)}, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        leave(tmp_path / "address", source.address)
        message, _ = ranks.run(2, leaving_engine, tmp_path, timeout=30)
        assert "take: rank 1 has closed its end, and takes part no longer" in message
        assert [seen.lost_ranks for seen in source.report().sinks] == [()]


def resharder(folder: Path, victim: int, at: str) -> Any:
    """Reshards twice. One rank dies in the second: before it says anything (``"offer"``), or when it has all its bytes (``"move"``)."""
    rank = dist.get_rank()
    old = {"a": torch.arange(8.0)} if rank < 2 else None
    new = {"a": torch.zeros(8)} if rank >= 2 else None
    reshard(old, new, job=ckpt.Job(timeout=TIMEOUT))
    if rank == victim:
        import ckpt.live.resharding as module

        if at == "offer":
            module.meet = lambda *args, **options: die(folder)  # type: ignore[assignment]
        module.fill = lambda *args: die(folder)  # type: ignore[attr-defined]
    if new is not None:
        new["a"].zero_()
    try:
        reshard(old, new, job=ckpt.Job(timeout=TIMEOUT))
    except CkptError as err:
        after = seconds_since(folder)
        changed = new is not None and bool(new["a"].any())
        return type(err).__name__, str(err), getattr(err, "ranks", None), after, changed
    finally:
        leave(folder / f"done-{rank}", "")


@pytest.mark.alone
@pytest.mark.parametrize(("victim", "at"), [(0, "offer"), (1, "offer"), (3, "move")])
def test_a_rank_that_dies_in_a_reshard_is_named_at_once(ranks: Ranks, tmp_path: Path, victim: int, at: str) -> None:
    outcomes = ranks.run(4, resharder, tmp_path, victim, at, allow_death=True, timeout=40)
    leave(tmp_path / "stop", "")
    assert isinstance(outcomes.pop(victim), Lost)
    for kind, message, named, after, changed in outcomes:
        assert (kind, named) == ("RankFailedError", (victim,)), message
        assert f"reshard: rank {victim} died, as its connection has ended" in message, message
        assert after < SECONDS, message
        assert ("is now partly overwritten" in message) == (changed or "partly" in message), message
        assert changed <= (at == "move")


# ------------------------------------------------------------------------------------------------------ the connections


@contextmanager
def linked(size: int) -> Iterator[tuple[list[LivenessLinks], list[int]]]:
    """The ends of so many ranks in this process, and whom the leader has lost. Rank p has position p - 100."""
    died: list[int] = []
    names = tuple(range(100, 100 + size))
    links = [LivenessLinks(p, names, 30.0, on_death=died.append if p == 0 else lambda rank: None) for p in range(size)]
    for each in links:
        each.connect(bytes(16), links[each.parent].where())
    try:
        yield links, died
    finally:
        for each in links:
            each.close()


def kill(links: LivenessLinks) -> None:
    """The kernel closes all that a process has open; nothing of it does anything more."""
    links._closing.set()
    for port in links._ports:
        port.close()
    if links._parent is not None:
        links._parent.close()
    if links._server is not None:
        links._server.close()


def test_heads_of_teams_pass_on_who_dies_and_that_the_leader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "TEAM", 3)
    with linked(8) as (links, died):
        until(lambda: [len(each._children) for each in links] == [4, 0, 0, 2, 0, 0, 1, 0])
        kill(links[4])  # of the second team
        assert until(lambda: links[0].departed) == {4: False} and links[3].departed == {4: False}
        assert until(lambda: died) == [104]
        assert not links[5].departed  # who waits for the leader alone
        kill(links[6])  # a head
        assert until(lambda: links[0].departed.get(6) is False) and until(lambda: links[7].departed) == {6: False}
        links[2].close()
        assert until(lambda: links[0].departed.get(2)) is True
        error = links[0].departure([2, 4, 6], "take", "tcp://a", "stage")
        assert error.ranks == (104, 106)  # who has only left is not to blame
        kill(links[0])
        for position in (1, 3, 5):
            assert until(lambda position=position: 0 in links[position].departed)
        assert died == [104, 106]


def test_a_connection_that_was_reset_is_made_again_and_nobody_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "GRACE", 1.0)
    with linked(2) as (links, died):
        first = until(lambda: links[0]._children.get(1))
        first.close()
        until(lambda: links[0]._children[1] is not first)
        time.sleep(2 * liveness.GRACE)
        assert not died and not links[0].departed and not links[1].departed
        parent = links[1]._parent
        assert parent is not None  # nor does the kernel end it where packets are lost for less than the deadline
        assert parent.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_good_bye_does_not_overtake_the_last_word_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "GRACE", 3.0)
    with linked(2) as (links, _):
        until(lambda: links[0]._children)
        links[0].close()
        assert not links[1].departed
        assert until(lambda: links[1].departed) == {0: True}


def test_where_no_connection_can_be_made_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    names = (0, 1)
    leader, other = (LivenessLinks(p, names, 1.0) for p in names)
    where = leader.where()
    leader.close()
    other.connect(bytes(16), where)
    assert "a rank that dies is noticed after 1 s without a sign of life, not at once: rank 0 cannot be reached" in caplog.text
    other.close()
