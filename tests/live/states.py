"""States of the layouts: modules with an optimizer, filled with parts, and read again without ckpt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckpt
from tests.api.checked import described
from tests.live.layouts import SMALL, Job, Parts, Sizes, Torch
from tests.matrix.jobs import module_of

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = 7
WORLD = 8
WRONG = 77.0
"""What a target has everywhere before it is filled."""


@dataclass(kw_only=True)
class Made:
    """A state on one rank. ``layout`` is None where tensors know their place."""

    state: dict[str, Any]
    layout: ckpt.Layout | None

    @property
    def model(self) -> nn.Module:
        return self.state["model"]  # type: ignore[no-any-return]

    def tensors(self) -> Parts:
        """Weights, moments and steps as this rank has them."""
        parts = {name: local(p) for name, p in self.model.named_parameters()}
        optimizer = self.state.get("optimizer")
        for name, p in self.model.named_parameters() if optimizer is not None else ():
            parts |= {f"{name}.{key}": local(value) for key, value in optimizer.state[p].items()}
        return parts

    def rates(self) -> dict[str, float]:
        """Learning rate of each parameter."""
        names = {p: name for name, p in self.model.named_parameters()}
        return {names[p]: group["lr"] for group in self.state["optimizer"].param_groups for p in group["params"]}


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Meshes:
    """The device meshes of torch's layouts on the first and on the last ranks. Torch makes a mesh on all ranks together, so all are made
    at the beginning."""

    def __init__(self, layouts: Mapping[str, Job | Torch]) -> None:
        self.layouts = layouts
        self._made: dict[tuple[str, int], DeviceMesh] = {}
        for name, layout in layouts.items():
            if isinstance(layout, Torch) and layout.mesh:
                for first in (0, WORLD - layout.world):
                    ranks = torch.arange(first, first + layout.world).view(*layout.mesh.values())
                    self._made[name, first] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(layout.mesh))

    def build(self, name: str, first: int, values: Parts | None = None, *, optimizer: str = "stepped") -> Made:
        """The state of this rank, one of those from ``first`` on. ``values``: its parts; None: wrong ones. ``optimizer``: one that has
        stepped, a new one without state, or none."""
        layout, rank = self.layouts[name], dist.get_rank() - first
        parts = layout.parts(rank, nothing(layout.sizes)) if values is None else values
        if isinstance(layout, Torch) and layout.mesh:
            model = _distributed(layout, self._made[name, first])
        else:
            model = module_of({n: (tuple(t.shape), t.dtype) for n, t in parts.items() if not n.endswith(MOMENTS)})
        for n, p in model.named_parameters():
            local(p).copy_(parts[n])
        state: dict[str, Any] = {"model": model}
        if optimizer != "none":
            lr = 9.0 if values is None else 0.5
            norms = [p for n, p in model.named_parameters() if "norm" in n]
            rest = [p for n, p in model.named_parameters() if "norm" not in n]
            groups = [{"params": rest, "lr": lr}, {"params": norms, "lr": lr / 2}]
            state["optimizer"] = torch.optim.AdamW([group for group in groups if group["params"]])
            for n, p in model.named_parameters() if optimizer == "stepped" else ():
                values_of = {key: _like(p, parts[f"{n}.{key}"]) for key in MOMENTS}
                state["optimizer"].state[p] = {"step": torch.tensor(float(STEP if values else WRONG)), **values_of}
        return Made(state=state, layout=layout.layout(first) if isinstance(layout, Job) else None)


def _like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part.clone()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part.clone(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _distributed(layout: Torch, mesh: DeviceMesh) -> nn.Module:
    model = module_of(layout.sizes.shapes())
    if layout.tp > 1:
        for name, param in list(model.named_parameters()):
            dim = layout.dim(name)
            placement: Placement = Replicate() if dim is None else Shard(dim)
            owner, _, last = name.rpartition(".")
            cut = distribute_tensor(param.detach(), mesh["tp"], [placement], src_data_rank=None)
            model.get_submodule(owner).register_parameter(last, nn.Parameter(cut))
    if layout.dp > 1:
        fully_shard(model, mesh=mesh["copies", "dp"] if layout.copies > 1 else mesh["dp"])
    return model


def nothing(sizes: Sizes = SMALL) -> Parts:
    """Full tensors of a wrong value, moments too."""
    full: Parts = {}
    for name, (shape, dtype) in sizes.shapes().items():
        full[name] = torch.full(shape, WRONG, dtype=dtype)
        full |= {f"{name}.{key}": torch.full(shape, WRONG) for key in MOMENTS}
    return full


def differing(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the expected ones in dtype, shape and every byte, and what is wrong with them."""
    problems = [f"{name}: lacking" for name in expected.keys() - tensors.keys()]
    problems += [f"{name}: too much" for name in tensors.keys() - expected.keys()]
    for name in tensors.keys() & expected.keys():
        (dtype, shape, data), (right, size, bits) = described(tensors[name]), described(expected[name])
        if (dtype, shape, data) != (right, size, bits):
            problems.append(f"{name}: {dtype}{list(shape)} {tensors[name].flatten()[:4].tolist()}, not {right}{list(size)}")
    return sorted(problems)
