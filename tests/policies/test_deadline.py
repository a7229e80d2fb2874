"""The last save before a deadline: in time and not much earlier, in a job whose clock is simulated; and where the deadline comes from."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policies import Before, EveryMinutes, Moment, OnPreemption, from_json, machine_deadline, to_json
from ckpt.policies.both import VARIABLES
from tests.policies.test_paying import EPOCH, SimulatedJob


@given(
    step=st.floats(0.1, 30.0),
    block=st.floats(0.0, 5.0),
    lasts=st.floats(0.0, 200.0),
    hours=st.floats(1.0, 3.0),
    reserve=st.floats(0.0, 300.0),
)
def test_the_last_save_is_durable_in_time(step: float, block: float, lasts: float, hours: float, reserve: float) -> None:
    policy = EveryMinutes(10) | Before(EPOCH + 3600 * hours, reserve=reserve)
    job = SimulatedJob(lambda n: step * (1 + n % 3 / 4), lambda n: block, lasts, slower=1.1).run(policy, hours + 1)
    *_, before, last = job.saved
    durable = max(last, before + block + lasts) + block + lasts
    assert durable <= 3600 * hours, "the one before may be going on, and is waited for"
    assert last >= 3600 * hours - (reserve + 2 * (block + lasts) + 6 * step + 1), "and no work is given up for nothing"


def test_when_it_is_due() -> None:
    policy = Before(EPOCH + 1000, reserve=100.0)

    def moment(time: float | None, **more: object) -> Moment:
        return Moment(step=5, started_step=0, time=None if time is None else EPOCH + time, **more)  # type: ignore[arg-type]

    assert policy.due(moment(899.0)) is None and policy.due(moment(None)) is None
    assert policy.due(moment(900.0)) == "before 2027-01-15 08:16:40 UTC" and policy.ends(moment(900.0))
    assert policy.due(moment(800.0, step_seconds=50.0)) is not None
    assert policy.due(moment(5000.0)) is not None, "a deadline that has passed ends the job at once, with a save"
    assert policy.due(moment(950.0, ended=True)) is None
    joined = EveryMinutes(1) | policy | OnPreemption()
    assert joined.due(moment(899.0, seconds=70.0)) == "every minute" and not joined.ends(moment(899.0, seconds=70.0))
    assert joined.ends(moment(900.0)) and joined.ends(moment(0.0, preempted=True))
    assert not EveryMinutes(1).ends(moment(900.0, preempted=True)) and not Before(None).ends(moment(1e12))


def test_what_a_deadline_is() -> None:
    utc = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
    berlin = utc.astimezone(timezone(timedelta(hours=1)))
    assert Before(utc) == Before(berlin) == Before(utc.timestamp()) == from_json(to_json(Before(utc)))
    for wrong in ("12:00", True, 0, -1.0, float("nan"), utc.replace(tzinfo=None), 3.5 * 3600, utc.timestamp() * 1000):
        with pytest.raises(UsageError, match="deadline"):
            Before(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reserve"):
        Before(utc, reserve=-1)


def test_what_machines_say() -> None:
    sagemaker, mlp, slurm = VARIABLES
    assert machine_deadline({}) is None and machine_deadline({slurm: " "}) is None
    assert machine_deadline({sagemaker: "1800000200", mlp: "1800000100.5", slurm: "1800000300"}) == datetime.fromtimestamp(
        1800000100.5, timezone.utc
    )
    for wrong in ("soon", "nan", "-5", "0", "3600", "1800000000000"):
        with pytest.raises(UsageError, match=slurm):
            machine_deadline({slurm: wrong})
