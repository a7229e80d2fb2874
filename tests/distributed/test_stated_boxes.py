"""Tensors that state themselves which boxes they hold, as torch 2.15 and Megatron-FSDP have them: cut by hand, saved, loaded, moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import ckpt
from ckpt import live
from ckpt.engine.verify import verify
from ckpt.errors import CkptError
from tests.distributed.models import mesh_of
from tests.distributed.ranks import Ranks

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and sizes, of one rank."""


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def at(tensor: torch.Tensor, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]


def fielded(tensor: torch.Tensor, boxes: Boxes, *, fill: float | None = None) -> torch.Tensor:
    """A plain tensor that has these boxes of a whole one side by side along the last dimension, with a column of something else between."""
    rows = max((sizes[0] for _, sizes in boxes), default=0)
    local = torch.full((rows, sum(sizes[1] + 1 for _, sizes in boxes)), -5.0)
    places, column = [], 0
    for offset, sizes in boxes:
        at(local, (0, column), sizes).copy_(at(tensor, offset, sizes) if fill is None else torch.full(sizes, fill))
        places.append((0, column))
        column += sizes[1] + 1
    return stating(local, tuple(tensor.shape), boxes, places)


def stating(local: torch.Tensor, shape: tuple[int, ...], boxes: Boxes, places: Sequence[tuple[int, ...]]) -> Any:
    local.global_shape, local.global_offsets = shape, tuple(o for o, _ in boxes)  # type: ignore[attr-defined]
    local.local_offsets, local.local_sizes = tuple(places), tuple(s for _, s in boxes)  # type: ignore[attr-defined]
    return local


ROWS: dict[int, list[Boxes]] = {
    2: [[((4, 0), (4, 6))], [((0, 0), (4, 6))]],
    3: [[((0, 0), (3, 6)), ((7, 0), (1, 6))], [], [((3, 0), (4, 2)), ((3, 2), (4, 4))]],
}
"""The boxes of a tensor of 8 × 6 on each rank: equal ones in reverse, and several, none and columns."""


def overridden(tensor: torch.Tensor, *, copies: bool, fill: float | None = None) -> DTensor:
    """Rows in the reverse of the order that the placement says, of a size that it does not."""
    mesh = mesh_of(copies=2, dp=2) if copies else mesh_of(dp=dist.get_world_size())
    index, parts = mesh.get_local_rank("dp"), mesh.size(mesh.mesh_dim_names.index("dp"))
    first = [8 - (8 * i) // (parts + 1) for i in range(parts)] + [0]
    offset, sizes = (first[index + 1], 0), (first[index] - first[index + 1], 6)
    local = at(tensor, offset, sizes).clone() if fill is None else torch.full(sizes, fill)
    placements = [Replicate(), Shard(0)] if copies else [Shard(0)]
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    made._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    return made


def wrapped(tensor: torch.Tensor, fill: float | None = None) -> DTensor:
    """Two blocks of columns on each rank: torch's own class for several shards."""
    rank, mesh = dist.get_rank(), mesh_of(dp=dist.get_world_size())
    width = tensor.shape[1] // (2 * dist.get_world_size())
    offsets = [(0, width * rank), (0, width * (rank + dist.get_world_size()))]
    parts = [at(tensor, o, (8, width)).clone() if fill is None else torch.full((8, width), fill) for o in offsets]
    local = LocalShardsWrapper(parts, offsets)
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def optimised(boxes: Boxes, seed: int, *, stepped: bool = True) -> dict[str, Any]:
    """A module whose parameter states its boxes, and an optimizer whose moments do not; or that has none yet, as in a job that resumes."""
    model, source = nn.Module(), torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    model.w = nn.Parameter(fielded(source, boxes))
    stating(model.w, (8, 6), boxes, fielded(source, boxes).local_offsets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stepped:
        model.w.grad = fielded(source + 1, boxes)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def state_of(world: int, fill: float | None = None, *, stepped: bool = True) -> dict[str, Any]:
    boxes = ROWS[world][dist.get_rank()] if world in ROWS else [((2 * dist.get_rank(), 0), (2, 6))]
    state: dict[str, Any] = {
        "fields": fielded(whole(8, 6), boxes, fill=fill),
        "dtensor": overridden(whole(8, 6), copies=world == 4, fill=fill),
    }
    zeros = fielded(torch.zeros(8, 6), boxes, fill=fill)
    own = optimised(boxes, 7 if fill is None else 8, stepped=stepped)
    return state | {"zeros": zeros, "wrapped": wrapped(whole(8, 24), fill)} | own


def blocks(tensor: Any) -> list[torch.Tensor]:
    """What a rank has, by the tensor's own statement."""
    if not isinstance(tensor, DTensor):
        return [at(tensor, o, s) for o, s in zip(tensor.local_offsets, tensor.local_sizes, strict=True)]
    local = tensor._local_tensor
    return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]


def held(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    w = state["model"].w
    moments = {key: t.detach() for key, t in state["optimizer"].state[w].items() if t.dim()}
    for t in moments.values():
        stating(t, w.global_shape, list(zip(w.global_offsets, w.local_sizes, strict=True)), w.local_offsets)
    tensors = {name: t for name, t in state.items() if name not in ("model", "optimizer")} | {"w": w.detach()} | moments
    stating(tensors["w"], w.global_shape, list(zip(w.global_offsets, w.local_sizes, strict=True)), w.local_offsets)
    return {name: [b.clone() for b in blocks(t)] for name, t in tensors.items()}


def expected() -> dict[str, torch.Tensor]:
    reference = optimised([((0, 0), (8, 6))], 7)
    (state,) = reference["optimizer"].state.values()
    found = {"fields": whole(8, 6), "dtensor": whole(8, 6), "zeros": torch.zeros(8, 6), "wrapped": whole(8, 24)}
    found |= {f"optimizer.state.model.w.{key}": state[key][:, :6] for key in ("exp_avg", "exp_avg_sq")}
    return found | {"model.w": reference["model"].w.detach()[:, :6]}


def goes_round(url: str, saved_on: int) -> list[str]:
    """Saves, or loads what other ranks saved, in this arrangement; moves it in memory; saves on with references to the first."""
    world = dist.get_world_size()
    state, problems = state_of(world), []
    if world == saved_on:
        ckpt.save(f"{url}/step-1", state, reuse=True)
        ckpt.save_async(f"{url}/step-2", state, reuse=f"{url}/step-1").result()
    again = state_of(world, fill=-7.0)
    for step in (1, 2):
        ckpt.load(f"{url}/step-{step}", again)
        problems += [f"{step} {name}" for name, bs in held(again).items() if not all(map(torch.equal, bs, held(state)[name]))]
        again = state_of(world, fill=-7.0, stepped=False)
    new = {name: torch.full_like(t, -1) for name, t in expected().items() if name in ("fields", "dtensor", "zeros", "wrapped")}
    live.reshard({name: state[name] for name in new}, new)
    problems += [f"moved {name}" for name in new if not torch.equal(new[name], expected()[name])]
    if world == 2:
        with live.Source("tcp://127.0.0.1:0/s", {name: state[name] for name in new}, job=ckpt.Job(timeout=20)) as source:
            source.publish(1).result(20)
            address = [source.address]
            dist.broadcast_object_list(address, 0)
            taken = {name: torch.full_like(t, -1) for name, t in new.items()}
            with live.Sink(address[0], taken, job=ckpt.Job(timeout=20)) as sink:
                sink.take()
            dist.barrier()
        problems += [f"taken {name}" for name in new if not torch.equal(taken[name], expected()[name])]
    some = {name: again[name] for name in new}
    live.reshard(new, some)
    problems += [f"back {name}" for name in new if not all(map(torch.equal, blocks(some[name]), blocks(state[name])))]
    return problems


def test_stated_boxes_go_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    for saved_on, worlds in ((2, (2, 3)), (3, (3, 2)), (4, (4,))):
        url = str(tmp_path / str(saved_on))
        for world in worlds:
            assert ranks.run(world, goes_round, url, saved_on) == [[]] * world
        for step in (1, 2):
            view = ckpt.open(f"{url}/step-{step}")
            assert {name: tuple(view[name].shape) for name in expected()} == {name: tuple(t.shape) for name, t in expected().items()}
            assert all(torch.equal(view[name].read(), tensor) for name, tensor in expected().items())
            assert verify(f"{url}/step-{step}").ok


def refused(root: str) -> list[str]:
    rank = dist.get_rank()
    half = [((4 * rank, 0), (4, 6))]
    states: list[Callable[[], Any]] = [
        lambda: fielded(whole(8, 6), [((0, 0), (4, 6))]),  # the same box on both
        lambda: fielded(whole(8, 6), half if rank else []),  # a hole
        lambda: fielded(whole(8 + rank, 6), half),
        lambda: stating(torch.zeros(4, 6), (8, 6), half, [(1, 0)]),
        lambda: stating(torch.zeros(4, 6), (8, 6), [((6, 0), (4, 6))], [(0, 0)]),
        lambda: stating(torch.zeros(4, 6), (8, 6), half, [(0, 0), (0, 0)]),
        lambda: stating(torch.zeros(4, 6), (8, 6), half * 2, [(0, 0), (0, 0)]),
    ]
    texts = []
    for i, make in enumerate(states):
        try:
            ckpt.save(f"{root}/{i}", {"w": make()}, job=ckpt.Job(timeout=20))
            texts.append("saved")
        except CkptError as err:
            texts.append(f"{type(err).__name__}: {err}")
    return texts


def test_what_is_stated_must_fit(ranks: Ranks, tmp_path: Path) -> None:
    for texts in ranks.run(2, refused, str(tmp_path)):
        twice, hole, shapes, *inside = texts
        assert "tensor w" in twice and "2 times" in twice and "Replicate" in twice
        assert "tensor w" in hole and "0 times" in hole
        assert "tensor w: shape (8, 6) on rank 0, (9, 6) on rank 1" in shapes
        assert all("LayoutError" in text and "the boxes that it states do not fit" in text and "tensor w" in text for text in inside)
