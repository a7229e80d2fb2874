"""Optimizers that are not distributed, in Megatron-LM's format ``torch``: torch's own states by number, and the parameters in full
precision by group.

(Sources: ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer`` of Megatron-LM core/optimizer/optimizer.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.megatron.buffers import BufferSegment
from ckpt.formats.megatron.flat import FlatStates
from ckpt.formats.megatron.names import is_decayed
from ckpt.formats.megatron.params import LocalParam
from ckpt.formats.megatron.pieces import InArchive, PieceTable, whole_piece
from ckpt.formats.megatron.stored_buffers import HINT
from ckpt.formats.megatron.training import COMMON_STEP, STATE
from ckpt.formats.pickles.stored import StoredView

MASTERS = "fp32_from_fp16_params"
_FULL = "float32"


class Value(NamedTuple):
    """A state that is no tensor, and the number of the archive that has it."""

    archive: int
    value: Any


class PlainStates:
    """Collects the states in the files of ranks. Those with an element for each of the parameter go to ``states``; others, such as the
    step, belong to a parameter as a whole, and every rank that has a part of it must say the same."""

    def __init__(self, states: FlatStates) -> None:
        self.states = states
        self.values: dict[str, dict[str, Value]] = {}
        """By parameter and key, once ``finish`` was called."""
        self._scalars: dict[tuple[str, str], list[InArchive]] = {}

    @property
    def _table(self) -> PieceTable:
        return self.states.table

    def add(self, number: int, params: Sequence[LocalParam], value: Any) -> None:
        """Add what the archive of this number has as ``optimizer``, of parameters in the model's order."""
        archive = self._table.archives[number]
        meaning = archive.values.meaning
        root = meaning(value)
        optimizers = list(root) if isinstance(root, (list, tuple)) else [root]
        for optimizer in optimizers:
            content = meaning(optimizer)
            inner = meaning(content.get("optimizer", content)) if isinstance(content, dict) else None
            by_number = meaning(inner.get("state")) if isinstance(inner, dict) else None
            if not by_number or not isinstance(inner, dict):
                continue  # the states of a distributed optimizer are in a file of their own, which another rank may have
            groups = [meaning(group) for group in meaning(inner["param_groups"])]
            owned = {n for group in groups for n in meaning(group["params"])}
            odd = [n for n in by_number if n not in owned and n != COMMON_STEP]
            if odd:
                raise FormatError(f"the optimizer has a state {odd[0]!r} of no parameter", where=archive.where, hint=HINT)
            masters = [meaning(group) for group in meaning(content.get(MASTERS, []))]
            for place, group in enumerate(groups):
                numbers, own = meaning(group["params"]), _members(group, params, apart=len(optimizers) > 1)
                if len(own) != len(numbers):
                    what = f"group {place} of the optimizer has {len(numbers)} parameters, not {len(own)}"
                    raise FormatError(what, where=archive.where, hint=HINT)
                full = _masters(own, masters[place], archive.where) if masters else {}
                for n, (index, param) in zip(numbers, enumerate(own), strict=True):
                    states = {k: meaning(v) for k, v in (meaning(by_number.get(n)) or {}).items()}
                    if index in full:
                        states["param"] = meaning(full[index])
                    self._add(number, param, states, archive.where)

    def _add(self, number: int, param: LocalParam, states: Mapping[str, Any], where: str) -> None:
        segments = {}
        for key, value in states.items():
            if not isinstance(value, StoredView):
                for name in _names(param):
                    self._say(name, key, Value(number, value))
            elif not value.shape and (key == "step" or param.numel != 1):
                for name in _names(param):
                    self._scalars.setdefault((name, key), []).append(InArchive(number, value))
            else:
                source = InArchive(number, value)
                if source.numel != param.numel:
                    what = f"{key} of {param.blocks[0].name} has {source.numel} elements, not {param.numel}"
                    raise FormatError(what, where=where, hint="states without an element for each of the parameter are not read")
                segments[key] = [BufferSegment(0, source.numel, source, 0)]
        self.states.add(param, 0, segments)

    def _say(self, name: str, key: str, value: Value) -> None:
        known = self.values.setdefault(name, {}).setdefault(key, value)
        if isinstance(value.value, (int, float, str)) and known.value != value.value:
            raise CorruptError(
                f"{key} of {name} is {known.value} on one rank and {value.value} on another",
                where=self._table.archives[value.archive].where,
                hint="the files are of different saves",
            )

    def finish(self) -> None:
        """Read the steps, and put other scalars into the table, as tensors."""
        steps = [(name, source) for (name, key), own in self._scalars.items() if key == "step" for source in own]
        read = self._table.read_scalars([source for _, source in steps])
        for (name, source), step in zip(steps, read, strict=True):
            self._say(name, "step", Value(source.archive, step))
        for (name, key), own in self._scalars.items():
            if key != "step":
                self._table.add(f"{STATE}{name}.{key}", own[0].dtype, (), [whole_piece(source, ()) for source in own])


def _masters(params: Sequence[LocalParam], masters: Any, where: str) -> dict[int, Any]:
    """Those of a group, by place: its parameters in low precision have one each, in their order."""
    places = [place for place, param in enumerate(params) if param.dtype != _FULL]
    if len(masters) != len(places):
        what = f"a group has {len(masters)} parameters in full precision, not {len(places)}"
        raise FormatError(what, where=where, hint=HINT)
    return dict(zip(places, masters, strict=True))


def _names(param: LocalParam) -> Iterator[str]:
    yield from dict.fromkeys(block.name for block in param.blocks)


def _members(group: Mapping[str, Any], params: Sequence[LocalParam], *, apart: bool) -> list[LocalParam]:
    """The parameters of a group, in the model's order: by weight decay, and whether they are of experts."""
    decay, experts = group.get("wd_mult", 1.0) > 0, bool(group.get("is_expert_parallel"))
    return [
        p
        for p in params
        if is_decayed(p.blocks[0].name, len(p.blocks[0].shape)) == decay and (p.expert == experts or not (apart or experts))
    ]
