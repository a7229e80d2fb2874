"""Values that say themselves what they are stored as: classes with the fields of Megatron-Core's, in states of one process and of ranks
that cut and name them differently. The real ones are in ``make trainers``."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError, CoverageError, LayoutError, NamesError, StateError
from ckpt.state.sharded import plain
from tests.distributed.ranks import Ranks

Sizes = tuple[int, ...]


@dataclass
class ShardedTensor:
    key: str
    data: Any
    dtype: torch.dtype
    local_shape: Sizes
    global_shape: Sizes
    global_offset: Sizes
    axis_fragmentations: Sizes | None = None
    replica_id: int | Sizes = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: Sizes
    global_offset: Sizes
    replica_id: int | Sizes = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], torch.Tensor]
    replica_id: int | Sizes = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


def box(key: str, data: torch.Tensor, shape: Sizes | None = None, offset: Sizes | None = None, **more: Any) -> ShardedTensor:
    local = tuple(more.pop("local_shape", data.shape))
    shape = shape or local
    return ShardedTensor(key, data, data.dtype, local, shape, offset or (0,) * len(shape), **more)


def halves(key: str, data: torch.Tensor, replica_id: Any, flat: Any) -> list[ShardedTensor]:
    """Views of a fused weight, as of SwiGLU."""
    top, bottom = data.chunk(2)
    shape = tuple(data.shape)
    return [box(key, top, shape, replica_id=replica_id), box(key, bottom, shape, (len(top), 0), replica_id=replica_id)]


def turned(key: str, data: torch.Tensor, replica_id: Any, flat: Any) -> dict[str, ShardedTensor]:
    """A copy, as of experts in one matrix."""
    return {"t": box(key, data.t().contiguous())}


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def sharded(*, saved: bool) -> dict[str, Any]:
    """A state of one process; before it is loaded, all of its tensors are zeros."""
    number = float(saved)
    of = {"kind": b"x", "file": io.BytesIO(b"y"), "seed": torch.tensor([3, 4]), "pair": (1, [2.5])} if saved else None
    layers = {f"{i}.w": box("layers.w", (arange(2, 3) + i) * number, (2, 2, 3), (i, 0, 0), prepend_axis_num=1) for i in range(2)}
    flat = arange(24)[5:19] * number
    rest = [(0, 5), (19, 24)]
    return {
        "model": {
            **layers,
            "again": box("layers.w", arange(2, 3) * number, (2, 2, 3), (0, 0, 0), prepend_axis_num=1, replica_id=(0, 1)),
            "flat": box("flat", flat, (1, 4, 6), local_shape=(4, 6), flattened_range=slice(5, 19), prepend_axis_num=1),
            "rest": [
                box("flat", arange(24)[a:b] * number, (1, 4, 6), local_shape=(4, 6), flattened_range=slice(a, b), prepend_axis_num=1)
                for a, b in rest
            ],
            "fused": ShardedTensorFactory("fused", arange(4, 3) * number, halves, torch.cat),
            "copied": ShardedTensorFactory("copied", arange(4, 3) * number, turned, lambda built: built["t"].t()),
            "extra": ShardedObject("extra", of, (2, 1), (0, 0)),
            "none": ShardedObject("extra", None, (2, 1), (1, 0)),
        },
        "optimizer": {
            "state": {0: {"m": box("m.a", arange(3) * number)}, **({"common_step": torch.tensor(7.0)} if saved else {})},
            "groups": [{"params": LocalNonpersistentObject([0]), "lr": 0.5 * number, "m": box("m.b", arange(2) * number)}],
        },
        "iteration": 3 * saved,
    }


def leaves(value: Any) -> Any:
    """What can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, dict):
        return {k: leaves(v) for k, v in value.items()}
    return [leaves(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("later", [False, True])
def test_what_is_named_comes_back_and_lies_under_its_own_name(tmp_path: Path, later: bool) -> None:
    url, state = str(tmp_path / "a"), sharded(saved=True)
    expected = leaves(plain(state))
    if later:
        handle = ckpt.save_async(url, state)
        for each in (*state["model"]["rest"], state["model"]["fused"], state["optimizer"]["state"][0]["m"]):
            each.data.zero_()
        handle.result()
    else:
        ckpt.save(url, state)
    stored = ckpt.open(url)
    assert leaves({name: stored[name].read() for name in ("layers.w", "flat", "copied")}) == leaves(
        {"layers.w": torch.stack([arange(2, 3), arange(2, 3) + 1]), "flat": arange(1, 4, 6), "copied": arange(4, 3).t()}
    )
    fresh = sharded(saved=False)
    ckpt.load(url, fresh)
    assert leaves(plain(fresh)) == expected
    assert fresh["optimizer"]["groups"][0]["params"].obj == [0]


def test_a_part_is_chosen_by_the_names_that_are_stored(tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ckpt.save(url, sharded(saved=True), only=["m.*", "extra/*", "iteration"])
    assert sorted(ckpt.open(url)) == ["extra/shard_0.0_2.1.seed", "m.a", "m.b"]
    ckpt.load(url, fresh := sharded(saved=False), only=["m.a", "iteration"])
    assert (fresh["optimizer"]["state"][0]["m"].data.tolist(), fresh["iteration"], fresh["model"]["extra"].data) == ([1, 2, 3], 3, None)
    with pytest.raises(NamesError, match="m.c"):
        ckpt.load(url, {"x": box("m.c", torch.zeros(1))}, only="m.c")


@pytest.mark.parametrize(("rows", "expected"), [(2, [[1, 2], [3, 4]]), (5, [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]])])
def test_other_padding_is_taken_where_the_tensor_allows_it(tmp_path: Path, rows: int, expected: list[list[float]]) -> None:
    url = str(tmp_path / "a")
    ckpt.save(url, {"w": box("w", arange(3, 2))})
    state = {"w": box("w", torch.full((rows, 2), 9.0), allow_shape_mismatch=True)}
    ckpt.load(url, state)
    assert state["w"].data.tolist() == expected
    with pytest.raises(CkptError, match=r"shape \[3, 2\]"):
        ckpt.load(url, {"w": box("w", torch.zeros(rows, 2))})


class Holder:
    def state_dict(self) -> dict[str, Any]:
        return {"w": box("w", torch.ones(2))}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"w": ShardedTensor("w", None, torch.float32, (2,), (2,), (0,))}, StateError, "no data"),
        ({"a": box("w", torch.ones(2), (4,)), "b": box("w", torch.ones(2).half(), (4,), (2,))}, StateError, "one tensor"),
        ({"a": box("w", torch.ones(2), (4,)), "b": box("w", torch.ones(2), (4,), (1,))}, LayoutError, "in two of them"),
        ({"a": box("w", torch.ones(2), (4,))}, CoverageError, "stored 0 times"),
        ({"a": box("w", torch.ones(2)), "w": torch.ones(1)}, StateError, "rename"),
        ({"a": ShardedObject("o", 1, (1,), (0,)), "b": ShardedObject("o", 2, (1,), (0,))}, StateError, "replica_id"),
        ({"a": ShardedObject("o", 1, (1,), (0,), replica_id=(0, 1))}, CoverageError, "replica.*o/shard_0_1"),
        ({"a": ShardedObject("o", object(), (1,), (0,))}, StateError, "o/shard_0_1.*cannot be stored"),
        ({"a": Holder()}, StateError, "could not be loaded again"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(tmp_path: Path, state: dict[str, Any], error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        ckpt.save(str(tmp_path / "a"), state)
    assert not (tmp_path / "a" / "checkpoint.json").exists()


WHOLE = arange(3, 8, 4)
"""A weight of three layers."""


def staged(stages: list[int], *, saved: bool) -> dict[str, Any]:
    """Layers over stages, rows over the ranks of each. A stage counts its layers from 0; all have the tied weight."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage, part = divmod(rank, size // len(stages))
    rows = torch.arange(8).chunk(size // len(stages))[part]
    state: dict[str, Any] = {}
    for i in range(stages[stage]):
        layer = sum(stages[:stage]) + i
        state[str(i)] = box("w", (WHOLE * saved)[layer, rows], (3, 8, 4), (layer, int(rows[0]), 0), prepend_axis_num=1)
    tied = box("tied", arange(2) * saved, replica_id=(stage, part))
    seed = {"seed": torch.tensor([rank]), "list": [rank, {}]} if saved else None
    return {"model": state, f"tied of {stage}": tied, "rng": ShardedObject("rng", seed, (size,), (rank,)), "iteration": 5 * saved}


def saved_by(url: str, stages: list[int]) -> None:
    ckpt.save(url, staged(stages, saved=True))


def loaded_by(url: str, stages: list[int], same: bool) -> tuple[Any, Any]:
    """What was loaded, and what should have been. Objects are of as many ranks as saved them."""
    state, expected = staged(stages, saved=False), staged(stages, saved=True)
    if not same:
        del state["rng"], expected["rng"]
    report = ckpt.load(url, state, strict=same)
    assert not report.missing
    return leaves(plain(state)), leaves(plain(expected))


def refused(url: str) -> list[str]:
    """All ranks call it a replica, tensor or object; nobody saves the second half; both save all of it."""
    told = []
    for state in (
        {"w": box("w", torch.ones(2), replica_id=1)},
        {"o": ShardedObject("o", dist.get_rank(), (1,), (0,), replica_id=1), "p": ShardedObject("p", 1, (1,), (0,), dist.get_rank())},
        {"w": box("w", torch.ones(2), (4,), (2 * dist.get_rank(),), replica_id=dist.get_rank())},
        {"w": box("w", torch.ones(2))},
    ):
        with pytest.raises(CoverageError) as caught:
            ckpt.save(url, state)
        told.append(str(caught.value))
    return told


def test_ranks_save_their_boxes_and_others_load_them(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    _, loaded, told = ranks.run_in_turn(2, [(saved_by, url, [2, 1]), (loaded_by, url, [2, 1], True), (refused, str(tmp_path / "b"))])
    assert all(re.search("0 times.*replica.*o/shard_0_1.*0 times.*2 times", " ".join(each), re.DOTALL) for each in told)
    loaded += [*ranks.run(3, loaded_by, url, [3], False), *ranks.run(4, loaded_by, url, [1, 2], False)]
    assert [found for found, expected in loaded if found != expected] == []
