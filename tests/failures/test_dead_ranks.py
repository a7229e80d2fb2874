"""Ranks that raise, die, hang or are slow during a save or a load: the others end in time and name them, and what was saved before stays.

The cases mostly wait for deadlines, so several run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import ckpt
from tests.distributed.ranks import Lost, Ranks
from tests.failures.conftest import SHM
from tests.failures.rank_work import AGAIN, BEFORE, DEADLINE, NEW, Case, Hook, Outcome, Trouble, attempt, whole
from tests.failures.states import state, stored

pytestmark = pytest.mark.alone

AT_ONCE = 4

SAVES_THAT_FAIL = [
    Case(name="killed before it calls", size=3, troubles=(Trouble(rank=1, at="call", how="kill"),)),
    Case(name="hangs before it calls", troubles=(Trouble(rank=1, at="call", how="hang"),)),
    Case(name="exits while its state is collected", size=4, troubles=(Trouble(rank=2, at="hook", how="exit"),)),
    Case(name="killed while it writes", troubles=(Trouble(rank=1, at="write data/", how="kill"),)),
    Case(name="hangs while it writes", size=3, troubles=(Trouble(rank=2, at="write data/", how="hang"),)),
    Case(name="hangs while its data are made durable", troubles=(Trouble(rank=1, at="commit data/", how="hang"),)),
    Case(name="killed before it says that it has written", troubles=(Trouble(rank=1, at="commit data/", how="kill", after=True),)),
    Case(name="leader killed before it calls", size=3, troubles=(Trouble(rank=0, at="call", how="kill"),)),
    Case(name="leader killed while it writes", troubles=(Trouble(rank=0, at="write data/", how="kill"),)),
    Case(name="leader killed while it writes the index", size=3, troubles=(Trouble(rank=0, at="create index-", how="kill"),)),
    Case(name="leader hangs before the commit", troubles=(Trouble(rank=0, at="put_if", how="hang"),)),
    Case(name="leader dies with the store", size=3, store_on_rank0=True, troubles=(Trouble(rank=0, at="create index-", how="kill"),)),
    Case(
        name="leader dies with the store while others write",
        store_on_rank0=True,
        big=24,
        troubles=(Trouble(rank=0, at="create data/", how="kill"), Trouble(rank=1, at="write data/", how="slow", seconds=0.3)),
    ),
]
"""Rank ``troubles[0].rank`` is lost; nothing is committed."""

SAVES_THAT_SUCCEED = [
    Case(name="leader killed after the commit", troubles=(Trouble(rank=0, at="put_if", how="kill", after=True),)),
    Case(
        name="killed while the leader commits",
        size=3,
        troubles=(Trouble(rank=1, at="commit data/", how="kill soon"), Trouble(rank=0, at="list_prefix data/", how="slow", seconds=1.0)),
    ),
]
"""Rank ``troubles[0].rank`` is lost, but had done its part."""

SAVES_WITH_A_RANK_THAT_RAISES = [
    Case(name="raises while its state is collected", size=3, again=True, troubles=(Trouble(rank=1, at="hook", how="raise"),)),
    Case(name="raises while it writes", again=True, troubles=(Trouble(rank=1, at="write data/", how="raise"),)),
    Case(name="leader raises while its state is collected", again=True, troubles=(Trouble(rank=0, at="hook", how="raise"),)),
    Case(name="leader raises while it commits", again=True, troubles=(Trouble(rank=0, at="create index-", how="raise"),)),
]

LOADS_THAT_FAIL = [
    Case(name="load: killed before it calls", kind="load", size=3, troubles=(Trouble(rank=2, at="call", how="kill"),)),
    Case(name="load: hangs in the index", kind="load", troubles=(Trouble(rank=1, at="read index-", how="hang"),)),
    Case(name="load: killed while it reads", kind="load", troubles=(Trouble(rank=1, at="read_into", how="kill"),)),
    Case(name="load: hangs while it reads", kind="load", size=3, troubles=(Trouble(rank=1, at="read_into", how="hang"),)),
    Case(name="load: leader killed while it reads", kind="load", size=3, troubles=(Trouble(rank=0, at="read_into", how="kill"),)),
    Case(name="load: leader hangs in the index", kind="load", troubles=(Trouble(rank=0, at="read index-", how="hang"),)),
    Case(
        name="load: leader dies with the store", kind="load", store_on_rank0=True, troubles=(Trouble(rank=0, at="read_into", how="kill"),)
    ),
]

SLOW = [
    Case(name="slow to write", big=24, troubles=(Trouble(rank=1, at="write data/", how="slow", seconds=1.2),)),
    Case(name="leader slow to write", big=24, troubles=(Trouble(rank=0, at="write data/", how="slow", seconds=1.2),)),
    Case(name="slow to read", kind="load", troubles=(Trouble(rank=1, at="(size|read|read_into) data/", how="slow", seconds=1.7),)),
]
"""Each rank moves bytes all the time, but takes longer than the deadline in all."""

WRONG_TYPE = Case(name="passes a list", again=True, troubles=(Trouble(rank=1, at="wrong type", how=""),))

CASES = {
    c.name: c
    for c in (
        *SAVES_THAT_FAIL,
        *SAVES_THAT_SUCCEED,
        *SAVES_WITH_A_RANK_THAT_RAISES,
        *LOADS_THAT_FAIL,
        *SLOW,
        WRONG_TYPE,
    )
}


@dataclass(frozen=True)
class Ended:
    """How a case ended: on each rank, and what can be loaded then."""

    ranks: list[Outcome | Lost]
    stored: int

    def survivors(self, lost: int) -> dict[int, Outcome]:
        found = {r: o for r, o in enumerate(self.ranks) if r != lost}
        assert all(isinstance(o, Outcome) for o in found.values()), found
        return found  # type: ignore[return-value]


def play(ranks: Ranks, case: Case) -> Ended:
    with TemporaryDirectory(prefix="ckpt-", dir=SHM if Path(SHM).is_dir() else None) as root:
        done = Path(root, "done")
        done.mkdir()
        url = f"{root}/run"
        ckpt.save(url, whole(state(BEFORE), Hook(), case.big))
        outcomes = ranks.run(case.size, attempt, case, url, str(done), timeout=60, allow_death=True, store_on_rank0=case.store_on_rank0)
        return Ended(outcomes, stored(url, strict=False))


@pytest.fixture(scope="module")
def ended(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Ended]]:
    """How a case ended. All that this session wants run at once, a few at a time."""
    params = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    wanted = {p["case"].name for p in params if isinstance(p.get("case"), Case)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[Ended]] = {name: pool.submit(play, ranks, CASES[name]) for name in CASES if name in wanted}
        yield lambda case: futures[case.name].result()


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[c.name for c in cases])


def check_told(ended: Ended, case: Case, lost: int) -> None:
    """Every survivor raised in time, and its message names the rank."""
    for rank, outcome in ended.survivors(lost).items():
        assert outcome.error in ("RankFailedError", "DeadlineError"), f"rank {rank}: {outcome}"
        assert f"rank {lost}" in outcome.text and outcome.hint, f"rank {rank}: {outcome}"
        assert outcome.seconds < 4 * DEADLINE + 2, f"rank {rank}: {outcome}"


@each(SAVES_THAT_FAIL)
def test_a_lost_rank_ends_the_save(case: Case, ended: Callable[[Case], Ended]) -> None:
    found = ended(case)
    lost = case.troubles[0].rank
    assert isinstance(found.ranks[lost], Lost)
    check_told(found, case, lost)
    assert found.stored == BEFORE


@each(LOADS_THAT_FAIL)
def test_a_lost_rank_ends_the_load(case: Case, ended: Callable[[Case], Ended]) -> None:
    found = ended(case)
    lost = case.troubles[0].rank
    assert isinstance(found.ranks[lost], Lost)
    check_told(found, case, lost)
    assert found.stored == BEFORE


@each(SAVES_THAT_SUCCEED)
def test_a_rank_that_is_lost_too_late_to_matter(case: Case, ended: Callable[[Case], Ended]) -> None:
    found = ended(case)
    lost = case.troubles[0].rank
    assert isinstance(found.ranks[lost], Lost)
    assert found.stored == NEW
    if lost == 0:
        check_told(found, case, 0)
    else:
        assert [o.error for o in found.survivors(lost).values()] == [None] * (case.size - 1)


@each(SAVES_WITH_A_RANK_THAT_RAISES)
def test_a_rank_that_raises_ends_the_save_at_once_and_the_next_one_works(case: Case, ended: Callable[[Case], Ended]) -> None:
    found = ended(case)
    culprit = case.troubles[0].rank
    for rank, outcome in enumerate(found.ranks):
        assert isinstance(outcome, Outcome) and outcome.seconds < DEADLINE and "my own defect" in outcome.text, f"rank {rank}: {outcome}"
        assert outcome.error == ("RuntimeError" if rank == culprit else "RankFailedError"), f"rank {rank}: {outcome}"
        assert rank == culprit or f"rank {culprit} raised RuntimeError" in outcome.text, f"rank {rank}: {outcome}"
        assert outcome.again is None, f"rank {rank}: {outcome}"
    assert found.stored == AGAIN


@each([WRONG_TYPE])
def test_a_rank_that_passes_no_dict_counts_as_one_that_raises(case: Case, ended: Callable[[Case], Ended]) -> None:
    other, culprit = ended(case).ranks
    assert isinstance(other, Outcome) and isinstance(culprit, Outcome)
    assert culprit.error == "UsageError" and other.error == "RankFailedError" and "rank 1 raised UsageError" in other.text, (culprit, other)
    assert other.seconds < DEADLINE and other.again is None and culprit.again is None, (culprit, other)


@each(SLOW)
def test_a_slow_rank_that_gets_on_is_not_lost(case: Case, ended: Callable[[Case], Ended]) -> None:
    found = ended(case)
    assert [o.error for o in found.survivors(-1).values()] == [None] * case.size, found
    assert min(o.seconds for o in found.survivors(-1).values()) > DEADLINE, "it was not slower than the deadline: nothing was tested"
    assert found.stored == (NEW if case.kind == "save" else BEFORE)
