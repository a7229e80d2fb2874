"""Ranks whose states do not make one checkpoint: every rank gets the same error, which names the tensor and the ranks; nothing that was
there is touched, and the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from ckpt.engine.save import save
from ckpt.errors import (
    ConsistencyError,
    CoverageError,
    LayoutError,
    NamesError,
    RankFailedError,
    ReplicaError,
    ShapeError,
    StateError,
    UsageError,
)
from tests.distributed.models import mesh_of
from tests.distributed.ranks import Ranks

State = dict[str, Any]
LARGE = (4, 40_000)
"""A float32 tensor of this shape is split between its replicas; a small one is written by one of them."""


def good() -> State:
    return {"w": torch.arange(12.0).reshape(3, 4), "large": torch.ones(LARGE), "step": 3}


def call(function: Callable[[], object]) -> ckpt.CkptError | None:
    try:
        function()
    except ckpt.CkptError as err:
        return err
    return None


def save_good_then(url: str, make: Callable[[], State], options: dict[str, Any]) -> tuple[ckpt.CkptError | None, bool, bool]:
    """The error of saving what ``make`` gives onto a good checkpoint, whether that one still loads, and whether a good save works then."""
    ckpt.save(url, good())
    err = call(lambda: ckpt.save(url, make(), **options))
    state = {"w": torch.zeros(3, 4), "large": torch.zeros(LARGE), "step": 0}
    ckpt.load(url, state)
    intact = torch.equal(state["w"], good()["w"]) and torch.equal(state["large"], good()["large"]) and state["step"] == 3
    ckpt.save(url, good() | {"step": 4})
    state["step"] = 0
    ckpt.load(url, state)
    return err, intact, state["step"] == 4


def check(
    ranks: Ranks, folder: Path, make: Callable[[], State], kind: type[ckpt.CkptError], *texts: str, **options: Any
) -> list[ckpt.CkptError | None]:
    """All ranks get this kind of error, with all of these texts in it."""
    found = ranks.run(4, save_good_then, str(folder / "a"), make, options)
    assert [type(err) for err, _, _ in found] == [kind] * 4
    assert [(intact, next_works) for _, intact, next_works in found] == [(True, True)] * 4
    for err, _, _ in found:
        assert [t for t in texts if t not in str(err)] == [], str(err)
    assert len(list((folder / "a" / "data").iterdir())) == 4, "orphans of the failed save"
    return [err for err, _, _ in found]


# ------------------------------------------------------------------------------------------------------------ replicas


def one_element_of_w() -> State:
    state = good()
    if dist.get_rank() == 2:
        state["w"][1, 1] += 1
    return state


def one_element_of_large() -> State:
    state = good()
    if dist.get_rank() in (0, 3):
        state["large"][3, -1] = 2
    return state


def negative_zero() -> State:
    state = good()
    state["w"][0, 0] = 0.0 if dist.get_rank() else -0.0
    return state


def copies_of_a_sharded_tensor() -> State:
    """Rows on two ranks, two copies: those of ranks 1 and 3 differ."""
    mesh = mesh_of(copies=2, dp=2)
    local = torch.ones(2, 3) + mesh.get_local_rank("dp") + (0.5 if dist.get_rank() == 3 else 0)
    return good() | {"d": DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)}


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (one_element_of_w, ["tensor w: ranks 0-1, 3 ≠ rank 2"]),
        (one_element_of_large, ["tensor large: ranks 0, 3 ≠ ranks 1-2"]),
        (negative_zero, ["tensor w: rank 0 ≠ ranks 1-3"]),
        (copies_of_a_sharded_tensor, ["tensor d [2:4,0:3]: rank 1 ≠ rank 3"]),
    ],
)
def test_replicas_that_differ(ranks: Ranks, tmp_path: Path, make: Callable[[], State], texts: list[str]) -> None:
    check(ranks, tmp_path, make, ReplicaError, *texts, "PerRank", str(tmp_path / "a"))


def many_that_differ() -> State:
    return {f"w{i:02d}": torch.full((3,), float(dist.get_rank())) for i in range(44)}


def test_many_replicas_that_differ_are_few_words(ranks: Ranks, tmp_path: Path) -> None:
    differ = "4 different values on ranks 0-3"
    texts = "; ".join(f"tensor w{i:02d}: {differ}" for i in range(3))
    check(ranks, tmp_path, many_that_differ, ReplicaError, f"replicas differ: {texts}; and 41 more tensors (")


def save_unseen(url: str) -> None:
    ckpt.save(url, one_element_of_w(), check_replicas=False)


def test_replicas_can_be_stored_unseen(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, save_unseen, str(tmp_path / "a"))
    found = ckpt.open(str(tmp_path / "a"))["w"].read()
    differing = (found != good()["w"]).sum().item()
    assert differing in (0, 1)


# ------------------------------------------------------------------------------------------------------------ coverage


def extra_on_one_rank() -> State:
    return good() | ({"extra": torch.ones(2)} if dist.get_rank() == 1 else {})


def lacking_on_one_rank() -> State:
    state = good()
    if dist.get_rank() == 0:
        del state["w"]
    return state


def rows_lacking_on_one_rank() -> State:
    mesh = mesh_of(dp=4)
    part = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    return good() | ({"d": part} if dist.get_rank() != 2 else {})


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (extra_on_one_rank, ["tensor extra: ranks 0, 2-3 should hold"]),
        (lacking_on_one_rank, ["tensor w: rank 0 should hold"]),
        (rows_lacking_on_one_rank, ["tensor d: rank 2 should hold [4:6,0:3]"]),
    ],
)
def test_a_tensor_that_some_ranks_lack(ranks: Ranks, tmp_path: Path, make: Callable[[], State], texts: list[str]) -> None:
    check(ranks, tmp_path, make, CoverageError, *texts)


# ---------------------------------------------------------------------------------------------------------- agreement


def other_shape() -> State:
    return good() | ({"w": torch.ones(4, 3)} if dist.get_rank() == 3 else {})


def other_dtype() -> State:
    return good() | ({"w": good()["w"].double()} if dist.get_rank() in (1, 2) else {})


def other_value() -> State:
    return good() | ({"step": 5} if dist.get_rank() == 3 else {})


def nested_value() -> State:
    return good() | {"conf": {"a": [1, {"b": "x" if dist.get_rank() else "y"}]}}


def tied_on_one_rank() -> State:
    state = good()
    return state | {"v": state["w"] if dist.get_rank() == 1 else state["w"].clone()}


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (other_shape, ["tensor w", "(3, 4) on ranks 0-2", "(4, 3) on rank 3"]),
        (other_dtype, ["tensor w", "float32 on ranks 0, 3", "float64 on ranks 1-2"]),
        (other_value, ["step", "ranks 0-2", "rank 3", "5"]),
        (nested_value, ["conf.a.1.b", "rank 0", "ranks 1-3"]),
        (tied_on_one_rank, ["tensor v"]),
    ],
)
def test_ranks_that_disagree(ranks: Ranks, tmp_path: Path, make: Callable[[], State], texts: list[str]) -> None:
    check(ranks, tmp_path, make, ConsistencyError, *texts)


def other_urls(folder: str, wrong: int) -> tuple[ckpt.CkptError | None, ckpt.CkptError | None]:
    rank = dist.get_rank()
    err = call(lambda: ckpt.save(f"{folder}/{'b' if rank == wrong else 'a'}", good()))
    return err, call(lambda: ckpt.save(f"{folder}/c", good()))


@pytest.mark.parametrize("wrong", [0, 2])
def test_ranks_with_different_urls(ranks: Ranks, tmp_path: Path, wrong: int) -> None:
    for err, later in ranks.run(3, other_urls, str(tmp_path), wrong):
        assert type(err) is ConsistencyError
        assert f"save('{tmp_path}/a')" in str(err) and f"save('{tmp_path}/b')" in str(err)
        assert later is None
    assert not (tmp_path / "a" / "checkpoint.json").exists() and not (tmp_path / "b" / "checkpoint.json").exists()
    assert ckpt.open(str(tmp_path / "c")).state()["step"] == 3


def other_call(url: str) -> tuple[ckpt.CkptError | None, bool]:
    ckpt.save(url, good())
    state = {"w": torch.zeros(3, 4), "large": torch.zeros(LARGE), "step": 0}
    err = call(lambda: ckpt.load(url, state) if dist.get_rank() == 1 else ckpt.save(url, good()))
    return err, state["step"] == 0 and not state["w"].any().item()


def test_a_rank_that_loads_while_the_others_save(ranks: Ranks, tmp_path: Path) -> None:
    for err, untouched in ranks.run(3, other_call, str(tmp_path / "a")):
        assert isinstance(err, ckpt.CkptError) and "load" in str(err) and "save" in str(err), err
        assert untouched


# ----------------------------------------------------------------------------------------------------- one rank raises


def cannot_be_stored() -> State:
    return good() | ({"thing": object()} if dist.get_rank() == 2 else {})


def without_a_rule(url: str) -> ckpt.CkptError | None:
    layout = ckpt.Layout({"dp": 3}, [("w", ckpt.Replicate())])
    state = {"w": torch.ones(2)} | ({"x": torch.ones(2)} if dist.get_rank() == 0 else {})
    return call(lambda: ckpt.save(url, state, layout=layout))


def failing_save(url: str) -> ckpt.CkptError | None:
    return call(lambda: ckpt.save(url, cannot_be_stored()))


def test_an_error_of_one_rank_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, failing_save, str(tmp_path / "a"))
    assert [type(e) for e in found] == [RankFailedError, RankFailedError, StateError]
    assert all("rank 2 raised StateError" in str(e) and "thing" in str(e) for e in found[:2])
    found = ranks.run(3, without_a_rule, str(tmp_path / "a"))
    assert [type(e) for e in found] == [LayoutError, RankFailedError, RankFailedError]
    assert all("rank 0 raised LayoutError" in str(e) and "tensor x" in str(e) for e in found[1:])
    assert not (tmp_path / "a" / "checkpoint.json").exists()
    for errors in zip(*ranks.run(3, with_another_job, str(tmp_path / "b")), strict=True):
        assert [type(e) for e in errors] == [RankFailedError, UsageError, RankFailedError]
        assert all("rank 1 raised UsageError" in str(e) and "job= is a ckpt.Job, not 60" in str(e) for e in errors[::2])


def with_another_job(url: str) -> list[ckpt.CkptError | None]:
    """One rank has misunderstood ``job=``: the errors of a save, a save in the background, a load and an export."""
    ckpt.save(f"{url}-saved", good())
    job: Any = 60 if dist.get_rank() == 1 else ckpt.Job(timeout=20)
    calls: list[Callable[[], object]] = [
        lambda: ckpt.save(url, good(), job=job),
        lambda: ckpt.save_async(url, good(), job=job).result(),
        lambda: ckpt.load(f"{url}-saved", good(), job=job),
        lambda: ckpt.export(url, {"w": good()["w"]}, job=job),
    ]
    return [call(each) for each in calls]


# -------------------------------------------------------------------------------------------------------------- loads


def load_misfit(url: str, change: dict[int, State], options: dict[str, Any]) -> tuple[ckpt.CkptError | None, bool]:
    """Load into a state in which some ranks have changed something; whether all tensors are untouched then."""
    ckpt.save(url, good())
    state = {"w": torch.full((3, 4), -1.0), "large": torch.full(LARGE, -1.0), "step": 0} | change.get(dist.get_rank(), {})
    state = {k: v for k, v in state.items() if v is not None}
    err = call(lambda: ckpt.load(url, state, **options))
    return err, all((t == -1).all().item() for t in state.values() if isinstance(t, torch.Tensor)) and state["step"] == 0


@pytest.mark.parametrize(
    ("change", "kind", "texts"),
    [
        ({2: {"w": torch.full((4, 3), -1.0)}}, ShapeError, ["w: shape [3, 4] in the checkpoint, [4, 3] in the state", "rank 2"]),
        ({1: {"w": torch.full((3, 4), -1.0, dtype=torch.float64)}}, ShapeError, ["w: dtype float32 in the checkpoint, float64", "rank 1"]),
        ({0: {"v": torch.full((2,), -1.0)}}, NamesError, ["missing in the checkpoint (1)", "v (rank 0)"]),
        ({r: {"w": None} for r in range(3)}, NamesError, ["unexpected in the checkpoint (1)", "w"]),
    ],
)
def test_a_load_that_does_not_fit_on_one_rank_changes_nothing_on_any(
    ranks: Ranks, tmp_path: Path, change: dict[int, State], kind: type[ckpt.CkptError], texts: list[str]
) -> None:
    for err, untouched in ranks.run(3, load_misfit, str(tmp_path / "a"), change, {}):
        assert type(err) is kind
        assert [t for t in texts if t not in str(err)] == [], str(err)
        assert untouched


def test_a_tensor_that_only_some_ranks_want(ranks: Ranks, tmp_path: Path) -> None:
    """What one rank takes is not unexpected on the others."""
    for err, _ in ranks.run(3, load_misfit, str(tmp_path / "a"), {0: {"w": None}, 2: {"w": None}}, {}):
        assert err is None


def writer_that_cannot_be_made(url: str, who: int, background: bool) -> tuple[str, str, float, bool]:
    """On one rank, and after all have agreed to write."""
    rank = dist.get_rank()
    ckpt.save(url, good())

    def no_memory(**given: object) -> Any:
        raise MemoryError("no memory for the writer")

    original, began = save.RankWriter, time.monotonic()
    try:
        if rank == who:
            save.RankWriter = no_memory
        if background:
            ckpt.save_async(url, good() | {"step": 4}, job=ckpt.Job(timeout=300)).result()
        else:
            ckpt.save(url, good() | {"step": 4}, job=ckpt.Job(timeout=300))
    except Exception as err:  # noqa: BLE001  what the test looks at
        took = time.monotonic() - began
        save.RankWriter = original
        state = good() | {"step": 0}
        ckpt.load(url, state)
        return type(err).__name__, str(err), took, state["step"] == 3
    raise AssertionError("it was saved")


@pytest.mark.parametrize(("who", "background"), [(0, False), (1, False), (0, True)])
def test_an_error_after_the_ranks_agreed_is_heard_at_once(ranks: Ranks, tmp_path: Path, who: int, background: bool) -> None:
    outcomes = ranks.run(3, writer_that_cannot_be_made, str(tmp_path / "c"), who, background)
    for rank, (kind, text, took, intact) in enumerate(outcomes):
        assert kind == ("MemoryError" if rank == who else "RankFailedError") and "no memory for the writer" in text
        assert took < 20 and intact  # of a deadline of 300 s
    data = {path.name.partition("-")[0] for path in (tmp_path / "c" / "data").iterdir()}
    assert len(data) == 1, "the ranks remove what they wrote"
