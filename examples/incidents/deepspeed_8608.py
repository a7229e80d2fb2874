"""deepspeedai/DeepSpeed#8608: what another optimizer than Adam has saved cannot be converted for another number of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import Outcomes, on_ranks, show

import ckpt

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


def engine() -> Any:
    """With the momentum of SGD, as of Muon, named otherwise than Adam's. A new one has other weights than one that was saved."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": str(dist.get_world_size())}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it compiles one for minutes
    model = torch.nn.Linear(8, 8)
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), config=CONFIG)[0]


def save(folder: Path) -> None:
    trained = engine()
    for _ in range(2):
        trained.backward(trained(torch.ones(4, 8).bfloat16()).float().square().sum())
        trained.step()
    trained.save_checkpoint(str(folder / "deepspeed"))
    ckpt.save(folder / "ckpt", {"engine": trained})


def resume(folder: Path) -> None:
    """On one rank, and save again, so that the bytes can be compared."""
    resumed = {"engine": engine()}
    ckpt.load(folder / "ckpt", resumed)
    ckpt.save(folder / "again", resumed)


def play(folder: Path) -> Outcomes:
    on_ranks(2, save, folder)
    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "deepspeed" / "latest").read_text()
    sys.argv[1:] = [f"--input_folder={folder / 'deepspeed' / tag}", f"--output_folder={folder / 'universal'}", "--inject_missing_state"]
    try:
        ds_to_universal.main(ds_to_universal.parse_arguments())
        elsewhere = "mended"
    except KeyError as err:
        elsewhere = f"the conversion ends with KeyError: {err}"
    on_ranks(1, resume, folder)
    saved, again = ckpt.open(folder / "ckpt"), ckpt.open(folder / "again")
    same = set(saved) == set(again) and all(torch.equal(saved[name].read(), again[name].read()) for name in saved)
    return elsewhere, f"two ranks' {len(saved)} tensors on one, equal to the last bit" if same else ""


if __name__ == "__main__":
    show(play, "deepspeed")
