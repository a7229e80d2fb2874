"""Writes the golden checkpoints of a format version: ``python -m tests.golden.generate v1``. Kept beside what it wrote; run it for
a new version only.

What the checkpoints hold is known without them: ``expected_bytes`` and ``expected_values`` say it in numpy and plain Python.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    **{f"dtypes.{name}": (name, (3, 4)) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")},
    **{f"dtypes.{name}": (name, (5,)) for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "complex32")},
    **{
        f"dtypes.{name}": (name, (2, 3))
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
    "dtypes.float4_e2m1fn_x2": ("float4_e2m1fn_x2", (2, 2)),
    "dtypes.bool": ("bool", (7,)),
    "scalar": ("float32", ()),
    "empty": ("int64", (0, 3)),
    "name with ] and / and ünïcode[0:1]": ("int16", (2,)),
    "sharded": ("float32", (33, 5)),
    "columns": ("int32", (4, 7)),
    "replicated": ("float64", (130, 131)),
    "tied.a": ("float32", (6,)),
    "tied.b": ("float32", (6,)),
}
"""name → dtype and global shape. ``tied.b`` is ``tied.a``."""

ITEMSIZE = {"bool": 1, "complex128": 16, "complex64": 8, "complex32": 4, "bfloat16": 2}


def itemsize(dtype: str) -> int:
    if dtype in ITEMSIZE:
        return ITEMSIZE[dtype]
    return 1 if dtype.startswith(("float8", "float4")) else np.dtype(dtype).itemsize


def expected_bytes(name: str) -> bytes:
    """The row-major bytes of a tensor: a pattern that depends on its name."""
    dtype, shape = TENSORS["tied.a" if name == "tied.b" else name]
    seed = sum(b"tied.a" if name == "tied.b" else name.encode())
    pattern = (np.arange(int(np.prod(shape)) * itemsize(dtype), dtype=np.int64) * 7 + seed) % 251
    return ((pattern % 2) if dtype == "bool" else pattern).astype(np.uint8).tobytes()


def expected_values() -> dict[str, object]:
    """What is not a tensor."""
    return {
        "step": 1234567890123456789,
        "lr": 0.1,
        "text": "naïve ☃",
        "flags": [True, None, False],
        "nested": {"tuple": (1, (2.5, "x")), "int keys": {1: "one", (2, 3): "pair"}, "set": {3, 1, 2}, "bytes": b"\x00\xff"},
        "odd": [float("inf"), -0.0, 1 + 2j],
    }


def per_rank(rank: int) -> dict[str, object]:
    return {"seed": 100 + rank, "position": [rank, rank + 1]}


def main(version: str) -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(_rank, args=(str(HERE / version), f"{tmp}/store"), nprocs=2)


def _rank(rank: int, directory: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    import ckpt

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensors = {}
    for name, (dtype, shape) in TENSORS.items():
        raw = torch.frombuffer(bytearray(expected_bytes(name)) or bytearray(1), dtype=torch.uint8)
        tensors[name] = (raw.view(getattr(torch, dtype)) if np.prod(shape) else torch.empty(0, dtype=getattr(torch, dtype))).reshape(shape)
    tensors["tied.b"] = tensors["tied.a"]
    tensors["sharded"] = distribute_tensor(tensors["sharded"], mesh, [Shard(0)])
    tensors["columns"] = distribute_tensor(tensors["columns"], mesh, [Shard(1)])
    ckpt.save(directory, {**tensors, "values": expected_values(), "own": ckpt.PerRank(per_rank(rank) | {"t": torch.full((3,), rank)})})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
