"""Checkpoints of any size in the layouts of others, made of holes: their elements are zeros that take no room on the disk. All the rest
(headers, pickles, directories) is what the libraries themselves write around elements.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

WIDTH = 1024
RANKS = 8
_EDGE = 2048
"""More bytes than there are before the elements of a tensor that is saved alone, and behind them."""


def make_safetensors(root: Path, nbytes: int, tensors: int) -> str:
    """One file; gives the name of a tensor in its middle."""
    shape, header = _shape(nbytes, tensors, 2), dict[str, object]()
    size = 2 * math.prod(shape)
    for i, name in enumerate(names(tensors)):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with open(root / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size * tensors)
    return _middle(names(tensors))


def make_torch(root: Path, nbytes: int, tensors: int) -> str:
    """One file of ``torch.save``."""
    shape = _shape(nbytes, tensors, 2)
    _save({name: torch.empty(shape, dtype=torch.bfloat16) for name in names(tensors)}, root / "model.pt")
    return _middle(names(tensors))


def make_dcp(root: Path, nbytes: int, tensors: int) -> str:
    """A directory of DCP: each tensor in rows on ``RANKS`` ranks, so that there are ``tensors`` boxes in all."""
    items = _Items(root, RANKS)
    rows = _shape(nbytes, tensors // RANKS, 2)[0] // RANKS
    held = names(tensors // RANKS)
    for name in held:
        boxes = [((rank * rows, 0), (rows, WIDTH), rank) for rank in range(RANKS)]
        items.add(name, (rows * RANKS, WIDTH), torch.bfloat16, boxes)
    items.finish({name: tuple(name.split(".", 1)) for name in held})
    return _middle(held)


def make_megatron(root: Path, nbytes: int, tensors: int) -> str:
    """A directory of Megatron-Core (``torch_dist``, ``fully_reshardable``): layers cut over two tensor-parallel ranks, with the states of
    Adam, in about ``tensors`` boxes."""
    items, layers = _Items(root, 2), max(1, tensors // 32)
    width = max(8, math.isqrt(nbytes // layers // 14 // 12) // 8 * 8)  # 2 bytes and 3 times 4 for each of 12 width² elements
    parts = {"self_attention.linear_qkv": (3, 1), "self_attention.linear_proj": (1, 1), "mlp.linear_fc1": (4, 1), "mlp.linear_fc2": (4, 1)}
    for kind, dtype in (("", torch.bfloat16), *((f"optimizer.state.{s}.", torch.float32) for s in ("param", "exp_avg", "exp_avg_sq"))):
        for part, (out, into) in parts.items():
            rows, columns = out * width // 2, into * width
            places = itertools.product(range(layers), range(2))
            boxes = [((layer, half * rows, 0), (1, rows, columns), half) for layer, half in places]
            items.add(f"{kind}decoder.layers.{part}.weight", (layers, 2 * rows, columns), dtype, boxes)
    items.finish(None)
    arguments = {"num_layers": layers, "hidden_size": width, "num_attention_heads": 8, "tensor_model_parallel_size": 2}
    arguments |= {"padded_vocab_size": 64, "vocab_size": 64, "pipeline_model_parallel_size": 1, "transformer_impl": "local"}
    group = {"lr": 0.1, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 3.0}
    common = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 3}
    common |= {"optimizer": {"optimizer": {"param_groups": [group]}, "param_state_sharding_type": "fully_reshardable"}}
    torch.save(common, root / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (root / "metadata.json").write_text(json.dumps(backends))
    return f"model.decoder.layers.{layers // 2}.mlp.linear_fc1.weight"


def make_zero(root: Path, nbytes: int, tensors: int) -> str:
    """A directory of DeepSpeed (ZeRO-3) of four ranks: masters and the states of Adam, each rank's in one flat tensor. Every rank repeats
    the names of all parameters, of which there are an eighth of ``tensors``."""
    ranks, held = 4, names(tensors // 8)
    shape = _shape(nbytes, len(held), 12)
    model: dict[str, Any] = {"module": {name: torch.empty(0, dtype=torch.bfloat16) for name in held}, "buffer_names": []}
    model |= {"param_shapes": [OrderedDict((name, torch.Size(shape)) for name in held)], "frozen_param_shapes": None}
    model |= {"frozen_param_fragments": None, "shared_params": {}, "global_steps": 1, "ds_version": "0.19.8", "dp_world_size": ranks}
    flat = math.prod(shape) // ranks * len(held)
    for rank in range(ranks):
        state = {"step": 1, "exp_avg": torch.empty(flat), "exp_avg_sq": torch.empty(flat)}
        optimizer = {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        states = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [torch.empty(flat)], "optimizer_state_dict": optimizer}
        _save(model, root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        _save({"optimizer_state_dict": states, "ds_config": {}}, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return f"model.{_middle(held)}"


MAKERS: Mapping[str, Callable[[Path, int, int], str]] = {
    "safetensors": make_safetensors,
    "torch.save": make_torch,
    "DCP": make_dcp,
    "Megatron torch_dist": make_megatron,
    "ZeRO-3": make_zero,
}
"""Each makes a checkpoint of about so many bytes and tensors in an empty directory, and gives the name of one of the tensors."""


def can_make() -> bool:
    """Whether this torch can leave out elements when it saves."""
    return hasattr(torch.serialization, "skip_data")


def names(count: int) -> list[str]:
    """Names of so many tensors, nine to a layer."""
    return [f"layers.{i // 9}.block{i % 9}.weight" for i in range(count)]


def _middle(found: Sequence[str]) -> str:
    return found[len(found) // 2]


def _shape(nbytes: int, tensors: int, itemsize: int) -> tuple[int, int]:
    """Rows that can be divided by the ranks, as those of models mostly can."""
    return max(1, nbytes // tensors // itemsize // WIDTH // RANKS) * RANKS, WIDTH


def _save(value: object, path: Path) -> None:
    with torch.serialization.skip_data():
        torch.save(value, path)


class _Items:
    """Data files of DCP, and what its metadata say of them."""

    def __init__(self, root: Path, files: int) -> None:
        self._root = root
        self._names = [f"__{rank}_0.distcp" for rank in range(files)]
        self._at = [0] * files
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._edges: dict[object, tuple[bytes, bytes, int]] = {}

    def add(self, name: str, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> None:
        """A tensor in boxes: offset, shape, and number of the file of each."""
        chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes, _ in boxes]
        self._described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for chunk, (_, sizes, number) in zip(chunks, boxes, strict=True):
            head, tail, size = self._edges_of(tuple(sizes), dtype)
            at, self._at[number] = self._at[number], self._at[number] + size
            self._places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(self._names[number], at, size)
            with open(self._root / self._names[number], "ab") as file:
                _put(file, at, head)
                _put(file, at + size - len(tail), tail)

    def _edges_of(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes, int]:
        """What ``torch.save`` writes before the elements of a tensor and behind them, and the size of it all."""
        if (shape, dtype) not in self._edges:
            tensor = torch.empty(shape, dtype=dtype)
            with tempfile.TemporaryDirectory() as folder:
                _save(tensor, Path(folder) / "tensor")
                data = (Path(folder) / "tensor").open("rb")
                size, inside = os.fstat(data.fileno()).st_size, tensor.nbytes > 2 * _EDGE
                with data:
                    head = data.read(_EDGE if inside else size)
                    data.seek(size - _EDGE if inside else size)
                    self._edges[shape, dtype] = head, data.read(), size
        return self._edges[shape, dtype]

    def finish(self, paths: Mapping[str, tuple[str, ...]] | None) -> None:
        metadata = Metadata(state_dict_metadata=self._described, planner_data=paths, storage_data=self._places)
        if hasattr(metadata, "version"):  # since torch 2.7
            metadata.version = "1.0.0"
        (self._root / ".metadata").write_bytes(pickle.dumps(metadata))


def _put(file: BinaryIO, at: int, data: bytes) -> None:
    """Write behind a hole."""
    file.truncate(at)
    file.write(data)


def stored_bytes(root: Path) -> Iterator[tuple[int, int]]:
    """Size of each file below a directory, and the bytes that it takes on the disk."""
    for path in root.rglob("*"):
        if path.is_file():
            found = path.stat()
            yield found.st_size, found.st_blocks * 512
