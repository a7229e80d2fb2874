"""What a job says of the buckets of its gradients, by the arguments that Megatron-LM keeps in a checkpoint. Pure.

(Source: ``DistributedDataParallel`` of Megatron-LM core/distributed/distributed_data_parallel.py, ``get_model`` of training/training.py.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt.errors import UsageError

from .buffers import BUCKET_DIVISOR
from .flat import default_bucket

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
