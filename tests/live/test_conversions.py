"""What happens on the way from an old state to a new one: other dtypes, other names, a part of it; and slots of memory that flip a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.errors import ExchangeError, GroupError
from ckpt.net.shared_memory import SlotPool
from tests.distributed.ranks import Ranks

ROWS, COLUMNS = 37, 10


def whole() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).standard_normal((ROWS, COLUMNS), dtype=np.float32))


def rounded(tensor: torch.Tensor) -> np.ndarray:
    """The bits of bfloat16 that are nearest, and even between two."""
    bits = tensor.contiguous().numpy().view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def convert() -> list[str]:
    """FSDP2 on ranks 0 and 1 into other names and half of the bytes on ranks 2 and 3, cut along the other dimension; one tensor is not
    asked for."""
    from ckpt.live import reshard

    rank, mesh = dist.get_rank(), DeviceMesh("cpu", torch.arange(2))
    old: dict[str, Any] | None = None
    new: dict[str, Any] | None = None
    if rank < 2:
        part = whole().split(19)[rank].contiguous()
        old = {
            "model": {
                "a": DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size([ROWS, COLUMNS]), stride=(COLUMNS, 1))
            }
        }
        old["model"]["b"] = torch.ones(3)
    else:
        new = {"engine": {"a": torch.full((ROWS, 5), 7.0, dtype=torch.bfloat16), "b": torch.full((3,), 7.0)}}
    layout = ckpt.Layout(ckpt.Mesh(("tp",), (2,), (2, 3)), [("*.a", ckpt.Shard(1, "tp")), ("*", ckpt.Replicate())])
    report = reshard(
        old,
        new,
        new_layout=layout if new else None,
        rename={"model.*": "engine.*"},
        cast=True,
        only="engine.a",
        strict=False,
        job=ckpt.Job(timeout=20),
    )
    if new is None:
        return []
    problems = []
    bits = new["engine"]["a"].view(torch.int16).numpy().view(np.uint16)
    if not np.array_equal(bits, rounded(whole()[:, 5 * (rank - 2) : 5 * (rank - 1)])):
        problems.append("a is not what rounding gives")
    if new["engine"]["b"].tolist() != [7.0] * 3:
        problems.append("b was not asked for")
    if report.cast != ("engine.a",) or dict(report.renamed) != {"model.a": "engine.a"}:
        problems.append(f"report: cast {report.cast}, renamed {report.renamed}")
    return problems


def test_other_dtypes_and_names(ranks: Ranks) -> None:
    assert ranks.run(4, convert) == [[], [], [], []]


def flip(copies: bool) -> str:
    """A bit of a slot flips after it was hashed, on rank 0; rank 1 has the same bytes if there are ``copies``."""
    from ckpt.live import reshard

    rank, inner, flipped = dist.get_rank(), SlotPool.lend, []

    def lend(pool: SlotPool, slot: int, *rest: Any) -> Any:
        if not flipped:
            data = pool.data(slot)
            data[100] ^= 4
            flipped.append(slot)
        return inner(pool, slot, *rest)

    if rank == 0:
        SlotPool.lend = lend  # type: ignore[method-assign]
    old = {"w": whole()} if rank == 0 or (rank == 1 and copies) else None
    new = {"w": torch.zeros(ROWS, COLUMNS)} if rank >= 2 else None
    try:
        reshard(old, new, job=ckpt.Job(timeout=20))
    except GroupError as err:
        return type(err).__name__
    return "" if new is None or torch.equal(new["w"], whole()) else "wrong"


def test_a_bit_flips_in_a_slot(ranks: Ranks) -> None:
    """Nobody else has it: an error everywhere. Somebody has: that one gives it."""
    alone = ranks.run(3, flip, False)
    assert "" not in alone and "wrong" not in alone and ExchangeError.__name__ in alone, alone
    assert ranks.run(4, flip, True) == [""] * 4
