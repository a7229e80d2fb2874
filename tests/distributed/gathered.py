"""The oracle: the whole state of a model and its optimizer on every rank, gathered by torch alone, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from tests.distributed.models import Part, Trained

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

RANKS_APART = 1 << 32
"""More than a tensor of a test has elements."""

Full = dict[str, torch.Tensor]


def local_state(which: Trained) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Everything that has to be saved, as this rank has it: the name in the model of the parameter or buffer, the pattern of the stored
    name around it, the tensor, and the parameter that it belongs to. Tied parameters come under each of their names; optimizer state
    under the first."""
    model = which.model.module if isinstance(which.model, nn.parallel.DistributedDataParallel) else which.model
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, "model.{}", tensor.detach(), tensor
    names = {p: n for n, p in model.named_parameters()}
    for param, values in which.optimizer.state.items():
        for key, value in values.items():
            yield names[param], f"optimizer.state.model.{{}}.{key}", value, param


def full_state(which: Trained) -> Full:
    """All tensors whole, by the names that ckpt documents, on every rank. Collective."""
    found: Full = {}
    plain: list[tuple[str, Part, torch.Tensor]] = []
    for name, pattern, tensor, owner in local_state(which):
        if which.parts:
            part = which.parts[name]
            dim = part.dim if tensor.shape == owner.shape else None
            plain.append((pattern.format(part.name), Part(name=part.name, dim=dim, index=part.index), tensor.detach()))
        elif isinstance(tensor, DTensor):
            found[pattern.format(name)] = tensor.full_tensor().clone()
        else:
            found[pattern.format(name)] = tensor.clone()
    return _assemble(plain) if which.parts else found


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the elements of a rank's part of a DTensor are in the whole one, flattened; in the part's shape."""

    elements: torch.Tensor
    placements: tuple[Placement, ...]


def places(which: Trained) -> dict[str, Place]:
    """The place of each DTensor of the state: torch gathers numbers that say which element of which rank each is. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {}
    for name, pattern, tensor, _ in local_state(which):
        if isinstance(tensor, DTensor):
            part = tensor.to_local()
            own = rank * RANKS_APART + torch.arange(part.numel()).reshape(part.shape)
            numbers = DTensor.from_local(
                own, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            whole = numbers.full_tensor().flatten()
            mine = (whole // RANKS_APART == rank).nonzero().flatten()
            elements = mine[whole[mine].argsort()].reshape(part.shape)
            found[pattern.format(name)] = Place(elements=elements, placements=tensor.placements)
    return found


def differences_here(which: Trained, at: Mapping[str, Place], wanted: Full) -> list[str]:
    """What is wrong with this rank's part of a state, if ``wanted`` is all of it; for layouts without plain parts."""
    problems, names = [], set()
    for name, pattern, tensor, _ in local_state(which):
        full_name = pattern.format(name)
        names.add(full_name)
        whole = wanted.get(full_name)
        if whole is None:
            problems.append(f"{full_name}: should not be there")
        elif not isinstance(tensor, DTensor):
            problems += differences({full_name: tensor.detach()}, {full_name: whole})
        elif (tensor.placements, tensor.shape) != (at[full_name].placements, whole.shape):
            problems.append(f"{full_name}: {tuple(tensor.shape)} in {tensor.placements}, whole {tuple(whole.shape)}")
        else:
            problems += differences({full_name: tensor.detach().to_local()}, {full_name: whole.flatten()[at[full_name].elements]})
    return problems + [f"{name}: lacking" for name in sorted(wanted.keys() - names)]


def _assemble(mine: list[tuple[str, Part, torch.Tensor]]) -> Full:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(name, part, tensor.numpy()) for name, part, tensor in mine])  # tensors take torch long to pickle
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    dims: dict[str, int | None] = {}
    for name, part, tensor in ((name, part, torch.from_numpy(array)) for rows in everyone for name, part, array in rows):
        dims[name] = part.dim
        index = 0 if part.dim is None else part.index
        first = by_name.setdefault(name, {}).setdefault(index, tensor)
        if not same(first, tensor):
            raise AssertionError(f"the ranks have different values of {name}, part {index}")
    found = {}
    for name, parts in by_name.items():
        dim = dims[name]
        found[name] = parts[0] if dim is None else torch.cat([parts[i] for i in sorted(parts)], dim)
    return found


def options(which: Trained) -> dict[str, dict[str, Any]]:
    """The options of the parameter group that each parameter of this rank is in, by the name that all layouts use."""
    model = which.model.module if isinstance(which.model, nn.parallel.DistributedDataParallel) else which.model
    names = {p: n for n, p in model.named_parameters()}
    found = {}
    for group in which.optimizer.param_groups:
        for param in group["params"]:
            name = names[param]
            found[which.parts[name].name if which.parts else name] = {k: v for k, v in group.items() if k != "params"}
    return found


# -------------------------------------------------------------------------------------------------------------- compare


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: NaN equals NaN, 0.0 does not equal −0.0."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    raw = RAW[a.element_size()]
    return torch.equal(a.contiguous().view(raw), b.contiguous().view(raw))


def differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with a gathered state; empty if it is the wanted one."""
    problems = [f"{name}: lacking" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name}: should not be there" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if not same(found[name], wanted[name]):
            problems.append(f"{name}: {tuple(found[name].shape)} {_first(found[name])} is not {_first(wanted[name])}")
    return problems


def _first(tensor: torch.Tensor) -> list[Any]:
    return tensor.flatten()[:6].tolist()


def spoil(which: Trained) -> None:
    """Overwrite all that a load has to restore with values that no training gives."""
    with torch.no_grad():
        for _, _, tensor, _ in local_state(which):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(float("nan") if local.is_floating_point() else -77)
    for group in which.optimizer.param_groups:
        group.update(lr=-1.0, weight_decay=-1.0, betas=(-1.0, -1.0))


def local_bytes(which: Trained) -> int:
    """Bytes of this rank's distinct memory."""
    seen: dict[int, int] = {}
    for _, _, tensor, _ in local_state(which):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            seen[local.data_ptr()] = local.numel() * local.element_size()
    return sum(seen.values())
