"""DTensors over tensors that are made of others: each rank has whole blocks of rows, on other numbers of ranks too. And extra states as
TransformerEngine's, which are pickles."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
from ckpt import live
from ckpt.errors import CkptError, LayoutError, MismatchError, ReplicaError
from tests.distributed.models import mesh_of
from tests.distributed.ranks import Ranks
from tests.fixtures.rows8 import Fp8, Mx, Rows8

ROWS, BLOCK = 24, 2
Parts = dict[str, list[torch.Tensor]]


def whole(seed: int, rows: int = ROWS, block: int = BLOCK) -> Rows8:
    torch.manual_seed(seed)
    return Rows8.random(rows, 5, block=block)


def cut(tensor: Rows8, dim: int = 0) -> DTensor:
    """This rank's rows; ``copies`` of ranks have the same where the mesh has two dimensions."""
    world = dist.get_world_size()
    mesh = mesh_of(copies=2, dp=2) if world == 4 else mesh_of(dp=world)
    placements = [Replicate(), Shard(dim)] if world == 4 else [Shard(dim)]
    bounds = [0, *(min((i + 1) * -(-ROWS // mesh.size(-1)), ROWS) for i in range(mesh.size(-1)))]
    at = mesh.get_local_rank("dp")
    rows = bounds[at], bounds[at + 1]
    local = Rows8(
        tensor.codes[rows[0] : rows[1]].clone(),
        tensor.scale[rows[0] // tensor.block : rows[1] // tensor.block].clone(),
        tensor.table.clone(),
    )
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=(5, 1))


class Moment8(torch.optim.Optimizer):
    """Keeps a moment beside each parameter that lies as it does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def begin(self, seed: int) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"moment": cut(whole(seed))}


class Layer(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(cut(whole(seed)))


def job(seed: int, *, stepped: bool) -> dict[str, Any]:
    model = Layer(seed)
    optimizer = Moment8(model.parameters())
    if stepped:
        optimizer.begin(seed + 1)
    return {"model": model, "optimizer": optimizer, "two": _two(whole(seed + 2).scale)}


def _two(values: torch.Tensor) -> DTensor:
    mesh = mesh_of(dp=dist.get_world_size())
    rows = [*values.chunk(mesh.size()), *[values[:0]] * mesh.size()]
    local = rows[mesh.get_local_rank()].clone()
    made = TwoTensor(local, local + 1)  # type: ignore[no-untyped-call]
    return DTensor.from_local(made, mesh, [Shard(0)], run_check=False, shape=values.shape, stride=(1,))


def parts(state: dict[str, Any]) -> list[list[torch.Tensor]]:
    tensors = [state["model"].weight, state["optimizer"].state[state["model"].weight]["moment"]]
    return [[t._local_tensor.codes, t._local_tensor.scale, t._local_tensor.table] for t in tensors]


def saved(url: str) -> str:
    ckpt.save(url, job(1, stepped=True))
    return "saved"


def loaded(url: str, stepped: bool) -> bool:
    state = job(5, stepped=stepped)
    ckpt.load(url, state)
    return _is_first(state)


def _is_first(state: dict[str, Any]) -> bool:
    expected = parts(job(1, stepped=True))
    two = state["two"]._local_tensor, _two(whole(3).scale)._local_tensor
    same = torch.equal(two[0].a, two[1].a) and torch.equal(two[0].b, two[1].b)
    return same and all(torch.equal(a, b) for x, y in zip(parts(state), expected, strict=True) for a, b in zip(x, y, strict=True))


def in_the_background(url: str) -> bool:
    state = job(1, stepped=True)
    ckpt.save_async(url, state).result()
    return loaded(url, stepped=True)


def moved(address: str) -> list[bool]:
    """By a reshard, and from a source to a sink that takes in place."""
    old, new, taken = job(1, stepped=True), job(5, stepped=True), job(6, stepped=True)
    live.reshard(old, new)
    with live.Source(address, old) as source, live.Sink(source.address, taken) as sink:
        source.publish(1)
        sink.take()
    return [_is_first(new), _is_first(taken)]


def fp8(seed: int, *, stale: bool = False, scaled: bool = False) -> dict[str, Any]:
    """Rows of a weight as TransformerEngine has it. ``scaled``: each rank by itself."""
    torch.manual_seed(seed)
    tensor, mesh, rows = Fp8.random(ROWS, 5), mesh_of(dp=dist.get_world_size()), ROWS // dist.get_world_size()
    local = tensor.rows(rows * dist.get_rank(), rows * (dist.get_rank() + 1))
    local = Fp8(local._data.clone(), local._transpose.clone(), local._scale_inv + scaled * dist.get_rank(), stale=stale)  # type: ignore[union-attr]
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=(5, 1))}


def fp8_saved(url: str) -> str:
    ckpt.save(url, fp8(1))
    with pytest.raises(ReplicaError) as caught:
        ckpt.save(f"{url}-2", fp8(1, scaled=True))
    return str(caught.value)


def fp8_loaded(url: str) -> bool:
    ckpt.load(url, state := fp8(2))
    pairs = zip(*(each["w"]._local_tensor.__dict__.values() for each in (state, fp8(1))), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def mx(seed: int, rows: int) -> dict[str, Any]:
    """Blocks of rows of a weight: ``rows`` in all."""
    torch.manual_seed(seed)
    tensor, here = Mx.random(rows, 5), rows // dist.get_world_size()
    local, mesh = tensor.split(here)[dist.get_rank()], mesh_of(dp=dist.get_world_size())  # type: ignore[no-untyped-call]
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=(5, 1))}


def mx_saved(url: str) -> list[str]:
    """In parts of one padded block, and of two; parts that are padded are refused."""
    ckpt.save(f"{url}-16", mx(1, 16))
    ckpt.save(f"{url}-48", mx(1, 48))
    errors = []
    for rows in (8, 24, 40):
        with pytest.raises(LayoutError, match="tensor w") as caught:
            ckpt.save(url, mx(1, rows))
        errors.append(str(caught.value))
    return errors


def mx_loaded(url: str) -> bool:
    ckpt.load(f"{url}-48", state := mx(2, 48))
    pairs = zip(*([each["w"]._local_tensor._data, each["w"]._local_tensor._scale] for each in (state, mx(1, 48))), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Delayed(torch.nn.Module):
    """As a module of TransformerEngine with delayed scaling: its extra state is a pickle, in bytes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.meta = {"recipe": ("delayed", 16), "scale_fwd": torch.rand(3), "amax_history_fwd": torch.rand(16, 3)}

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(self.meta)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.meta = pickle.loads(state.numpy().tobytes())

    def is_first(self) -> bool:
        return str(self.meta) == str(Delayed(1).meta)


def pickled(url: str) -> list[bool]:
    """Replicas of a module whose pickles name storages by their addresses, which have more digits where a thread made the tensors."""
    with ThreadPoolExecutor(1) as thread:
        model = thread.submit(Delayed, 1).result() if dist.get_rank() else Delayed(1)
    ckpt.save(url, {"m": model, "dict": model.state_dict()})
    rows: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(rows, model.get_extra_state())
    own = {"_extra_state": torch.empty(0, dtype=torch.uint8)}
    ckpt.load(url, {"m": (other := Delayed(2)), "dict": own})
    again = Delayed(3)
    again.load_state_dict(own)
    if dist.get_rank():
        model.meta["scale_fwd"][2] += 1  # type: ignore[index]
    with pytest.raises(ReplicaError, match="m._extra_state: rank 0 ≠ rank 1"):
        ckpt.save(f"{url}-2", {"m": model})
    return [not torch.equal(rows[0], rows[1]), other.is_first(), again.is_first()]


def refused(url: str) -> list[str]:
    """A cut along columns, ranks without rows, and a cache that a slice does not have."""
    errors = []
    for state in ({"w": cut(whole(1), dim=1)}, {"w": _two(torch.ones(1))}, fp8(1, stale=True)):
        try:
            ckpt.save(url, state)
        except CkptError as err:
            errors.append(f"{type(err).__name__} {err}")
    return errors


def other_context(url: str) -> str:
    state = job(5, stepped=True)
    state["model"].weight._local_tensor.rounding = "up"
    with pytest.raises(MismatchError) as caught:
        ckpt.load(url, state)
    return str(caught.value)


def test_rows_come_back_on_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(3, saved, url)
    opened = ckpt.open(url)
    for field in ("codes", "scale", "table"):
        assert torch.equal(opened[f"model.weight#{field}"].read(), getattr(whole(1), field))
    for world in (2, 4):
        calls = [(loaded, url, True), (loaded, url, False), (in_the_background, f"{url}-{world}")]
        assert all(all(results) for results in ranks.run_in_turn(world, calls))
    texts = ranks.run(2, other_context, url)
    assert all('model.weight: context.rounding null in the checkpoint, "up" in the state' in text for text in texts)


def test_rows_and_transposed_rows_of_one_scale(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    assert all("w#_scale_inv" in text for text in ranks.run(2, fp8_saved, url))
    torch.manual_seed(1)
    opened, tensor = ckpt.open(url), Fp8.random(ROWS, 5)
    assert all(torch.equal(opened[f"w#{field}"].read(), getattr(tensor, field)) for field in Fp8._FIELDS)
    assert all(ranks.run(3, fp8_loaded, url))


def test_blocks_that_are_split_alone(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    for texts in ranks.run(2, mx_saved, url):
        assert all("Mx that has _scale of shape" in text and "does not divide as its rows" in text for text in texts)
    for rows in (16, 48):
        torch.manual_seed(1)
        opened, tensor = ckpt.open(f"{url}-{rows}"), Mx.random(rows, 5)
        assert torch.equal(opened["w#_data"].read(), tensor._data) and torch.equal(opened["w#_scale"].read(), tensor._scale)
    assert all(ranks.run(3, mx_loaded, url))


def test_equal_pickles_of_extra_states_are_replicas(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, pickled, str(tmp_path / "a")) == [[True] * 3] * 2


def test_rows_move_in_memory(ranks: Ranks) -> None:
    assert ranks.run(2, moved, "tcp://127.0.0.1:0/a") == [[True, True]] * 2


def test_what_does_not_divide_is_refused_before_anything_is_written(ranks: Ranks, tmp_path: Path) -> None:
    for texts in ranks.run(3, refused, str(tmp_path / "a")):
        assert all(text.startswith(LayoutError.__name__) and "(tensor w)" in text for text in texts)
        assert "cannot be sliced (ValueError: only whole blocks of rows)" in texts[0]
        assert "has no elements on some of its 3 ranks" in texts[1]
        assert "has no _transpose once it is sliced" in texts[2]
    assert not (tmp_path / "a").exists()
