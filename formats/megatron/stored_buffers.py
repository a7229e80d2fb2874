"""The flat buffers of Megatron's distributed optimizer as they are stored: which elements of a buffer lie where, and its buckets.

(Sources: ``sharded_param_state_dp_reshardable`` and ``get_parameter_state_dp_zero`` of Megatron-LM core/optimizer/distrib_optimizer.py.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.formats.dcp_container import DcpTensor
from ckpt.formats.stand_ins import GlobalName, StoredView

from .buffers import BUCKET_DIVISOR, Bucket, BufferLayout, BufferParam, BufferSegment, buffer_layout, pieces_of
from .names import LocalParam
from .pieces import InArchive, InItem, PieceTable, SourcePiece
from .training import KEYS, MODEL, SCALER, STATE, Group, groups_in

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
            own |= coalesced(archive.values.meaning, number, value, archive.where)
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
    return own


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


# Optimizer states that were stored flat, as tensors of the model: what the files of the format ``torch`` and of ``torch_dist`` have in
# common.

_DEFAULT_BUCKET = 40_000_000
_PER_RANK = 1_000_000


class FlatStates:
    """Collects the pieces of optimizer states, by tensor and key."""

    def __init__(self, table: PieceTable) -> None:
        self.table = table
        self._pieces: dict[tuple[str, str], list[SourcePiece]] = {}

    def add(self, param: LocalParam, start: int, segments: Mapping[str, Sequence[BufferSegment]]) -> None:
        """The states of a parameter that begins at ``start`` of a flat buffer; ``segments`` by Megatron's key."""
        for key, own in segments.items():
            try:
                for name, piece in pieces_of(param, start, own):
                    self._pieces.setdefault((name, key), []).append(piece)
            except ValueError as err:
                hint = "load it with Megatron-LM, and save it with --dist-ckpt-optim-fully-reshardable"
                raise FormatError(f"{err} is stored transposed and in parts", where=self.table.backend.url, hint=hint) from err

    def finish(self) -> None:
        """Put what was collected into the table."""
        for (name, key), pieces in self._pieces.items():
            weight = self.table.entries.get(f"{MODEL}{name}")
            if weight is None:
                raise CorruptError(f"an optimizer state of {name}, which the model has not", where=self.table.backend.url)
            self.table.add(f"{STATE}{name}.{KEYS.get(key, key)}", pieces[0].source.dtype, weight.shape, pieces, weight.logical)


def members_of(params: Sequence[LocalParam]) -> list[BufferParam]:
    """The members of the buffer that these parameters make."""
    return [BufferParam(p.numel, p.shared) for p in params]


def default_bucket(ranks: int) -> int:
    """The elements of a bucket that Megatron takes by default for so many data-parallel ranks."""
    return max(_DEFAULT_BUCKET, _PER_RANK * ranks)


def coalesced_layout(members: Sequence[BufferParam], used: int, arguments: Mapping[str, Any]) -> BufferLayout | None:
    """The layout of a buffer that is stored in one piece, without the padding of its ``used`` elements' buckets; None if it is not known.

    Parameters whose sizes are multiples of 64 follow one another whatever the buckets are. For others it matters where buckets begin, so
    all likely sizes of buckets have to agree.
    """
    layouts = [buffer_layout(members, bucket_size=size, data_parallel=1) for size in (None, _bucket_size(arguments))]
    fitting = [layout for layout in layouts if layout.used == used]
    return fitting[0] if len({_places(layout) for layout in fitting}) == 1 else None


def job_layout(members: Sequence[BufferParam], arguments: Mapping[str, Any], *, bucketed: bool) -> BufferLayout | None:
    """The layout of a buffer in a job with these arguments; None if it depends on the size of buckets, which they do not say.

    ``bucketed``: it is of the first chunk of the first stage, the only one whose buffers have several buckets, and only where reductions
    overlap with the backward pass. (Source: ``DistributedDataParallel`` of Megatron-LM core/distributed/distributed_data_parallel.py.)
    """
    one = buffer_layout(members, bucket_size=None, data_parallel=1)
    if not bucketed or not arguments.get("overlap_grad_reduce"):
        return one
    many = buffer_layout(members, bucket_size=_bucket_size(arguments), data_parallel=1)
    known = isinstance(arguments.get("ddp_bucket_size"), int) or (one.used, _places(one)) == (many.used, _places(many))
    return many if known else None


def _bucket_size(arguments: Mapping[str, Any]) -> int:
    ranks, given = arguments.get("data_parallel_size"), arguments.get("ddp_bucket_size")
    return given if isinstance(given, int) else default_bucket(ranks if isinstance(ranks, int) else 1)


def _places(layout: BufferLayout) -> tuple[int, ...]:
    return tuple(layout.compact(slot) for slot in layout.slots)


# What a job says of the buckets of its gradients, by the arguments that Megatron-LM keeps in a checkpoint. Pure.
#
# (Source: ``DistributedDataParallel`` of Megatron-LM core/distributed/distributed_data_parallel.py, ``get_model`` of training/training.py.)

NAMES = (
    "ddp_bucket_size",
    "data_parallel_size",
    "context_parallel_size",
    "num_distributed_optimizer_instances",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "overlap_grad_reduce",
    "ddp_pad_buckets_for_high_nccl_busbw",
)
"""Arguments that say how parameters were spread and put into buckets; those of yes and no are 1 and 0."""
_HIGH_BANDWIDTH = 1 << 16


class Buckets(NamedTuple):
    """``size`` in elements, None for one bucket; ``ranks`` that share a buffer; the ``divisor`` of buckets besides."""

    size: int | None
    ranks: int
    divisor: int


def likely_buckets(arguments: Mapping[str, Any]) -> list[Buckets]:
    """The buckets that the job had by its arguments, the likeliest first; what these do not say is as Megatron has it by default.

    Without a number of ranks a power of two up to 128 is taken: all of them pad alike.
    """
    context = count(arguments, "context_parallel_size") or 1
    ranks = (count(arguments, "data_parallel_size") or 1) * context
    shared = max(1, ranks // (count(arguments, "num_distributed_optimizer_instances") or 1))
    divisor = _HIGH_BANDWIDTH if arguments.get("ddp_pad_buckets_for_high_nccl_busbw") else BUCKET_DIVISOR
    overlap, given = arguments.get("overlap_grad_reduce"), count(arguments, "ddp_bucket_size")
    if overlap is not None and not overlap:
        sizes: list[int | None] = [None]
    elif given is not None:
        sizes = [given]
    elif arguments.get("ddp_num_buckets") is not None:
        raise UsageError("the job requested a number of buckets; their lengths are unknown", hint="--job ddp_bucket_size=N, in elements")
    else:
        sizes = [*dict.fromkeys((default_bucket(ranks), default_bucket(ranks // context))), *([None] if overlap is None else [])]
    return [Buckets(size, shared, divisor) for size in sizes]


def count(arguments: Mapping[str, Any], name: str) -> int | None:
    """A number of things; None if the arguments do not say it."""
    value = arguments.get(name)
    return value if isinstance(value, int) and value > 0 else None
