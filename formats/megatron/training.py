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
CONTENT = "content_metadata"
MARK = "ckpt_version"
"""Who wrote an optimizer's state in place of Megatron-Core, some versions of which wrote it wrongly."""
KEPT = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler", CONTENT, MARK)
"""Values of a checkpoint that are kept as they are."""
LEFT_OUT = "random number generators and the extra state of Transformer Engine are left out"

Group = Mapping[str, Any]


def arguments_of(value: Any) -> dict[str, Any]:
    """The plain values in an ``argparse.Namespace``, and lists of them."""
    said = value.attributes() if isinstance(value, Made) else value if isinstance(value, dict) else {}
    return {k: v for k, v in said.items() if isinstance(k, str) and (_is_plain(v) or (isinstance(v, list) and all(map(_is_plain, v))))}


def _is_plain(value: object) -> bool:
    return isinstance(value, (type(None), bool, int, float, str))


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

    Megatron's groups do not name their parameters. They are those that the group's weight decay, and whether it is of experts, say; if that
    leaves a doubt, the groups are kept as plain values.
    """
    maker = NodeMaker(archive.values, _no_tensor, pickle_bytes=archive.pickle_bytes)
    options = [maker.root({k: v for k, v in g.items() if k not in ("params", "step")}, "optimizer") for g in groups]
    owned = sorted({name[len(STATE) :].rpartition(".")[0] for name in entries if name.startswith(STATE)})
    shared = _shared_out(groups, owned, entries)
    steps = [g.get("step") for g in groups]
    if shared is None and len(set(map(str, steps))) == 1:
        steps, of_step = steps[:1], [owned]
    else:
        of_step = shared or []
    state: dict[str, Any] = {"": {"$tensors": "optimizer.state"}}
    for step, names in zip(steps, of_step, strict=False):
        if isinstance(step, (int, float)) and not isinstance(step, bool):
            state |= {f"{MODEL}{name}": {"step": _number(step)} for name in names}
    if shared is None:
        told = ["the optimizer's groups do not say which parameters are theirs"] if groups else []
        return {"state": state, "groups": options}, told
    named = [{"options": o, "params": [f"{MODEL}{n}" for n in names]} for o, names in zip(options, shared, strict=True)]
    return {"state": state, "param_groups": {"$param_groups": named}}, []


def _shared_out(groups: Sequence[Group], owned: Sequence[str], entries: Mapping[str, TensorEntry]) -> list[list[str]] | None:
    """The parameters of each group; None if groups are alike, are told apart by something else, or do not have all parameters."""
    asked = [_asked(g) for g in groups]
    if not groups or None in asked or len(set(asked)) != len(asked) or any(g.get("is_decoupled_lr") for g in groups):
        return None
    split = any(bool(g.get("is_expert_parallel")) for g in groups)
    shared: list[list[str]] = [[] for _ in groups]
    for name in owned:
        weight = entries.get(f"{MODEL}{name}")
        kind = (is_decayed(name, 2 if weight is None else len(weight.shape)), split and is_expert(name))
        if kind not in asked:
            return None
        shared[asked.index(kind)].append(name)
    return shared


def _asked(group: Group) -> tuple[bool, bool] | None:
    decay = group.get("wd_mult")
    return (decay > 0, bool(group.get("is_expert_parallel"))) if isinstance(decay, (int, float)) else None


def _number(step: float) -> tree.Node:
    """A step as torch's optimizers keep it: a number in a tensor."""
    return {"$inline": ["float32", [], base64.b64encode(struct.pack("<f", step)).decode()]}


def _no_tensor(found: object, path: str) -> tree.Node:
    return None
