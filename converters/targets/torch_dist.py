"""Conversion into Megatron-Core's format ``torch_dist``, which loads with any parallelism: weights, and a distributed optimizer's state.

Tensors come under Megatron's names (``ckpt.formats.megatron.names``). (Sources: Megatron-LM core/dist_checkpointing,
core/optimizer/distrib_optimizer.py and training/checkpointing.py, versions 0.14 to 0.17.)
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ckpt.catalog import Catalog
from ckpt.converters.selection import OutputSet, OutputTensor, SelectOptions, choose
from ckpt.converters.target import OutputOptions, OutputPlan, Target
from ckpt.errors import UsageError
from ckpt.formats.megatron.catalog import METADATA_JSON, TRACKER
from ckpt.formats.megatron.names import EMBEDDING, LAYER, OUTPUT, expert_of, gated_layers, tensor_parallel_axis
from ckpt.formats.megatron.torch_dist import FORMAT_NAME, RESHARDABLE
from ckpt.formats.megatron.training import COMMON, CONTENT, KEPT, MARK
from ckpt.formats.native.writer import publish
from ckpt.io_backends.protocol import Backend
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.settings import __version__
from ckpt.state.targets import inline_only
from ckpt.state.tensors import torch_dtype

from .dcp import METADATA, PickledItem, Stored, TensorItem, boxes_of, data_files, described, index_of, metadata, saved
from .megatron_optimizer import HEAD, RELEASE, VERSION, Group, Optimizer, optimizer_of

# Keys of tensors in Megatron-Core's format ``torch_dist``, from the names of parameters: what is read, the other way round. Pure.
#
# Two forms are known. *Stacked*: the layers are places along the first axis of one tensor, as Megatron-Core writes a decoder whose layers
# are all alike. *Listed*: each layer has keys of its own. In both, the experts of a layer are places along an axis. (Sources: Megatron-LM
# core/transformer/{transformer_block,transformer_layer}.py, core/transformer/moe/experts.py and core/models/gpt/gpt_layer_specs.py of
# version 0.16.)

_LOCAL_NORM = re.compile(r"(.*\.layers\.\d+\.)pre_mlp_layernorm\.")


class StackedKey(NamedTuple):
    """The key of the tensor that a parameter is part of, and where along the leading axes: layer, expert."""

    key: str
    at: tuple[int, ...]


def place_of(name: str, *, stacked: bool) -> StackedKey:
    """Where a parameter is stored."""
    match = LAYER.fullmatch(name)
    if match is None:
        return StackedKey(name, ())
    before, layer, inner = match[1], match[2], match[3]
    expert = expert_of(inner)
    if expert is not None:
        inner = f"mlp.experts.experts.{expert.rest}"
    experts = () if expert is None else (expert.number,)
    return StackedKey(before + inner, (int(layer), *experts)) if stacked else StackedKey(f"{before}{layer}.{inner}", experts)


def stored_names(names: Iterable[str], *, local: bool) -> dict[str, str]:
    """What Megatron-Core calls each parameter when it saves. ``local`` is the specification of layers without Transformer Engine, which
    names the norm in front of a router after the linear layer that is not there."""
    return {name: _LOCAL_NORM.sub(r"\1mlp.linear_fc1.layer_norm_", name) if local else name for name in names}


def are_alike(tensors: Mapping[str, object]) -> bool:
    """Whether all layers have the same parameters, with the same values in ``tensors`` (their shapes and dtypes), and layers are numbered
    from 0 on without a gap: then Megatron-Core stacks them. Layers of a kind that is not known here are not alike."""
    layers: dict[str, dict[int, dict[str, object]]] = {}
    for name, shape in tensors.items():
        match = LAYER.fullmatch(name)
        if match is not None:
            if not is_known(name):
                return False
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = shape
    return all(sorted(own) == list(range(len(own))) and all(one == own[0] for one in own.values()) for own in layers.values())


def are_listed(arguments: Mapping[str, Any]) -> bool:
    """Whether a job with these arguments asks for layers one by one, whether or not they are alike."""
    for name in ("moe_layer_freq", "linear_attention_freq"):
        value = arguments.get(name)
        if isinstance(value, (list, tuple)) or (isinstance(value, int) and value > 1):
            return True
    return bool(arguments.get("heterogeneous_layers_config_path") or arguments.get("heterogeneous_layers_config_encoded_json"))


def is_known(name: str) -> bool:
    """Whether it is a parameter of which it is known how Megatron-Core stores it."""
    if ".local_experts." in name and LAYER.fullmatch(name) is None:
        return False
    try:
        tensor_parallel_axis(name)
    except KeyError:
        return False
    return True


def extra_states(names: Iterable[str], *, stacked: bool) -> list[str]:
    """Names of the objects that a model asks for besides its parameters: the extra state of each linear layer, norm and attention.

    Which of them have one depends on the version of Transformer Engine, and a load asks for all that its own modules have: so these are
    more than any one model needs.
    """
    modules: dict[str, None] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        own = module.rpartition(".")[2]
        if kind == "weight" and (own.startswith("linear_") or own.endswith("norm")):
            modules.setdefault(module)
            head, attention, _ = name.partition(".self_attention.")
            if attention:
                modules.setdefault(f"{head}.self_attention.core_attention")
    by_key: dict[str, list[tuple[int, ...]]] = {}
    for module in modules:
        place = place_of(f"{module}._extra_state", stacked=stacked)
        by_key.setdefault(place.key, []).append(place.at)
    return [_object(key, at, own) for key, own in by_key.items() for at in own]


def _object(key: str, at: tuple[int, ...], places: Sequence[tuple[int, ...]]) -> str:
    """The name of the object at one of these places (``ShardedObject.unique_key`` of core/dist_checkpointing/mapping.py)."""
    sizes = [max(numbers) + 1 for numbers in zip(*places, strict=True)]
    return f"{key}/shard_{'.'.join(map(str, at or (0,)))}_{'.'.join(map(str, sizes or (1,)))}"


_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_ITERATION = re.compile(rf"iter_\d{{7,}}|{RELEASE}")


class StackedTensor(NamedTuple):
    """A parameter, or an optimizer's tensor of one, which is stored at a place along the leading axes of a tensor. ``gated``: its rows are
    those of a gate and then as many of an up projection."""

    at: tuple[int, ...]
    wanted: OutputTensor
    gated: bool


@dataclass(frozen=True, kw_only=True)
class ChosenParameters(OutputSet):
    """``members`` are of the tensors that are stored, by their keys, and ``objects`` the names of what has to be there besides tensors.
    ``iteration`` is None if the source has none."""

    members: Mapping[str, Sequence[StackedTensor]]
    objects: tuple[str, ...]
    iteration: int | None


# -------------------------------------------------------------------------------------------------------------- choose


def choose_parameters(catalog: Catalog, choice: SelectOptions) -> ChosenParameters:
    """The parameters of a model with Megatron's names, in the form in which Megatron-Core would have saved them, and the state of its
    optimizer, if the checkpoint has all that Megatron needs of it."""
    chosen = choose(catalog, choice)
    head = "model" if choice.root is None else choice.root
    weights = _weights(chosen, f"{head}.")
    optimizer = optimizer_of(chosen.tensors, weights, chosen.state, root=head, fits=is_identified)
    fields = chosen.state if isinstance(chosen.state, dict) else {}
    arguments = fields["args"] if isinstance(fields.get("args"), dict) else {}
    stacked = not are_listed(arguments) and are_alike({n: (w.shape, w.dtype.name) for n, w in weights.items()})
    members = _members(weights, optimizer, stacked=stacked, local=arguments.get("transformer_impl") == "local")
    _check(members, catalog.url)
    return ChosenParameters(
        catalog=catalog,
        tensors={m.wanted.name: m.wanted for own in members.values() for m in own},
        state=common_node(chosen, optimizer, stacked=stacked),
        ranks={},
        members=members,
        objects=tuple(extra_states(weights, stacked=stacked)),
        iteration=fields["iteration"] if type(fields.get("iteration")) is int else None,
    )


def _weights(chosen: OutputSet, head: str) -> dict[str, OutputTensor]:
    """Parameters by Megatron's names."""
    # A tied output layer is no tensor of its own.
    own = {n: w for n, w in chosen.tensors.items() if w.rank is None}
    weights = {n[len(head) :]: w for n, w in own.items() if n.startswith(head)} or {n: w for n, w in own.items() if not n.startswith(HEAD)}
    if len({weights[n].alias or weights[n].name for n in (EMBEDDING, OUTPUT) if n in weights}) == 1 and EMBEDDING in weights:
        weights.pop(OUTPUT, None)
    if not any(n == EMBEDDING or LAYER.fullmatch(n) for n in weights):
        hint = "give a translation (--names llama --convention megatron), or the key that the model has (--root)"
        raise UsageError("the tensors do not have the names of Megatron-Core's parameters", where=chosen.catalog.url, hint=hint)
    odd = [] if chosen.catalog.format == FORMAT_NAME else sorted(n for n in weights if not is_known(n))
    if odd:
        raise UsageError(f"it is not known how Megatron-Core stores {odd[0]}", where=chosen.catalog.url, hint="leave it out: --exclude")
    return weights


def _members(
    weights: Mapping[str, OutputTensor], optimizer: Optimizer | None, *, stacked: bool, local: bool
) -> dict[str, list[StackedTensor]]:
    """Of each tensor that is stored what it is made of."""
    called, gated = stored_names(weights, local=local), gated_layers({n: w.shape for n, w in weights.items()})
    members: dict[str, list[StackedTensor]] = {}

    def add(prefix: str, name: str, wanted: OutputTensor) -> None:
        place = place_of(called[name], stacked=stacked)
        members.setdefault(prefix + place.key, []).append(StackedTensor(place.at, wanted, name in gated))

    for name, wanted in weights.items():
        add("", name, wanted)
    for key, own in optimizer.states.items() if optimizer is not None else ():
        for name, wanted in own.items():
            add(f"{HEAD}{key}.", name, wanted)
    return members


def _check(members: Mapping[str, Sequence[StackedTensor]], url: str) -> None:
    """Raise UsageError if parts of a tensor are missing, or do not fit each other."""
    for key, own in members.items():
        alike = len({(m.wanted.dtype.name, m.wanted.shape) for m in own}) == 1
        if len(own) != Box.whole(_leading(own)).numel or not alike:
            what = "some are missing" if alike else "they differ in shape or dtype"
            raise UsageError(f"the parts of {key} cannot be one tensor: {what}", where=url, hint="take all layers and all experts, or none")


def _leading(members: Sequence[StackedTensor]) -> tuple[int, ...]:
    """The leading axes of the tensor that these make up."""
    return tuple(max(numbers) + 1 for numbers in zip(*(m.at for m in members), strict=True))


# ---------------------------------------------------------------------------------------------------------------- plan


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """Data files, and what makes them a checkpoint: at last ``metadata.json``, and for a run the file that says which is the latest."""
    assert isinstance(chosen, ChosenParameters)
    folder = _folder(chosen, layout.url)
    rows: dict[str, Any] = {}
    stored: list[Stored] = []
    for key, members in chosen.members.items():
        boxes = [item for member in members for item in _items(key, member)]
        wanted = members[0].wanted
        rows[key] = described((*_leading(members), *wanted.shape), torch_dtype(wanted.dtype), [item.box for item in boxes])
        stored += boxes
    stored += [PickledItem(name, saved([None])) for name in chosen.objects[:1]]
    files, places = data_files(stored, layout.shard_size, folder=folder)
    for name in chosen.objects[1:]:
        places[index_of(name, None)] = places[index_of(chosen.objects[0], None)]  # all are None, so the bytes are the same
    rows |= {name: BytesStorageMetadata() for name in chosen.objects}
    common = tree.decode(chosen.state, inline_only)
    assert isinstance(common, dict)
    if "args" in common:
        common["args"] = Namespace(**common["args"])
    small = {COMMON: saved(common), METADATA: metadata(rows, places), METADATA_JSON: json.dumps(_CONFIG).encode()}

    def finish(backend: Backend) -> None:
        for name, data in small.items():
            publish(backend, folder + name, data)
        if folder:
            publish(backend, TRACKER, (RELEASE if chosen.iteration is None else str(chosen.iteration)).encode())

    last = (*(folder + name for name in small), *([TRACKER] if folder else []))
    return OutputPlan(files=files, digest="crc32", finish=finish, last=last)


def _folder(chosen: ChosenParameters, url: str) -> str:
    """Where the files lie below ``url``: at it, if that is what Megatron-LM calls the directory of an iteration, and else in such a one."""
    if _ITERATION.fullmatch(url.rstrip("/").rpartition("/")[2]):
        return ""
    return f"{RELEASE}/" if chosen.iteration is None else f"iter_{chosen.iteration:07d}/"


def _items(key: str, member: StackedTensor) -> list[TensorItem]:
    """The items of a parameter: gate and up apart, as loads ask for them."""
    at, wanted, gated = member
    rows, inner = wanted.shape[0] // 2 if gated else 0, wanted.shape[1:]
    parts = [Box((start, *(0,) * len(inner)), (rows, *inner)) for start in (0, rows)] if gated else [Box.whole(wanted.shape)]
    boxes = [box for part in parts for box in boxes_of(part, wanted.dtype.itemsize)]
    return [TensorItem(key, Box((*at, *box.offset), (*(1,) * len(at), *box.shape)), wanted, box) for box in boxes]


TARGET = Target(name="torch_dist", choose=choose_parameters, plan=plan)
"""For ``ckpt.converters.target``."""


# ---------------------------------------- the common part, besides tensors
# (Source: Megatron-LM training/checkpointing.py and core/optimizer/{optimizer,distrib_optimizer}.py, versions 0.14 to 0.17.)


def is_identified(group: Group) -> bool:
    """Whether a group has what Megatron knows its groups by when it loads them."""
    return bool({"wd_mult", "pre_wd_mult"} & group.keys()) and not tree.refers(dict(group))


def common_node(chosen: OutputSet, optimizer: Optimizer | None, *, stacked: bool) -> dict[str, Any]:
    """The node of ``common.pt``: what of the state Megatron kept, and what tells it in which form the tensors are.

    The arguments say that there are no random number generators, and whether there is an optimizer: Megatron then does not ask for them.
    """
    state = chosen.state if isinstance(chosen.state, dict) and tree.tag_of(chosen.state) is None else {}
    node = {key: state[key] for key in KEPT if key in state and key not in (CONTENT, MARK) and not tree.refers(state[key])}
    node.setdefault("checkpoint_version", VERSION)
    node.setdefault("iteration", 0)
    if isinstance(state.get("args"), dict):
        node["args"] = {**state["args"], "no_save_rng": True, "no_save_optim": optimizer is None}
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if not stacked:
        content["non_homogeneous_layers"] = True
    if optimizer is not None:
        content["distrib_optim_sharding_type"] = RESHARDABLE
        # One optimizer, or where experts have groups of their own, as with expert parallelism, a chain of two
        dense = [g for g in optimizer.groups if not g.get("is_expert_parallel")]
        experts = [g for g in optimizer.groups if g.get("is_expert_parallel")]
        kinds = [[dict(group) for group in own] for own in (dense, experts) if own]
        parts = [{"optimizer": {"param_groups": own}, "param_state_sharding_type": RESHARDABLE} for own in kinds]
        node["optimizer"] = parts[0] if len(parts) == 1 else tree.mapping_node(list(enumerate(parts)))
        if not _is_suspect(chosen, state):
            node[MARK] = __version__
    return {**node, CONTENT: content}


def _is_suspect(chosen: OutputSet, state: Mapping[str, Any]) -> bool:
    """Whether Megatron-Core may have written the optimizer's state wrongly, be this a copy of what it wrote."""
    content = state.get(CONTENT)
    form = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return chosen.catalog.suspect is not None or (form == RESHARDABLE and MARK not in state)
