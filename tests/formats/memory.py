"""What the ranks of a job held in memory when they saved, put together: the writers in tests/real leave it as ``memory/rank_*.pt``.

Each file has for every parameter of its rank, under its name in the whole model: ``weight``, the ``axis`` along which tensor parallelism
cut it (or None) and which ``part`` it is, and ``states``: ``(start, stop, {key: flat tensor})`` of the flattened part. No ckpt.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.formats.megatron_files import STATE, Arrays, bits

Cut = tuple[int | None, bool]
"""The axis that a parameter is cut along, and whether its rows are those of a gate and of an up projection."""
Parts = dict[str, dict[int, dict[str, Any]]]
"""By parameter and part: ``weight`` and every key of the optimizer, as masked bits."""


def held_by_ranks(folder: Path) -> tuple[Parts, dict[str, Cut]]:
    """All that the ranks had, and how each parameter is cut. What several ranks had must be equal."""
    parts: Parts = {}
    cuts: dict[str, Cut] = {}
    for path in sorted(folder.glob("rank_*.pt")):
        for name, held in torch.load(path).items():
            cuts[name] = held["axis"], held.get("gated", "linear_fc1" in name)
            into = parts.setdefault(name, {}).setdefault(held["part"] if held["axis"] is not None else 0, {})
            for key, array in _of_rank(held).items():
                _fill(into, key, array, name)
    assert parts
    return parts, cuts


def _of_rank(held: dict[str, Any]) -> dict[str, np.ma.MaskedArray]:
    shape = held["weight"].shape
    found = {"weight": np.ma.array(bits(held["weight"]), mask=np.zeros(shape, dtype=bool))}
    for start, stop, states in held["states"]:
        for key, flat in states.items():
            whole = np.ma.masked_all(shape.numel(), dtype=np.uint32)
            whole[start:stop] = bits(flat)
            _fill(found, key, whole.reshape(shape), key)
    return found


def _fill(into: dict[str, Any], key: str, array: np.ma.MaskedArray, name: str) -> None:
    known = into.setdefault(key, array.copy())
    new, old = ~np.ma.getmaskarray(array), ~np.ma.getmaskarray(known)
    assert np.array_equal(known.data[old & new], array.data[old & new]), f"ranks have different {key} of {name}"
    known[new] = array[new]


def joined(parts: list[Any], axis: int | None, gated: bool = False) -> np.ndarray:
    """Tensor-parallel parts in order. Of a gated layer every part has its rows of the gate, then its rows of the up projection."""
    assert not any(np.ma.getmaskarray(part).any() for part in parts), "nobody has some elements"
    arrays = [np.asarray(part) for part in parts]
    if axis is None:
        return arrays[0]
    if gated:
        halves = [np.split(a, 2) for a in arrays]
        return np.concatenate([h[0] for h in halves] + [h[1] for h in halves])
    return np.concatenate(arrays, axis)


def megatron_memory(folder: Path, *, tied: bool = False) -> Arrays:
    """Every tensor of a Megatron-Core job as bits, by the names of docs/formats.md."""
    parts, cuts = held_by_ranks(folder)
    if tied:
        copy, real = parts.pop("output_layer.weight"), parts["embedding.word_embeddings.weight"]
        assert all(np.array_equal(copy[part]["weight"], real[part]["weight"]) for part in real)
    found: Arrays = {}
    for name, by_part in parts.items():
        named = re.sub(r"\.(q|kv)_layernorm\.weight", r".linear_\1_up_proj.layer_norm_weight", name)
        if named == name and "linear_kv_up_proj" not in " ".join(parts):  # a latent vector has no linear layer after its norm
            named = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        if name.replace("pre_mlp_layernorm", "mlp.router") not in parts:  # a layer without experts
            named = named.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        for key in by_part[0]:
            whole = joined([by_part[part][key] for part in sorted(by_part)], *cuts[name])
            found[f"model.{named}" if key == "weight" else f"{STATE}{named}.{key}"] = whole
    return found


def deepspeed_memory(folder: Path) -> Arrays:
    """Every trained parameter of a DeepSpeed job, its master and its moments, as bits."""
    parts, _ = held_by_ranks(folder)
    return {
        f"model.{name}" if key == "weight" else f"{STATE}{name}.{key}": joined([array], None)
        for name, by_part in parts.items()
        for key, array in by_part[0].items()
    }
