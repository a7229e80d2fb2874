"""DTensor, wherever this version of torch keeps it."""

from __future__ import annotations

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
except ImportError:  # before torch 2.5
    from torch.distributed._tensor import DTensor, Replicate, Shard, placement_types  # type: ignore[no-redef, attr-defined]

TELLS_ORDER = hasattr(placement_types, "_StridedShard")
"""Whether placements tell in which order mesh dimensions cut one dimension: before torch 2.5, FSDP over TP looked like TP over FSDP."""

__all__ = ["TELLS_ORDER", "DTensor", "Replicate", "Shard"]
