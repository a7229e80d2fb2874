"""Checkpoints that Megatron-Core itself wrote (tests/real/megatron_writer.py), and what they hold by torch.load and plain numpy: no code is
shared with the reader."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.formats.external_elements import read_box
from ckpt.formats.registry import open_catalog
from ckpt.plan.layout.geometry import Box

ARCHIVES = Path(__file__).parent.parent / "fixtures" / "megatron"
Arrays = dict[str, np.ndarray]
STATE = "optimizer.state.model."


def unpacked(root: Path) -> Path:
    """All of them, below ``root``: ``<layout>/<form>``."""
    for path in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(root, filter="data")
    (root / "m14_tp2").rename(root / "model_space_tp2")
    return root


def displaced(root: Path) -> Path:
    """Those with the defect of Megatron-Core 0.16.1, below ``root``: ``<layout>/<form>``, and ``buffers``: Megatron's own word on what lay
    where."""
    with tarfile.open(ARCHIVES.parent / "displaced" / "megatron.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


def read_all(url: str | Path) -> Arrays:
    """Every tensor of a checkpoint as the bits of its elements."""
    catalog = open_catalog(str(url))
    return {name: read_box(catalog, entry, Box.whole(entry.shape)) for name, entry in catalog.tensors.items()}


def states(arrays: Arrays) -> Arrays:
    return {name: a for name, a in arrays.items() if name.startswith(STATE)}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


@cache
def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy().view(f"u{tensor.element_size()}")


def whole_model(folder: Path, *, vpp: int = 1, **sizes: int) -> Arrays:
    """The weights in the files of one iteration, put together by the rules of Megatron-LM's documentation; ``sizes``: tp, pp, ep"""
    chunks = {}
    for path in folder.glob("*/model_optim_rng.pt"):
        state = load(path)
        chunks[path.parent] = [state["model" if vpp == 1 else f"model{chunk}"] for chunk in range(vpp)]
    return joined_parts(chunks, vpp=vpp, **sizes)


def joined_parts(
    chunks: Mapping[Path, Sequence[Mapping[str, Any]]], *, tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, layers: int = 4
) -> Arrays:
    """Whole tensors of what the ranks have of each chunk of the model; the names of their directories say which ranks."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for path in sorted(chunks):
        ranks = [int(n) for n in path.name.removeprefix("mp_rank_").split("_")]
        stage = ranks[1] if pp > 1 else 0
        owner = ranks[-1] if ep > 1 else 0
        for chunk, model in enumerate(chunks[path]):
            first = chunk * (layers // vpp) + stage * (layers // (pp * vpp))
            experts = len({m[1] for n in model if (m := re.search(r"local_experts\.(\d+)", n))})
            for name, tensor in model.items():
                if isinstance(tensor, torch.Tensor):
                    found.setdefault(global_name(name, first, owner * experts), {})[ranks[0]] = bits(tensor)
    return {f"model.{name}": joined(name, [parts[r] for r in sorted(parts)]) for name, parts in found.items()}


def global_name(name: str, first: int, expert: int) -> str:
    name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name)
    name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + expert}", name)
    return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


def joined(name: str, parts: list[np.ndarray]) -> np.ndarray:
    if "layernorm" in name or "layer_norm" in name or "router" in name:
        return parts[0]
    if "linear_fc1" in name:
        halves = [np.split(p, 2) for p in parts]
        return np.concatenate([h[0] for h in halves] + [h[1] for h in halves])
    return np.concatenate(parts, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)


def dense_norms(arrays: Arrays) -> Arrays:
    """The norm before a layer without experts belongs to that layer."""
    return {n.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"): a for n, a in arrays.items()}
