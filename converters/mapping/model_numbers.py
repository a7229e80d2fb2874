"""Numbers of a model that translations need, from its configuration: transformers' ``config.json`` or Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .terms import Dimensions

PARTS = {"query_rows": ("heads", "head_size"), "key_rows": ("query_groups", "head_size")}
"""Numbers that are products of two others."""
NUMBERS = ("heads", "query_groups", "head_size", *PARTS, "vocabulary", "padded_vocabulary", "layers", "experts")


def of_config(config: Mapping[str, Any]) -> Dimensions:
    """From a transformers configuration, read as JSON. A number that it does not have is left out."""
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads")
    numbers = {
        "heads": heads,
        "query_groups": text.get("num_key_value_heads", heads),
        "head_size": text.get("head_dim") or _divided(text.get("hidden_size"), heads),
        "vocabulary": text.get("vocab_size"),
        "layers": text.get("num_hidden_layers"),
        "experts": next((text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), None),
    }
    return completed(numbers)


def of_arguments(arguments: Mapping[str, Any]) -> Dimensions:
    """From Megatron-LM's ``args``, as its checkpoints have them (megatron/training/arguments.py)."""
    heads = arguments.get("num_attention_heads")
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else heads
    numbers = {
        "heads": heads,
        "query_groups": groups or heads,
        "head_size": arguments.get("kv_channels") or _divided(arguments.get("hidden_size"), heads),
        "vocabulary": arguments.get("vocab_size") or arguments.get("padded_vocab_size"),
        "padded_vocabulary": arguments.get("padded_vocab_size"),
        "layers": arguments.get("num_layers"),
        "experts": arguments.get("num_experts"),
    }
    return completed(numbers)


def padded_vocabulary(vocabulary: int, *, divisor: int = 128, tensor_parallel: int = 1) -> int:
    """Rows of the embedding as Megatron-LM makes them divisible (``make_vocab_size_divisible_by``, core/tokenizers/utils)."""
    step = divisor * tensor_parallel
    return -(-vocabulary // step) * step


def changed(stored: Mapping[str, int], given: Mapping[str, int]) -> Dimensions:
    """Numbers that the files tell, with those that somebody says instead, and what follows from all of them."""
    kept = {name: value for name, value in stored.items() if not given.keys() & set(PARTS.get(name, ()))}
    return completed({**kept, **given})


def completed(partial: Mapping[str, int | None]) -> Dimensions:
    """With the numbers that follow from these."""
    numbers = Dimensions({name: value for name, value in partial.items() if value is not None})
    for name, (count, size) in PARTS.items():
        if count in numbers and size in numbers:
            numbers.setdefault(name, numbers[count] * numbers[size])
    if "vocabulary" in numbers:
        numbers.setdefault("padded_vocabulary", numbers["vocabulary"])
    return numbers


def _divided(size: int | None, parts: int | None) -> int | None:
    return size // parts if size and parts else None
