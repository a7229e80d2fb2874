"""The flat buffers of Megatron's distributed optimizer as they are stored: which elements of a buffer lie where, and its buckets.

(Sources: ``sharded_param_state_dp_reshardable`` and ``get_parameter_state_dp_zero`` of Megatron-LM core/optimizer/distrib_optimizer.py.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.errors import FormatError
from ckpt.formats.dcp.metadata import DcpTensor
from ckpt.formats.pickles.stand_ins import GlobalName, StoredView

from .buffers import Bucket, BufferSegment
from .pieces import InArchive, InItem, PieceTable
from .training import KEYS, SCALER, Group, groups_in

BUCKET_SPACE = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
"""Names that belong to flat buffers: the number of the optimizer in a chain, that of the group of ranks, and the rest."""
HINT = "load it with Megatron-LM, and save it with --dist-ckpt-optim-fully-reshardable"

_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(\w+)")
_OBJECT = re.compile(r"(\w+)/shard_0_1")
_OBJECTS = frozenset({"optimizer", "param_state", SCALER, "per_bucket_numel", "per_bucket_numel_unpadded"})

Values = Mapping[str, tuple[int, Any]]
"""Objects that are items, by name: the number of the archive, and the value."""
Meaning = Callable[[Any], Any]


@dataclass(kw_only=True)
class Buffer:
    """A flat buffer of one group of data-parallel ranks: its stored segments by key, and its buckets."""

    dtype: str
    segments: dict[str, list[BufferSegment]] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    used: int = 0
    """Elements without the padding of buckets: all that is known of a buffer that is stored in one piece."""


class GroupOf(NamedTuple):
    """The ranks of one part of the model: the number of the optimizer in a chain, and of the group."""

    chain: int
    rank: int


Buffers = dict[GroupOf, dict[int, Buffer]]
"""By group and number."""


@dataclass(frozen=True, kw_only=True)
class BucketState:
    """The buffers of all groups of ranks, and the optimizer's parameter groups; ``scalers`` are the states of grad scalers, of each
    optimizer of a chain, and the archives that have them; ``unknown`` the names of objects that are not known here."""

    buffers: Buffers
    groups: list[Group]
    scalers: list[tuple[int, Any]]
    unknown: list[str]


def collect(table: PieceTable, tensors: Mapping[str, DcpTensor], values: Values) -> BucketState:
    """Sort the items of flat buffers."""
    buffers: Buffers = {}
    groups: dict[int, list[Group]] = {}
    scalers: dict[int, tuple[int, Any]] = {}
    unknown = []
    for name, (number, value) in values.items():
        match = BUCKET_SPACE.match(name)
        if match is None:
            continue
        kind = _OBJECT.fullmatch(match[3])
        if kind is None or kind[1] not in _OBJECTS:
            unknown.append(name)
            continue
        group, archive = GroupOf(int(match[1] or 0), int(match[2])), table.archives[number]
        own = buffers.setdefault(group, {})
        if kind[1] == "optimizer":
            groups.setdefault(group.chain, groups_in(table, number, value))
        elif kind[1] == "param_state":
            _coalesced(archive.values.meaning, number, value, own, archive.where)
        elif kind[1] == SCALER and archive.values.meaning(value):
            scalers.setdefault(group.chain, (number, value))
        elif kind[1] == "per_bucket_numel_unpadded":
            padded = values.get(name.replace("_unpadded", ""), (number, None))[1]
            _buckets(archive.values.meaning, value, padded, own, archive.where)
    for name, tensor in tensors.items():
        match = BUCKET_SPACE.match(name)
        if match is not None:
            _bucket(name, match, tensor, buffers, table.backend.url)
    for buffer in (b for own in buffers.values() for b in own.values()):
        for segments in buffer.segments.values():
            segments.sort(key=lambda s: s.start)
    ordered = [g for chain in sorted(groups) for g in groups[chain]]
    return BucketState(buffers=buffers, groups=ordered, scalers=[scalers[chain] for chain in sorted(scalers)], unknown=unknown)


def _buckets(meaning: Meaning, used: Any, padded: Any, own: dict[int, Buffer], where: str) -> None:
    try:
        for number, (short, long) in enumerate(zip(meaning(used), meaning(padded), strict=True)):
            ((kinds, sizes),) = meaning(short).items()
            (full,) = meaning(long).values()
            buckets = [Bucket(int(n), int(u)) for n, u in zip(meaning(full), meaning(sizes), strict=True)]
            own[number] = Buffer(dtype=_dtype(kinds), buckets=buckets, used=sum(b.used for b in buckets))
    except (TypeError, ValueError, AttributeError) as err:
        raise FormatError(f"the sizes of the optimizer's buckets cannot be read: {err}", where=where, hint=HINT) from err


def coalesced(meaning: Meaning, number: int, value: Any, where: str) -> dict[int, Buffer]:
    """The buffers of one ``distrib_optim.pt``, or of the same as an object: numbers as keys, then dtypes, then keys of the state."""
    own: dict[int, Buffer] = {}
    _coalesced(meaning, number, value, own, where)
    return own


def _coalesced(meaning: Meaning, number: int, value: Any, own: dict[int, Buffer], where: str) -> None:
    content = meaning(value)
    if not isinstance(content, dict) or content.get("buckets_coalesced") is not True:
        raise FormatError("an optimizer state of Megatron-LM before 2024, or in an unknown form", where=where, hint=HINT)
    for index, by_dtype in content.items():
        if index == "buckets_coalesced":
            continue
        if not isinstance(index, int) or isinstance(index, bool):
            _check_keys([str(index)], where)
        try:
            ((kinds, state),) = meaning(by_dtype).items()
            state = {key: meaning(v) for key, v in meaning(state).items()}
        except (TypeError, ValueError, AttributeError) as err:
            raise FormatError(f"buffer {index} of the optimizer cannot be read: {err}", where=where, hint=HINT) from err
        views = {key: v for key, v in state.items() if isinstance(v, StoredView)}
        _check_keys((str(key) for key in state if key != "numel_unpadded"), where)
        segments = {key: [BufferSegment(0, math.prod(v.shape), InArchive(number, v), 0)] for key, v in views.items()}
        used = state.get("numel_unpadded", max((s[0].stop for s in segments.values()), default=0))
        own[index] = Buffer(dtype=_dtype(kinds), segments=segments, used=int(used))


def _bucket(name: str, match: re.Match[str], tensor: DcpTensor, buffers: Buffers, where: str) -> None:
    bucket = _BUCKET.fullmatch(match[3])
    group = GroupOf(int(match[1] or 0), int(match[2]))
    buffer = buffers.get(group, {}).get(int(bucket[1])) if bucket is not None else None
    if bucket is None or buffer is None or int(bucket[3]) >= len(buffer.buckets) or len(tensor.shape) != 1:
        raise FormatError(f"an optimizer tensor {name}, which is not known here", where=where, hint=HINT)
    _check_keys([bucket[4]], where)
    start = sum(b.numel for b in buffer.buckets[: int(bucket[3])])
    segments = buffer.segments.setdefault(bucket[4], [])
    for box in tensor.boxes:
        low = start + box.offset[0]
        segments.append(BufferSegment(low, low + box.shape[0], InItem(name, tensor.dtype, box), 0))


def _check_keys(keys: Iterable[str], where: str) -> None:
    unknown = sorted(set(keys) - KEYS.keys())
    if unknown:
        raise FormatError(f"an optimizer state with {', '.join(map(repr, unknown))}, which is not known here", where=where, hint=HINT)


def _dtype(kinds: Any) -> str:
    if isinstance(kinds, tuple) and kinds and isinstance(kinds[0], GlobalName) and kinds[0].module == "torch":
        return kinds[0].name
    raise ValueError("a buffer without a dtype")
