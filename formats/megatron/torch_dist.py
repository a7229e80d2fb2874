"""Megatron-Core's format ``torch_dist``: a DCP container with names and axes of its own.

Homogeneous layers are stacked along a first axis and experts along the next; their names have no number. The optimizer's state is in one of
five forms, of which four are read. (Sources: Megatron-LM core/dist_checkpointing, core/transformer/transformer_block.py and
core/optimizer/distrib_optimizer.py, versions 0.12 to 0.20.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.dcp_container import METADATA, DcpTensor, Metadata, open_items, rank_of, read_metadata
from ckpt.formats.external import ExternalFile, sizes_of
from ckpt.formats.external_elements import flat_pieces
from ckpt.formats.stand_ins import counts
from ckpt.formats.torch_archive import Archive, open_archive

from .legacy_names import MASTERS
from .names import EXTRA_STATE, LAYER, expert_name, fused_norms
from .parallel_layout import add_bucket_space
from .pieces import InItem, PieceTable, SourcePiece
from .stored_buffers import BUCKET_SPACE, HINT
from .training import (
    COMMON,
    COMMON_STEP,
    KEYS,
    LEFT_OUT,
    MARK,
    MODEL,
    SCALER,
    STATE,
    MegatronCatalog,
    arguments_of,
    groups_in,
    logical_shape,
    optimizer_node,
    state_node,
)

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# What an optimizer of Megatron has besides states and groups of parameters: grad scalers, and what is not known here. Pure.
#
# (Sources: ``state_dict`` and ``sharded_state_dict`` of Megatron-LM core/optimizer/{optimizer,distrib_optimizer}.py, versions 0.12 to
# 0.20.)

_GROUPS = "param_groups"
_READ = frozenset({_GROUPS, MASTERS, "param_state_sharding_type"})


@dataclass(eq=False)
class OptimizerExtras:
    """``scalers`` are the states of grad scalers, one for each optimizer of a chain that has one; ``unknown`` the keys that lead to what is
    not known."""

    scalers: list[Mapping[Any, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def optimizer_extras(meaning: Callable[[Any], Any], value: Any, *, by_number: bool) -> OptimizerExtras:
    """Walk the value of ``optimizer``. ``by_number``: states of parameters are expected in it, under numbers."""
    rest = OptimizerExtras()

    def walk(value: Any, path: str) -> None:
        content = meaning(value)
        if isinstance(content, (list, tuple)):
            for number, below in enumerate(content):
                walk(below, f"{path}.{number}")
        elif isinstance(content, dict):
            for key, below in content.items():
                walk_entry(key, below, f"{path}.{key}")
        elif content is not None:
            rest.unknown.append(path)

    def walk_entry(key: Any, below: Any, path: str) -> None:
        content = meaning(below)
        if key == "optimizer" or type(key) is int:
            walk(below, path)
        elif key == SCALER:
            rest.scalers += [content] if isinstance(content, dict) and content else []
            rest.unknown += [] if isinstance(content, dict) else [path]
        elif key == "state":
            states = content.items() if isinstance(content, dict) else ()
            odd = [k for k, state in states if k != COMMON_STEP and not (by_number and type(k) is int) and _has_leaves(meaning, state)]
            rest.unknown += [f"{path}.{k}" for k in odd]
        elif key not in _READ and _has_leaves(meaning, below):
            rest.unknown.append(path)

    walk(value, "optimizer")
    return rest


def _has_leaves(meaning: Callable[[Any], Any], value: Any) -> bool:
    """Whether anything is in it: what was stored elsewhere leaves empty containers behind."""
    content = meaning(value)
    if isinstance(content, (dict, list, tuple)):
        return any(_has_leaves(meaning, below) for below in (content.values() if isinstance(content, dict) else content))
    return content is not None


FORMAT_NAME = "Megatron torch_dist"
RESHARDABLE = "fully_reshardable"
_COMMON_ITEM = "common_state/shard_0_1"
_STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_STACKED = re.compile(r"((?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_OF_RANKS = re.compile(r"(?:.+\._extra_state|rng_state|rerun_state_machine_state)(?:/shard_[\d._]+)?")
"""Objects that are left out, as the notes of a catalog say."""
_HALF = re.compile(r"(.+\.(?:weight|bias))_([wv])")
_SUSPECT = (
    "Megatron-Core 0.15 to 0.19 wrote wrong optimizer states in this form (fully_reshardable) when a buffer had several padded buckets "
    "(Megatron-LM pull request 5077): `ckpt verify --semantic` tells whether this one is, `ckpt convert --repair` puts it right"
)


class ModelPart(NamedTuple):
    """A piece of one tensor of the model: its name, the shape of the tensor, and where the piece lies. Of tensors that are stored as gate
    and up ``half`` is which one, and offset and shape are those of the half."""

    name: str
    shape: tuple[int, ...]
    piece: SourcePiece
    half: int | None = None


def open_torch_dist(backend: Backend) -> MegatronCatalog:
    """Open a directory of the format."""
    if METADATA not in backend.list_dir():
        raise CorruptError("there is no .metadata", where=backend.url, hint="the save was not finished, or files are missing")
    return _TorchDist(backend, read_metadata(backend)).catalog()


class _TorchDist:
    def __init__(self, backend: Backend, metadata: Metadata) -> None:
        self.backend = backend
        self.metadata = metadata
        self.tensors = {n: t for n, t in metadata.tensors.items() if not n.endswith(EXTRA_STATE)}
        self.reformulated = _reformulated(metadata)
        self.items = {name: item for name, item in metadata.values.items() if name == _COMMON_ITEM or BUCKET_SPACE.match(name)}
        self.unknown = [name for name in metadata.values if name not in self.items and not _OF_RANKS.fullmatch(name)]
        items = [box.item for stored in self.tensors.values() for box in stored.boxes]
        common = [COMMON] if COMMON in backend.list_dir() else []
        paths = sorted({*(i.path for i in items), *(i.path for i in metadata.values.values()), *common})
        files = [ExternalFile(p, size, rank_of(p)) for p, size in zip(paths, sizes_of(backend, paths), strict=True)]
        sizes = {f.path: f.size for f in files}
        rows = {f.path: row for row, f in enumerate(files)}
        archives = list(open_items(backend, list(self.items.values()), sizes))
        self.number = {name: number for number, name in enumerate(self.items)}
        places = [rows[item.path] for item in self.items.values()]
        if common:
            self.number[COMMON] = len(archives)
            archives.append(open_archive(backend, COMMON))
            places.append(rows[COMMON])
        self.archives = archives
        self.table = PieceTable(backend, files, archives, places)
        self.common = self._common()
        self.arguments = arguments_of(self.common.get("args"))

    def _common(self) -> Mapping[Any, Any]:
        name = COMMON if COMMON in self.number else _COMMON_ITEM
        if name not in self.number:
            raise CorruptError("there is neither common.pt nor a common state", where=self.backend.url, hint="copy the checkpoint again")
        archive = self.archives[self.number[name]]
        value = archive.values.meaning(archive.load())
        if name == _COMMON_ITEM and isinstance(value, list) and len(value) == 1:
            value = archive.values.meaning(value[0])
        if not isinstance(value, dict):
            raise CorruptError("the common state is not a dictionary", where=archive.where, hint="copy the checkpoint again")
        self.common_archive = self.number[name]
        return value

    def catalog(self) -> MegatronCatalog:
        form = self._sharding_type()
        states = [n for n in self.tensors if "optimizer" in n.split(".")[:2]]
        odd = sorted(n for n in states if not BUCKET_SPACE.match(n) and not _STATE_KEY.fullmatch(n))
        if form == "fsdp_dtensor" or odd:
            what = f"an optimizer state in the form {form or 'unknown'}{f', such as {odd[0]}' if odd else ''}, which is not read"
            raise FormatError(what, where=self.backend.url, hint=HINT)
        spaces = [name for name in (*self.tensors, *self.items) if BUCKET_SPACE.match(name)]
        by_key: dict[str, list[_KeyedTensor]] = {}
        for name, tensor in self.tensors.items():
            match = _STATE_KEY.fullmatch(name)
            if match is not None:
                by_key.setdefault(match[1], []).append(_KeyedTensor(match[2], name, tensor))
            elif not BUCKET_SPACE.match(name):
                by_key.setdefault("", []).append(_KeyedTensor(name, name, tensor))
        names = self._add(by_key.pop("", []), MODEL, "")
        if spaces + states and not self.table.entries:
            beside = re.sub("optimizer(?=/dist_ckpt/?$)", "model", self.backend.url)
            place = "in a directory of its own, model/dist_ckpt" if beside == self.backend.url else f"in {beside}"
            hint = f"verl's Megatron engine stores the model {place}: inspect or convert that; verl alone loads this optimizer"
            raise FormatError("the state of an optimizer without its model, which is not read", where=self.backend.url, hint=hint)
        for key, own in by_key.items():
            self._add_states(own, KEYS.get(key, key), names)
        groups = groups_in(self.table, self.common_archive, self.common.get("optimizer"))
        more = optimizer_extras(self._common_archive.values.meaning, self.common.get("optimizer"), by_number=False)
        scalers: list[tuple[int, Any]] = [(self.common_archive, scaler) for scaler in more.scalers]
        unknown = [*self.unknown, *more.unknown]
        if spaces:
            buckets = add_bucket_space(self.table, self.tensors, self._values(), self.arguments)
            groups, scalers, unknown = buckets.groups, [*scalers, *buckets.scalers], [*unknown, *buckets.unknown]
        state, opaque, more_notes = state_node(self.table, self.common_archive, self.common, scalers)
        state["model"] = {"$tensors": "model"}
        notes = [LEFT_OUT, *more_notes, *(f"{name} is not known here, and left out" for name in unknown)]
        if spaces or any(n.startswith(STATE) for n in self.table.entries):
            state["optimizer"], more_notes = optimizer_node(self._common_archive, groups, self.table.entries)
            notes += more_notes
        return MegatronCatalog(
            table=self.table,
            format=FORMAT_NAME,
            state=state,
            world_size=max((f.rank + 1 for f in self.table.files if f.rank is not None), default=1),
            arguments=self.arguments,
            notes=notes,
            suspect=_SUSPECT if form == RESHARDABLE and MARK not in self.common else None,
            opaque=opaque,
        )

    @property
    def _common_archive(self) -> Archive:
        return self.archives[self.common_archive]

    def _values(self) -> dict[str, tuple[int, Any]]:
        """Objects that are items: the number of the archive, and the value."""
        values = {}
        for name in self.items:
            archive = self.archives[self.number[name]]
            root = archive.values.meaning(archive.load())
            values[name] = (self.number[name], root[0] if isinstance(root, list) and len(root) == 1 else root)
        return values

    def _sharding_type(self) -> str | None:
        content = self._common_archive.values.meaning(self.common.get("content_metadata"))
        form = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
        return form if isinstance(form, str) else _type_in(self._common_archive, self.common.get("optimizer"))

    # ---- tensors in the space of the model

    def _add(self, stored: Sequence[_KeyedTensor], head: str, tail: str, names: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Add tensors; gives what each of their names is called here. ``names`` are those of the model, which know about norms."""
        parts: dict[str, list[ModelPart]] = {}
        kinds: dict[str, str] = {}
        for one in stored:
            for part in _parts(one, self.reformulated.get(one.full), self.backend.url):
                parts.setdefault(part.name, []).append(part)
                kinds.setdefault(part.name, one.tensor.dtype)
        names = fused_norms(parts) if names is None else names
        for name, own in parts.items():
            shape, pieces = _joined(own)
            called = names.get(name, name)
            self.table.add(f"{head}{called}{tail}", kinds[name], shape, pieces, logical_shape(called, shape, self.arguments))
        return names

    def _add_states(self, stored: Sequence[_KeyedTensor], key: str, names: Mapping[str, str]) -> None:
        """Add the states of a key, which have an element for each of their parameter, whatever the optimizer."""
        before = {*self.table.entries}
        self._add(stored, STATE, f".{key}", names)
        for name in self.table.entries.keys() - before:
            weight, entry = self.table.entries.get(f"{MODEL}{name[len(STATE) : -len(key) - 1]}"), self.table.entries[name]
            if weight is None or weight.shape != entry.shape:
                shape = "the model has not" if weight is None else f"has the shape {list(weight.shape)}"
                what = f"an optimizer tensor {name[len(STATE) :]} {list(entry.shape)} of a parameter that {shape}"
                raise FormatError(f"{what}, which is not read", where=self.backend.url, hint=HINT)


class _KeyedTensor(NamedTuple):
    """A stored tensor: the model's key, its name in the metadata, and what these say."""

    key: str
    full: str
    tensor: DcpTensor


def _reformulated(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """The true shapes of tensors that are stored as a grid of flattened blocks (``fully_sharded_model_space``)."""
    by_name = metadata.attributes.get("mcore_data")
    shapes = {}
    for name, data in by_name.items() if isinstance(by_name, dict) else ():
        shape = data.get("nd_reformulated_orig_global_shape") if isinstance(data, dict) else None
        if isinstance(name, str) and shape is not None:
            shapes[name] = counts(shape)
    return shapes


class _StackedName(NamedTuple):
    """Where a name says that a tensor belongs: the text before the layer's number, the number, what follows, the expert's number, what
    follows that. A number is None where it is a place along an axis instead, and -1 where there is none at all."""

    before: str
    layer: int | None
    inner: str
    expert: int | None
    half: int | None

    @property
    def axes(self) -> int:
        """Leading axes that are layers and experts."""
        return (self.layer is None) + (self.expert is None)

    def name(self, at: Sequence[int]) -> str:
        """The name of the tensor at these places along the leading axes."""
        places = iter(at)
        layer = next(places) if self.layer is None else self.layer
        expert = next(places) if self.expert is None else self.expert
        inner = self.inner if expert == _NONE else expert_name(expert, self.inner)
        return inner if layer == _NONE else f"{self.before}{layer}.{inner}"


_NONE = -1


def _place(key: str) -> _StackedName:
    half = _HALF.fullmatch(key)
    which = None if half is None else "wv".index(half[2])
    key = key if half is None else half[1]
    before, layer, inner = "", _NONE, key
    numbered, stacked = LAYER.fullmatch(key), _STACKED.fullmatch(key)
    if numbered is not None:
        before, layer, inner = numbered[1], int(numbered[2]), numbered[3]
    experts = _EXPERTS.fullmatch(inner if stacked is None else stacked[2])
    expert = _NONE if experts is None else None if experts[1] is None else int(experts[1])
    if stacked is not None:
        return _StackedName(stacked[1], None, stacked[2] if experts is None else experts[2], expert, which)
    return _StackedName(before, layer, inner if experts is None else experts[2], expert, which)


def _parts(stored: _KeyedTensor, true_shape: tuple[int, ...] | None, where: str) -> Iterator[ModelPart]:
    """The pieces of the model's tensors that the boxes of a stored tensor are."""
    place, shape = _place(stored.key), true_shape or stored.tensor.shape
    axes = place.axes
    if len(shape) < axes or (not stored.tensor.boxes and 0 not in shape):
        raise CorruptError(f"{stored.full} {list(shape)} has too few axes, or no elements", where=where, hint="copy the checkpoint again")
    for box in _boxes(stored, true_shape, where):
        lead, inner = zip(box.offset[:axes], box.shape[:axes], strict=True), box.shape[axes:]
        for number, at in enumerate(product(*(range(o, o + n) for o, n in lead))):
            piece = SourcePiece(box.offset[axes:], inner, box.source, box.start + number * math.prod(inner))
            yield ModelPart(place.name(at), shape[axes:], piece, place.half)


def _boxes(stored: _KeyedTensor, true_shape: tuple[int, ...] | None, where: str) -> Iterator[SourcePiece]:
    """The boxes of a stored tensor."""
    for box in stored.tensor.boxes:
        source = InItem(stored.full, stored.tensor.dtype, box)
        if true_shape is None:
            yield SourcePiece(box.offset, box.shape, source)
            continue
        grid, at = stored.tensor.shape[:-1], box.offset[:-1]
        fits = len(grid) == len(true_shape) and all(g and s % g == 0 for g, s in zip(grid, true_shape, strict=True))
        if not fits or math.prod(box.shape[:-1]) != 1:
            raise CorruptError(f"{stored.full} {list(stored.tensor.shape)} is not a grid of blocks of {list(true_shape)}", where=where)
        block = tuple(s // g for s, g in zip(true_shape, grid, strict=True))
        first = box.offset[-1]
        if first + box.shape[-1] > math.prod(block):
            raise CorruptError(f"{stored.full} has a block of more than {math.prod(block)} elements", where=where)
        for part, begins in flat_pieces(block, first, first + box.shape[-1]):
            offset = tuple(a * b + o for a, b, o in zip(at, block, part.offset, strict=True))
            yield SourcePiece(offset, part.shape, source, begins)


def _joined(parts: Sequence[ModelPart]) -> tuple[tuple[int, ...], list[SourcePiece]]:
    """The shape and pieces of a tensor."""
    # Gate and up that are stored apart follow one another.
    rows = {part.half: part.shape[0] for part in parts if part.half is not None}
    if not rows:
        return parts[0].shape, [part.piece for part in parts]
    shape = (sum(rows.values()), *parts[0].shape[1:])
    return shape, [p.piece._replace(offset=(p.piece.offset[0] + (rows.get(0, 0) if p.half else 0), *p.piece.offset[1:])) for p in parts]


def _type_in(archive: Archive, value: Any) -> str | None:
    """The form of an optimizer's state, as the optimizer itself says it."""
    content = archive.values.meaning(value)
    if not isinstance(content, dict):
        return None
    form = content.get("param_state_sharding_type")
    below = (_type_in(archive, v) for k, v in content.items() if isinstance(k, int))
    return form if isinstance(form, str) else next((s for s in below if s is not None), None)
