"""What a Megatron checkpoint says besides tensors: the state of a training job, as ``ckpt.save`` would have kept it; and the catalog that
the readers of both formats share."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

from ckpt.catalog import TensorEntry
from ckpt.errors import FormatError
from ckpt.formats.external import ExternalCatalog, ExternalContents
from ckpt.formats.pickle_nodes import NodeMaker, Place, step_node
from ckpt.formats.stand_ins import Made, StoredPart, StoredView
from ckpt.formats.torch_archive import Archive
from ckpt.plan import tree

from .names import VOCABULARY, is_decayed, is_expert
from .pieces import InArchive, PieceTable, whole_piece

MODEL = "model."
STATE = "optimizer.state.model."
KEYS: Mapping[str, str] = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What Megatron calls the tensors of an optimizer's state, and what they are called here: ``master`` is the parameter in full precision."""
CONTENT = "content_metadata"
SCALER = "grad_scaler"
"""The key of a grad scaler's state, in Megatron's optimizers and in the state here."""
COMMON_STEP = "common_step"
"""Where an optimizer that is not distributed has one step for all of its parameters."""
MARK = "ckpt_version"
"""Who wrote an optimizer's state in place of Megatron-Core, some versions of which wrote it wrongly."""
KEPT = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler", CONTENT, MARK)
"""Values of a checkpoint that are kept as they are."""
ABOUT_STORAGE = (CONTENT, MARK, "args.no_save_rng", "args.no_save_optim")
"""Paths of values that say in which form a checkpoint is stored, and which parts of the job's state it has: not what these are."""
_ELSEWHERE = frozenset({"args", "optimizer", "rng_state", "rerun_state_machine"})
"""What becomes something else, or is left out."""
LEFT_OUT = "random number generators, the state of the rerun machine and the extra state of Transformer Engine are left out"

Group = Mapping[str, Any]


def arguments_of(value: Any) -> dict[str, Any]:
    """The plain values in an ``argparse.Namespace``, and lists of them."""
    fields = value.attributes() if isinstance(value, Made) else value if isinstance(value, dict) else {}
    return {k: v for k, v in fields.items() if isinstance(k, str) and (_is_plain(v) or (isinstance(v, list) and all(map(_is_plain, v))))}


def _is_plain(value: object) -> bool:
    return isinstance(value, (type(None), bool, int, float, str))


def state_node(
    table: PieceTable, archive: int, common: Mapping[Any, Any], scalers: Sequence[tuple[int, Any]] = (), stored: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The nodes of values that are kept, what of them is opaque, and what is left out. Tensors among those that Megatron has become tensors
    of the table. ``scalers`` are the states of grad scalers, and the archives that have them; ``stored`` the keys of what becomes tensors.
    """
    owner = table.archives[archive]
    maker = NodeMaker(owner.values, _placing(table, archive), pickle_bytes=owner.pickle_bytes)
    state = {key: maker.root(common[key], key) for key in KEPT if key in common}
    opaque = dict(maker.opaque)
    if "args" in common:
        state["args"] = maker.root(arguments_of(common["args"]), "args")
    notes: list[str] = []
    for key, value in common.items():
        if key in _ELSEWHERE or key in state or key in stored:
            continue
        own = NodeMaker(owner.values, _no_tensor_here, pickle_bytes=owner.pickle_bytes)
        try:
            state[key] = own.root(value, str(key))
            opaque |= own.opaque
        except FormatError as err:  # what one job kept besides is no reason not to read the rest
            notes.append(f"{key!r} is left out: {err.message}")
    made: list[tree.Node] = []
    for number, scaler in scalers:
        kept_in = table.archives[number]
        own = NodeMaker(kept_in.values, _placing(table, number), pickle_bytes=kept_in.pickle_bytes)
        made.append(own.root(scaler, SCALER if len(scalers) == 1 else f"{SCALER}.{len(made)}"))
    if made:
        state[SCALER] = made[0] if len(made) == 1 else made
    return state, opaque, notes


def _placing(table: PieceTable, archive: int) -> Place:
    """Puts the tensors of a value into the table, under the path that leads there."""

    def place(value: StoredView | StoredPart, path: str) -> tree.Node:
        if isinstance(value, StoredPart):
            raise FormatError(f"{path} is a sharded tensor", where=table.archives[archive].where, hint="load it with Megatron-LM")
        table.add(path, value.dtype, value.shape, [whole_piece(InArchive(archive, value), value.shape)])
        return {"$tensor": path}

    return place


def _no_tensor_here(value: object, path: str) -> tree.Node:
    raise FormatError(f"{path} is a tensor that is not Megatron's own")


def groups_in(table: PieceTable, number: int, value: Any) -> list[Group]:
    """The parameter groups of all optimizers in a value of the archive of this number, in order. Tensors of one number among their options
    are that number. One step for all parameters of an optimizer, which Megatron keeps beside its groups, is that of each of its groups."""
    meaning = table.archives[number].values.meaning
    content = meaning(value)
    if isinstance(content, (list, tuple)):
        return [group for below in content for group in groups_in(table, number, below)]
    own: list[Group] = []
    if isinstance(content, dict):
        state = meaning(content.get("state"))
        common = {"step": state[COMMON_STEP]} if isinstance(state, dict) and COMMON_STEP in state else {}
        for key, below in content.items():
            if key == "param_groups":
                groups = [g for g in map(meaning, meaning(below)) if isinstance(g, dict)]
                own += [{k: _plain(table, number, v) for k, v in (common | g).items()} for g in groups]
            else:
                own += groups_in(table, number, below)
    return own


def _plain(table: PieceTable, number: int, value: Any) -> Any:
    meant = table.archives[number].values.meaning(value)
    if isinstance(meant, StoredView) and math.prod(meant.shape) == 1:
        return table.read_scalars([InArchive(number, meant)])[0]
    return value


def optimizer_node(
    archive: Archive,
    groups: Sequence[Group],
    entries: Mapping[str, TensorEntry],
    values: Mapping[str, Mapping[str, tree.Node]] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The node of an optimizer, and what could not be told. ``values`` are states that are no tensors, by parameter.

    Megatron's groups do not name their parameters. They are those that the group's weight decay, and whether it is of experts, say; if that
    leaves a doubt, the groups are kept as plain values.
    """
    maker = NodeMaker(archive.values, no_tensor, pickle_bytes=archive.pickle_bytes)
    options = [maker.root({k: v for k, v in g.items() if k not in ("params", "step")}, "optimizer") for g in groups]
    owned = sorted({name[len(STATE) :].rpartition(".")[0] for name in entries if name.startswith(STATE)})
    shared = _shared_out(groups, owned, entries)
    steps = [g.get("step") for g in groups]
    if shared is None and len(set(map(str, steps))) == 1:
        steps, of_step = steps[:1], [owned]
    else:
        of_step = shared or []
    by_parameter: dict[str, dict[str, Any]] = {}
    for step, names in zip(steps, of_step, strict=False):
        if _is_number(step):
            by_parameter |= {name: {"step": step} for name in names}
    for name, own in (values or {}).items():
        by_parameter[name] = {**by_parameter.get(name, {}), **own}
    state: dict[str, Any] = {"": {"$tensors": "optimizer.state"}}
    state |= {
        f"{MODEL}{n}": {k: step_node(v) if k == "step" and _is_number(v) else v for k, v in own.items()} for n, own in by_parameter.items()
    }
    notes = _without_steps(owned, by_parameter, entries)
    if shared is None:
        notes += ["the optimizer's groups do not say which parameters are theirs"] if groups else []
        return {"state": state, "groups": options}, notes
    named = [{"options": o, "params": [f"{MODEL}{n}" for n in names]} for o, names in zip(options, shared, strict=True)]
    return {"state": state, "param_groups": {"$param_groups": named}}, notes


def _without_steps(owned: Sequence[str], by_parameter: Mapping[str, Mapping[str, Any]], entries: Collection[str]) -> list[str]:
    lacking = [name for name in owned if f"{STATE}{name}.exp_avg_sq" in entries and "step" not in by_parameter.get(name, {})]
    if not lacking:
        return []
    return [f"no step is stored for {len(lacking)} parameters of the optimizer, such as {lacking[0]}: torch's Adam asks for one"]


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


def _is_number(step: object) -> TypeGuard[float]:
    return isinstance(step, (int, float)) and not isinstance(step, bool)


def no_tensor(value: object, path: str) -> tree.Node:
    """Refuses a tensor where only values are read."""
    raise FormatError(f"{path} has a tensor of several numbers, which is not read there", hint="load it with Megatron-LM")


# What the readers of both formats of Megatron share: the catalog, the names of directories of ranks, and padding of the vocabulary.

COMMON = "common.pt"
"""What is no tensor, in the format ``torch_dist``; written first."""
RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?/")


class MegatronCatalog(ExternalCatalog):
    """A Megatron checkpoint. ``arguments`` are those of the job that wrote it, as far as they are plain values.

    ``notes`` say what was left out; ``suspect`` why some of it may be wrong, None if nothing is known.
    """

    def __init__(
        self,
        *,
        table: PieceTable,
        format: str,
        state: Any,
        world_size: int,
        arguments: Mapping[str, Any],
        notes: Sequence[str] = (),
        suspect: str | None = None,
        opaque: Mapping[str, str] | None = None,
    ) -> None:
        contents = ExternalContents(
            tensors=table.entries.values(), files=table.files, world_size=world_size, state=state, opaque=opaque or {}, notes=notes
        )
        super().__init__(contents, backend=table.backend, format=format, locate=table.locate, replicas=table.replicas)
        self.arguments = arguments
        self.suspect = suspect
        self.about_storage = ABOUT_STORAGE
        self.table = table


def logical_shape(name: str, shape: tuple[int, ...], arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape without the rows that pad the vocabulary; None if there are none, or the arguments do not tell."""
    rows = arguments.get("vocab_size")
    return (rows, *shape[1:]) if name in VOCABULARY and isinstance(rows, int) and 0 < rows < shape[0] else None
