"""What a Checkpointer tells while it works: which events, in which order, and that no listener can hold it up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, NotFoundError, UsageError
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EveryBudget, EverySteps, Latest, Moment, SavePolicy
from ckpt.runs.events import LIMIT, AlertRules, Alerts, Event, ListenerThread


def state(n: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((1000,), float(n))}


def test_a_run_is_told_in_order(tmp_path: Path) -> None:
    events: list[Event] = []
    with ckpt.Checkpointer(str(tmp_path), save=EverySteps(1), keep=Latest(1), on_event=events.append) as c:
        assert c.restore(state()) is None  # nothing is told: nothing was loaded
        for n in (1, 2):
            c.step(n, state(n))
            c.wait()
        c.restore(state())
    told = [(e.kind, e.step) for e in events]
    first = [("save.begun", 1), ("save.captured", 1), ("save.durable", 1)]
    assert sorted(told[:3]) == sorted(first) and told[0] == first[0]
    # what is no longer kept goes in the background, and wait() waits for it
    assert told[3] == ("save.begun", 2) and told[-1] == ("restore", 2)
    assert sorted(told[-3:-1]) == [("save.durable", 2), ("save.removed", 1)]
    durable, removed = sorted(events[-3:-1], key=lambda e: e.kind)
    restored = events[-1]
    assert (durable.id, durable.url, durable.tensor_bytes, durable.ranks) == (c.steps()[0].id, c.url(2), 4000, 1)
    assert durable.seconds is not None and durable.blocked is not None and min(durable.seconds, durable.blocked) > 0
    assert durable.slowest == 0 and durable.stragglers == ()
    assert removed.url == c.url(1) and removed.id == next(e.id for e in events if e.kind == "save.durable")
    assert restored.url == c.url(2) and restored.tensor_bytes == 4000 and restored.seconds is not None and restored.error is None
    assert set(removed.to_json()) == {"kind", "at", "rank", "ranks", "root", "step", "url", "id"}


def test_what_failed_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []
    process = FaultyProcess(Fault(at=4, kind="no_space"))
    with ckpt.Checkpointer(str(tmp_path), on_event=[events.append]) as c:
        with wrap_backends(process.wrap):
            c.save(1, state())
            with pytest.raises(CkptError):
                c.wait()
        with pytest.raises(CkptError):
            c.save(2, {"x": object()})
        with pytest.raises(NotFoundError):
            c.restore(state(), step=7)
    failed = [e for e in events if e.kind == "save.failed"]
    assert [(e.step, e.error) for e in failed] == [(1, "NoSpaceError"), (2, "StateError")]
    assert failed[0].reason and "object" in str(failed[1].reason)
    assert [(e.step, e.error) for e in events if e.kind == "restore"] == [(7, "NotFoundError")]
    (alert,) = [e for e in events if e.kind == "alert"]
    assert alert.topic == "storage" and "step 1 is not saved: NoSpaceError" in str(alert.reason)
    lines = [message for message in caplog.messages if "no_space" in message]
    assert len(lines) == 1 and lines[0].startswith(f"the save of {c.url(1)} in the background failed: "), "one line of each failure"


@pytest.mark.parametrize("local", [True, False])
def test_publishing_is_told(tmp_path: Path, local: bool) -> None:
    events: list[Event] = []
    near = str(tmp_path / "near") if local else None
    with ckpt.Checkpointer(str(tmp_path / "root"), local=near, on_event=events.append) as c:
        c.save(3, state())
    published = [e for e in events if e.kind == "save.published"]
    assert [(e.step, e.url, e.id) for e in published] == ([(3, c.url(3), c.steps()[0].id)] if local else [])
    assert all(e.seconds is not None and e.seconds >= 0 for e in published)


# ----------------------------------------------------------------------------------------------------------- listeners


def test_a_listener_that_raises_is_said_once_and_called_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def broken(event: Event) -> None:
        seen.append(event.kind)
        raise ZeroDivisionError("broken listener")

    other: list[Event] = []
    with ckpt.Checkpointer(str(tmp_path), on_event=[broken, other.append]) as c:
        c.save(1, state())
    assert sorted(seen) == ["save.begun", "save.captured", "save.durable"] and len(other) == 3
    assert caplog.text.count("ZeroDivisionError: broken listener") == 1 and "has raised for 3 events" in caplog.text


def test_a_listener_that_hangs_loses_events_and_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    going, entered = threading.Event(), threading.Event()

    def hanging(event: Event) -> None:
        entered.set()
        going.wait(60)

    thread = ListenerThread(hanging)
    event = Event(kind="save.begun", at=0.0, rank=0, ranks=1, root="r")
    thread.post(event)
    assert entered.wait(30)
    began = time.thread_time()
    for _ in range(2 * LIMIT):
        thread.post(event)
    spent = (time.thread_time() - began) / (2 * LIMIT)
    assert thread.dropped == LIMIT and spent < 50e-6, f"{1e6 * spent:.1f} µs an event"
    thread.close(time.monotonic() + 0.1)
    assert f"has missed {2 * LIMIT + 1} events" in caplog.text
    going.set()


def test_an_event_costs_training_less_than_50_us(tmp_path: Path) -> None:
    """With a listener and the alerts on: what the reporter does in the threads of a save."""
    from ckpt.net.group import Group
    from ckpt.runs.reporter import Reporter

    reporter = Reporter("r", Group(0, (0,)), [lambda event: None], alerts=True, tiers=True)
    began = time.thread_time()
    for n in range(1000):
        reporter.tell("save.removed", n, "url", "id")
    spent = (time.thread_time() - began) / 1000
    reporter.close()
    assert spent < 50e-6, f"{1e6 * spent:.1f} µs an event"


def test_what_is_no_listener(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        ckpt.Checkpointer(str(tmp_path), on_event="events.jsonl")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="alerts="):
        ckpt.Checkpointer(str(tmp_path), alerts=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="above 1"):
        Alerts(slower=1.0)


# -------------------------------------------------------------------------------------------------------------- alerts


def durable(step: int, **more: Any) -> Event:
    values: dict[str, Any] = {"seconds": 10.0, "blocked": 0.1, "slowest": 0, **more}
    return Event(kind="save.durable", at=100.0 * step, rank=0, ranks=4, root="r", step=step, url=f"r/{step}", **values)


def alerts(events: list[Event], limits: Alerts | None = None, *, tiers: bool = False) -> list[tuple[str | None, int | None]]:
    rules = AlertRules(limits or Alerts())
    return [(a.topic, a.step) for event in events for a in rules.follow(event, tiers=tiers)]


def test_no_alert_for_what_is_usual() -> None:
    assert alerts([durable(n, seconds=10 + n % 3, blocked=0.1 + n % 2 / 20, slowest=n % 4, stragglers=(n % 4,)) for n in range(50)]) == []
    assert alerts([durable(n, seconds=0.01 * (1 + 8 * (n == 9))) for n in range(20)]) == []  # shorter than a second


def test_a_slow_save() -> None:
    took = [10.0] * 6 + [31.0, 32.0, 10.0, 31.0]
    assert alerts([durable(n, seconds=t) for n, t in enumerate(took)]) == [("slow", 6), ("slow", 9)]
    assert alerts([durable(n, seconds=t) for n, t in enumerate(took)], Alerts(slower=4)) == []
    assert alerts([durable(n, seconds=t) for n, t in enumerate([1.0, 50.0, 1.0])]) == []  # no history


def test_a_growing_stall() -> None:
    assert alerts([durable(n, blocked=0.2 if n < 7 else 0.9) for n in range(15)]) == [("stall", 9)]  # three of the last five
    assert alerts([durable(n, blocked=0.2 + (n == 8)) for n in range(15)]) == []


def test_a_rank_that_is_always_last() -> None:
    assert alerts([durable(n, slowest=2, stragglers=(2, 3)) for n in range(1, 9)]) == [("straggler", 5)]
    assert alerts([durable(n, slowest=2, stragglers=(2,) if n % 4 else ()) for n in range(9)]) == []
    assert alerts([durable(n, slowest=2) for n in range(9)]) == []  # the slowest of equals


def test_publishing_that_falls_behind() -> None:
    events = [durable(n) for n in range(1, 5)]
    assert alerts(events, tiers=True) == [("publishing", 3)] and alerts(events) == []
    published = Event(kind="save.published", at=450.0, rank=0, ranks=4, root="r", step=4, url="r/4")
    assert alerts([*events, published, *(durable(n) for n in (5, 6, 7))], tiers=True) == [("publishing", 3), ("publishing", 7)]


def test_publishing_that_stays_behind_is_said_once() -> None:
    """Whenever one is published fewer wait for a moment, and the next save makes them as many again."""
    events = [durable(n) for n in range(1, 4)]
    for n in range(4, 20, 2):
        events += [Event(kind="save.published", at=450.0, rank=0, ranks=4, root="r", step=n - 2, url="r/4"), durable(n), durable(n + 1)]
    assert alerts(events, tiers=True) == [("publishing", 3)]


def test_a_root_that_cannot_be_reached_is_said_once_while_local_saves_go_well() -> None:
    def failed(error: str) -> Event:
        return Event(kind="publish.failed", at=1.0, rank=0, ranks=4, root="r", step=None, error=error, reason="no answer")

    published = Event(kind="save.published", at=450.0, rank=0, ranks=4, root="r", step=9, url="r/9")
    down, full, limits = failed("StorageError"), failed("NoSpaceError"), Alerts(behind=99)
    events = [event for n in range(1, 9) for event in (durable(n), down)]
    assert alerts(events, limits, tiers=True) == [("storage", None)]
    assert alerts([*events, full, full, published, full], limits, tiers=True) == [("storage", None)] * 3


def test_storage_that_fails_is_said_once_until_it_works() -> None:
    failed = Event(
        kind="save.failed", at=1.0, rank=0, ranks=4, root="r", step=1, error="RankFailedError", reason="rank 2 raised NoSpaceError: full"
    )
    other = Event(kind="save.failed", at=1.0, rank=0, ranks=4, root="r", step=1, error="ReplicaError", reason="replicas differ")
    assert alerts([failed, failed, durable(2), failed]) == [("storage", 1), ("storage", 1)]
    assert alerts([other]) == []


# -------------------------------------------------------------------------------------------------------------- budget


class Recording(SavePolicy):
    """A policy, with the moments at which it was asked."""

    def __init__(self, policy: SavePolicy) -> None:
        self.policy = policy
        self.moments: list[Moment] = []

    def reason(self, now: Moment) -> str | None:
        self.moments.append(now)
        return self.policy.reason(now)


@pytest.mark.slow
@pytest.mark.alone
def test_a_real_job_keeps_to_its_budget(tmp_path: Path) -> None:
    """Steps of 5 ms; making the state takes 30 ms, which blocks training. How long it is blocked the loop measures, too."""

    def slow_state() -> dict[str, Any]:
        time.sleep(0.03)
        return state()

    policy, n, calls = Recording(EveryBudget(10.0, least_seconds=0.1)), 0, 0.0
    with ckpt.Checkpointer(str(tmp_path), save=policy, keep=Latest(2)) as c:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.005)
            n += 1
            began = time.monotonic()
            saved = c.step(n, slow_state)
            calls += time.monotonic() - began if saved else 0.0
    saves = policy.moments[-1].saves
    assert len(saves) > 4
    share = sum(s.seconds for s in saves[:-1]) / (saves[-1].began - saves[0].began)  # what the last one cost is not paid for yet
    assert 100 * share == pytest.approx(10.0, rel=0.2)
    assert sum(s.blocked for s in saves) == pytest.approx(calls, rel=0.2)
