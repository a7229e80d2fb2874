"""Optimizer states that were stored flat, as tensors of the model: what the files of the format ``torch`` and of ``torch_dist`` have in
common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt.errors import CorruptError, FormatError, UsageError

from .buffers import BUCKET_DIVISOR, BufferLayout, BufferParam, BufferSegment, buffer_layout, pieces_of
from .params import LocalParam
from .pieces import PieceTable, SourcePiece
from .training import KEYS, MODEL, STATE

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
        raise UsageError("the job said how many buckets it wanted, not how long they are", hint="--job ddp_bucket_size=N, in elements")
    else:
        sizes = [*dict.fromkeys((default_bucket(ranks), default_bucket(ranks // context))), *([None] if overlap is None else [])]
    return [Buckets(size, shared, divisor) for size in sizes]


def count(arguments: Mapping[str, Any], name: str) -> int | None:
    """A number of things; None if the arguments do not say it."""
    value = arguments.get(name)
    return value if isinstance(value, int) and value > 0 else None
