"""Which layers a pipeline stage has, by Megatron-LM's arguments. Pure.

The chunks of a pipeline are in order: the first chunk of every stage, then the second of every stage. Each has consecutive layers, so the
numbers of layers in each say everything. (Source: ``get_transformer_layer_offset`` of Megatron-LM core/transformer/transformer_layer.py and
core/transformer/pipeline_parallel_layer_layout.py.)
"""

#     4 stages with 2 chunks each, 16 layers:     stage      0       1       2       3
#                                      chunk 0    layers     0-1     2-3     4-5     6-7
#                                      chunk 1    layers     8-9     10-11   12-13   14-15
#
# The list of counts is in the pipeline's order: chunk 0 of stages 0 to 3, then chunk 1. A layer's number is the sum of the counts before.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt.errors import FormatError


def layers_of_chunks(arguments: Mapping[str, Any], layers: int, stages: int, chunks: int = 1) -> list[int]:
    """How many layers each chunk has, in the pipeline's order; ``chunks`` is their number on each of the ``stages``."""
    plan = arguments.get("pipeline_model_parallel_layout")
    if plan is not None and stages > 1:
        counts = [part.count("t") for part in _unfolded(str(plan)).split("|")] if isinstance(plan, str) else []
    else:
        counts = _divided(arguments, layers, stages, chunks)
    if len(counts) != stages * chunks or sum(counts) != layers or min(counts) < 0:
        raise FormatError(
            f"{layers} layers on {stages} pipeline stages with {chunks} chunks each, in a way that is not known here",
            hint="the checkpoint's arguments do not say which stage has which layers",
        )
    return counts


def _divided(arguments: Mapping[str, Any], layers: int, stages: int, chunks: int) -> list[int]:
    first, last = arguments.get("decoder_first_pipeline_num_layers"), arguments.get("decoder_last_pipeline_num_layers")
    total, less = layers, [0] * stages
    if arguments.get("account_for_embedding_in_pipeline_split"):
        total, less[0] = total + 1, 1
    if arguments.get("account_for_loss_in_pipeline_split"):
        total, less[-1] = total + 1, less[-1] + 1
    if first is None and last is None:
        per_stage = [total // stages] * stages
    else:
        middle = stages - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        per_stage = [rest // middle if middle else 0] * stages
        per_stage[0] = per_stage[0] if first is None else first
        per_stage[-1] = per_stage[-1] if last is None else last
    counts = [n // chunks for n in per_stage] * chunks
    counts[0] -= less[0]
    counts[-1] -= less[-1]
    return counts


def _unfolded(plan: str) -> str:
    """``Et*3|(tt|)*29,m|L`` with what is repeated written out."""
    plan = plan.replace(",", "").replace(" ", "")
    plan = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), plan)
    return re.sub(r"([A-Za-z|])\*(\d+)", lambda m: m[1] * int(m[2]), plan)
