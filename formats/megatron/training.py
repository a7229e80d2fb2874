"""What a Megatron checkpoint says besides tensors: the state of a training job, as ``ckpt.save`` would have kept it."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt import tree
from ckpt.catalog import TensorEntry
from ckpt.errors import FormatError
from ckpt.formats.pickles.nodes import NodeMaker
from ckpt.formats.pickles.stand_ins import Made
from ckpt.formats.pickles.values import StoredPart, StoredView
from ckpt.formats.torchzip.archive import Archive

from .names import is_decayed, is_expert
from .pieces import InArchive, PieceTable, whole_piece

MODEL = "model."
STATE = "optimizer.state.model."
KEYS: Mapping[str, str] = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What Megatron calls the tensors of an optimizer's state, and what they are called here: ``master`` is the parameter in full precision."""
KEPT = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler", "content_metadata")
"""Values of a checkpoint that are kept as they are."""
LEFT_OUT = "random number generators and the extra state of Transformer Engine are left out"

Group = Mapping[str, Any]


def arguments_of(value: Any) -> dict[str, Any]:
    """The plain values in an ``argparse.Namespace``."""
    said = value.attributes() if isinstance(value, Made) else value if isinstance(value, dict) else {}
    return {k: v for k, v in said.items() if isinstance(k, str) and isinstance(v, (type(None), bool, int, float, str))}


def state_node(table: PieceTable, archive: int, common: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The nodes of values that are kept, and what of them is opaque. Tensors among them become tensors of the table."""
    owner = table.archives[archive]

    def place(found: StoredView | StoredPart, path: str) -> tree.Node:
        if isinstance(found, StoredPart):
            raise FormatError(f"{path} is a sharded tensor", where=owner.where, hint="load it with Megatron-LM")
        table.add(path, found.dtype, found.shape, [whole_piece(InArchive(archive, found), found.shape)])
        return {"$tensor": path}

    maker = NodeMaker(owner.values, place, pickle_bytes=owner.pickle_bytes)
    state = {key: maker.root(common[key], key) for key in KEPT if key in common}
    if "args" in common:
        state["args"] = maker.root(arguments_of(common["args"]), "args")
    return state, maker.opaque


def groups_in(archive: Archive, value: Any) -> list[Group]:
    """The parameter groups of all optimizers in a value, in order."""
    return list(_groups(archive, value))


def _groups(archive: Archive, value: Any) -> Iterator[Group]:
    found = archive.values.meaning(value)
    if isinstance(found, dict):
        for key, below in found.items():
            if key == "param_groups":
                yield from (g for g in map(archive.values.meaning, archive.values.meaning(below)) if isinstance(g, dict))
            else:
                yield from _groups(archive, below)
    elif isinstance(found, (list, tuple)):
        for below in found:
            yield from _groups(archive, below)


def optimizer_node(archive: Archive, groups: Sequence[Group], entries: Mapping[str, TensorEntry]) -> tuple[dict[str, Any], list[str]]:
    """The node of an optimizer, and what could not be told.

    Megatron's groups do not name their parameters. They are those that the group's weight decay, and whether it is of experts, say; if two
    groups say the same, nobody can tell, and the groups are kept as plain values.
    """
    params = {name[len(MODEL) :]: len(e.shape) for name, e in entries.items() if name.startswith(MODEL)}
    owned = {name[len(STATE) :].rpartition(".")[0] for name in entries if name.startswith(STATE)}
    split = any(bool(g.get("is_expert_parallel")) for g in groups)
    asked = [_asked(g) for g in groups]
    maker = NodeMaker(archive.values, _no_tensor, pickle_bytes=archive.pickle_bytes)
    options = [maker.root({k: v for k, v in g.items() if k not in ("params", "step")}, "optimizer") for g in groups]
    told = [kind for kind in asked if kind is not None]
    if len(set(told)) != len(asked) or any(g.get("is_decoupled_lr") for g in groups):
        state: dict[str, Any] = {"": {"$tensors": "optimizer.state"}}
        return {"state": state, "groups": options}, ["the optimizer's groups do not say which parameters are theirs"] if groups else []
    by_kind: dict[Any, list[str]] = {kind: [] for kind in told}
    for name in sorted(owned):
        kind = (is_decayed(name, params.get(name, 2)), split and is_expert(name))
        by_kind.setdefault(kind, []).append(name)
    if any(names for kind, names in by_kind.items() if kind not in told):
        return {"state": {"": {"$tensors": "optimizer.state"}}, "groups": options}, ["the optimizer's groups do not fit its parameters"]
    state = {"": {"$tensors": "optimizer.state"}}
    for group, kind in zip(groups, told, strict=True):
        step = group.get("step")
        if isinstance(step, (int, float)) and not isinstance(step, bool):
            state |= {f"model.{name}": {"step": _number(step)} for name in by_kind[kind]}
    named = [{"options": o, "params": [f"model.{n}" for n in by_kind[k]]} for o, k in zip(options, told, strict=True)]
    return {"state": state, "param_groups": {"$param_groups": named}}, []


def _asked(group: Group) -> tuple[bool, bool] | None:
    decay = group.get("wd_mult")
    return (decay > 0, bool(group.get("is_expert_parallel"))) if isinstance(decay, (int, float)) else None


def _number(step: float) -> tree.Node:
    """A step as torch's optimizers keep it: a number in a tensor."""
    return {"$inline": ["float32", [], base64.b64encode(struct.pack("<f", step)).decode()]}


def _no_tensor(found: object, path: str) -> tree.Node:
    return None
