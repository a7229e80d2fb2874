"""Jobs that go on from a checkpoint of somebody else: run on each rank, they give what ``ckpt.load`` put there.

Models have the names and shapes of the checkpoint and nothing else. Gathering is torch's, cutting plain slicing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckpt

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Full = dict[str, torch.Tensor]
PARAMETER = "optimizer.state.model."
ASIDE = {f"{PARAMETER}*.master": "masters.*"}
"""torch's optimizers keep no masters; a name that is not wanted is left alone."""


def module_of(shapes: Shapes, tied: Mapping[str, str] | None = None, frozen: Collection[str] = ()) -> nn.Module:
    """A module with these parameters, none of which has a value that a checkpoint could have. ``tied``: name → the name that it is too."""
    root = nn.Module()
    for name, (shape, dtype) in shapes.items():
        if name not in (tied or {}):
            _put(root, name, nn.Parameter(torch.full(shape, 77, dtype=dtype), requires_grad=name not in frozen))
    for name, real in (tied or {}).items():
        _put(root, name, root.get_parameter(real))
    return root


def _put(root: nn.Module, name: str, param: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, param)


def load(url: str, model: nn.Module, rename: Mapping[str, str], layout: ckpt.Layout | None = None, **options: Any) -> torch.optim.Optimizer:
    """Load a model, and an optimizer unless ``only`` says so: nothing may be missing, nothing left over."""
    optimizer = torch.optim.AdamW(groups_of(model), lr=9.0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    options.setdefault("only", ["model.*", "optimizer.*"])
    report = ckpt.load(url, state, rename=rename, layout=layout, **options)
    assert report.missing == () and report.unexpected == ()
    return optimizer


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters with and without weight decay, and those of experts apart, as both frameworks group them."""
    found: dict[Any, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            found.setdefault((param.ndim > 1, "_experts." in name), []).append(param)
    return [{"params": params} for params in found.values()]


def held(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> Full:
    """Weights and states of this rank by the names of docs/formats.md, gathered by torch if they are ``whole``."""

    def of(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.full_tensor() if whole and isinstance(tensor, DTensor) else tensor
        return found.detach().clone()

    found = {f"model.{n}": of(t) for n, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{PARAMETER}{name}.{key}": of(t) for key, t in optimizer.state.get(param, {}).items()}
    return found


# ------------------------------------------------------------------------------------------------------- torch's layouts


def into_fsdp(url: str, shapes: Shapes, rename: Mapping[str, str], options: dict[str, Any]) -> tuple[Full, set[float]]:
    """FSDP2 on all ranks."""
    model = module_of(shapes, options.pop("tied", None), options.pop("frozen", ()))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = load(url, model, rename, **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return held(model, optimizer), {g["lr"] for g in optimizer.param_groups}


def into_mesh(
    url: str, shapes: Shapes, rename: Mapping[str, str], sizes: tuple[int, ...], cuts: Mapping[str, int], options: dict[str, Any]
) -> tuple[Full, set[float]]:
    """Tensor parallelism over the last dimension of a mesh, as ``cuts`` says (end of a name → axis), FSDP2 over the first of two."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    model = module_of(shapes)
    for name, param in list(model.named_parameters()):
        axis = next((axis for end, axis in cuts.items() if name.endswith(end)), None)
        placement: Placement = Replicate() if axis is None else Shard(axis)
        owner, _, last = name.rpartition(".")
        spread = distribute_tensor(param.detach(), mesh["tp"], [placement])
        model.get_submodule(owner).register_parameter(last, nn.Parameter(spread))
    if len(sizes) > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = load(url, model, rename, **options)
    return held(model, optimizer), {g["lr"] for g in optimizer.param_groups}


# ------------------------------------------------------------------------------------------------------ Megatron's layouts

VOCABULARY = 42


def rules() -> list[Any]:
    cut = [("*word_embeddings.weight", 0), ("*output_layer.weight", 0)]
    return [
        ("*.local_experts.*", ckpt.Replicate(), ckpt.OnMesh("expert")),
        *((glob, ckpt.Shard(axis, "tp"), ckpt.Padded(0, VOCABULARY)) for glob, axis in cut),
        ("*linear_qkv.weight", ckpt.Shard(0, "tp")),
        ("*linear_proj.weight", ckpt.Shard(1, "tp")),
        ("*linear_fc1.weight", ckpt.Interleaved(0, "tp", groups=2)),
        ("*linear_fc2.weight", ckpt.Shard(1, "tp")),
        ("*", ckpt.Replicate()),
    ]


def layout_of(job: Mapping[str, int]) -> ckpt.Layout:
    """The layout of a job of these sizes (tp, pp, vpp, ep), for its own parts of plain tensors."""
    tp, pp, vpp, ep = (job.get(n, 1) for n in ("tp", "pp", "vpp", "ep"))
    numbered: list[Any] = [ckpt.experts("local_experts.{n}", count=4, ranks=ep, mesh="expert")]
    if vpp > 1:
        layers = ckpt.pipeline("{chunk}.decoder.layers.{n}", layers=4, stages=pp, virtual=vpp)
        outside = ("embedding", "decoder.final_layernorm", "output_layer")
        numbered += [layers, *(ckpt.Numbered(pattern=f"{{chunk}}.{o}", to=o, over="pp", ids=layers.ids) for o in outside)]
    elif pp > 1:
        numbered.append(ckpt.pipeline("layers.{n}", layers=4, stages=pp))
    each = dist.get_world_size() // pp
    sizes = {"pp": pp, "dp": each // tp, "tp": tp}
    return ckpt.Layout(sizes, rules=rules(), numbered=numbered, meshes={"expert": {"pp": pp, "edp": each // ep, "ep": ep}})


def local_name(name: str, chunk: int, vpp: int, first: int, expert: int) -> str:
    name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - first}", name)
    name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) - expert}", name)
    return f"{chunk}.{name}" if vpp > 1 else name


def parts_of(rank: int, ranks: int, job: Mapping[str, int], whole: Mapping[str, torch.Tensor]) -> Full:
    """The parameters (name within the model → tensor) of one rank of a job of these sizes: its name there and its part. ``padded`` rows
    of the vocabulary; if that is as many as there are, these are what they were, else zeros."""
    tp, pp, vpp, ep = (job.get(n, 1) for n in ("tp", "pp", "vpp", "ep"))
    each = ranks // pp
    stage, owner, part = rank // each, rank % each % ep, rank % tp
    span = 4 // (pp * vpp)
    found = {}
    for chunk in range(vpp):
        first = (chunk * pp + stage) * span
        for name, tensor in whole.items():
            layer = re.search(r"layers\.(\d+)\.", name)
            expert = re.search(r"local_experts\.(\d+)\.", name)
            if layer is None:
                at_first = name.startswith("embedding.")
                here = (stage, chunk) == ((0, 0) if at_first else (pp - 1, vpp - 1))
            else:
                here = first <= int(layer[1]) < first + span
            if here and (expert is None or int(expert[1]) // (4 // ep) == owner):
                found[local_name(name, chunk, vpp, first, owner * (4 // ep))] = part_of(name, tensor, part, tp, job["padded"])
    return found


def part_of(name: str, tensor: torch.Tensor, part: int, count: int, padded: int) -> torch.Tensor:
    """Tensor-parallel part of a tensor, as Megatron-Core cuts it."""
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        if len(tensor) != padded:
            tensor = torch.cat([tensor[:VOCABULARY], tensor.new_zeros(padded - VOCABULARY, *tensor.shape[1:])])
    elif "norm" in name or "router" in name or "local_experts" in name:
        return tensor
    if name.endswith("linear_fc1.weight"):
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(count)[part], up.chunk(count)[part]])
    return tensor.chunk(count, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)[part]


def into_megatron(url: str, job: Mapping[str, int], shapes: Shapes, options: dict[str, Any]) -> Full:
    """Plain tensors on a rank of a Megatron-style job; what is given back is local."""
    empty = {n: torch.empty(s, dtype=d) for n, (s, d) in shapes.items()}
    parts = parts_of(dist.get_rank(), dist.get_world_size(), job, empty)
    model = module_of({n: (tuple(t.shape), t.dtype) for n, t in parts.items()})
    optimizer = load(url, model, ASIDE, layout_of(job), **options)
    return held(model, optimizer, whole=False)
