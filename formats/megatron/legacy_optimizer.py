"""Optimizers of Megatron-LM's format ``torch``: the flat buffers of ``distrib_optim.pt``, or states parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.errors import FormatError
from ckpt.formats.pickles.values import StoredView

from .buffers import Segment
from .flat import FlatStates, coalesced_layout, members_of
from .names import is_decayed
from .params import LocalParam
from .pieces import InArchive
from .stored_buffers import HINT, coalesced


def add_distributed(states: FlatStates, number: int, chunks: Sequence[Sequence[LocalParam]], arguments: Mapping[str, Any]) -> None:
    """Add what the ``distrib_optim.pt`` with this archive number has, of the trained parameters of each chunk.

    With experts the file has a list: the buffers of all other parameters, then those of experts, or None for those that another file has.

    Raises:
        FormatError: the buffers do not fit the parameters, or are in a form that is not known.
    """
    archive = states.table.archives[number]
    meaning, where = archive.values.meaning, archive.where
    root = meaning(archive.load())
    parts = list(root) if isinstance(root, (list, tuple)) else [root]
    if len(parts) > 2:
        raise FormatError(f"{len(parts)} optimizers in a chain", where=where, hint=HINT)
    for place, part in enumerate(parts):
        if meaning(part) is None:
            continue
        buffers = coalesced(meaning, number, part, where)
        wanted = [[p for p in chunk if len(parts) == 1 or p.expert == bool(place)] for chunk in chunks]
        expected = [(dtype, [p for p in chunk if p.dtype == dtype]) for chunk in wanted for dtype in _dtypes(chunk)]
        if sorted(buffers) != list(range(len(expected))):
            raise FormatError(f"{len(buffers)} buffers of {len(expected)}", where=where, hint=HINT)
        for index, (dtype, params) in enumerate(expected):
            buffer = buffers[index]
            layout = coalesced_layout(members_of(params), buffer.used, arguments) if buffer.dtype == dtype else None
            if layout is None:
                what = f"buffer {index}, {buffer.dtype}, has {buffer.used:,} elements, which are not those of its {len(params)} parameters"
                raise FormatError(what, where=where, hint="frozen parameters, or buckets of an unknown size: save it as torch_dist")
            for param, slot in zip(params, layout.slots, strict=True):
                states.add(param, layout.compact(slot), buffer.segments)


def _dtypes(params: Sequence[LocalParam]) -> list[str]:
    return list(dict.fromkeys(p.dtype for p in params))


def add_plain(states: FlatStates, number: int, params: Sequence[LocalParam], value: Any) -> None:
    """Add the states of an optimizer that is not distributed: torch's own, by number, and the parameters in full precision by group.

    Raises:
        FormatError: the states do not fit the parameters.
    """
    archive = states.table.archives[number]
    meaning, where = archive.values.meaning, archive.where
    root = meaning(value)
    optimizers = list(root) if isinstance(root, (list, tuple)) else [root]
    for optimizer in optimizers:
        said = meaning(optimizer)
        inner = meaning(said.get("optimizer", said)) if isinstance(said, dict) else None
        state = meaning(inner.get("state")) if isinstance(inner, dict) else None
        if not state or not isinstance(inner, dict):
            continue  # the states of a distributed optimizer are in a file of their own, which another rank may have
        masters = [meaning(group) for group in meaning(said.get("fp32_from_fp16_params", []))]
        for place, group in enumerate(map(meaning, meaning(inner["param_groups"]))):
            numbers = meaning(group["params"])
            own = _members(group, params, apart=len(optimizers) > 1)
            if len(own) != len(numbers):
                raise FormatError(f"group {place} of the optimizer has {len(numbers)} parameters, not {len(own)}", where=where, hint=HINT)
            for index, param in enumerate(own):
                found = {k: meaning(v) for k, v in (meaning(state.get(numbers[index])) or {}).items()}
                if place < len(masters) and index < len(masters[place]):
                    found["param"] = meaning(masters[place][index])
                _add_states(states, number, param, found, where)


def _members(group: Mapping[str, Any], params: Sequence[LocalParam], *, apart: bool) -> list[LocalParam]:
    """The parameters of a group, in the model's order: by weight decay, and whether they are of experts."""
    decay, experts = group.get("wd_mult", 1.0) > 0, bool(group.get("is_expert_parallel"))
    return [
        p
        for p in params
        if is_decayed(p.blocks[0].name, len(p.blocks[0].shape)) == decay and (p.expert == experts or not (apart or experts))
    ]


def _add_states(states: FlatStates, number: int, param: LocalParam, found: Mapping[str, Any], where: str) -> None:
    segments = {}
    for key, view in found.items():
        if not isinstance(view, StoredView) or not view.shape:
            continue  # a step
        source = InArchive(number, view)
        if source.numel != param.numel:
            raise FormatError(f"{key} of {param.blocks[0].name} has {source.numel} elements, not {param.numel}", where=where, hint=HINT)
        segments[key] = [Segment(0, source.numel, source, 0)]
    states.add(param, 0, segments)
