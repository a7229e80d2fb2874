"""Fits of Lightning on the ranks of torchrun, with ckpt's strategies; ``python sharded_fits.py FOLDER begin|resume`` prints a JSON line."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ckpt.integrations.lightning import CkptFSDPStrategy, CkptModelParallelStrategy


class OnCpu(CkptFSDPStrategy):
    def _setup_model(self, model: Any) -> Any:
        """Lightning leaves it to torch to find a GPU."""
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Model(LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, CkptModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self(torch.full((4, 8), float(self.global_step + 1))).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(64, 1), batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Digests(Callback):
    """Of the weights and the moments that each step began with, and of those at the end."""

    def __init__(self) -> None:
        self.seen: dict[int, str] = {}

    def note(self, trainer: Trainer) -> None:
        hashed = hashlib.sha256()
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                hashed.update(repr(group["lr"]).encode())
                for parameter in group["params"]:
                    for value in (parameter, *(optimizer.state[parameter][k] for k in sorted(optimizer.state[parameter]))):
                        hashed.update(getattr(value, "full_tensor", lambda v=value: v)().detach().numpy().tobytes())
        self.seen[trainer.global_step] = hashed.hexdigest()[:12]

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        self.note(trainer)

    def on_train_end(self, trainer: Trainer, *rest: Any) -> None:
        self.note(trainer)


def fit(kind: str, folder: str, steps: int, seed: int, path: str | None = None, *, background: bool = False) -> dict[int, str]:
    ranks, digests = int(os.environ["WORLD_SIZE"]), Digests()
    mesh = {"data_parallel_size": ranks, "tensor_parallel_size": 1} if kind == "parallel" else {}
    strategy = (CkptModelParallelStrategy if kind == "parallel" else OnCpu)(process_group_backend="gloo", background=background, **mesh)
    keeps = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, monitor="step", mode="max", save_last=True)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(devices=ranks, strategy=strategy, max_steps=steps, callbacks=[keeps, digests], **quiet)
    trainer.fit(Model(seed), ckpt_path=path)
    return digests.seen


def main(folder: str, life: str) -> None:
    warnings.filterwarnings("ignore")
    told: dict[str, Any] = {}
    for kind in ("parallel", "fsdp"):
        first = f"{folder}/{kind}/first"
        if life == "begin":
            told[f"{kind} whole"] = fit(kind, f"{folder}/{kind}/whole", 6, 1)
            told[f"{kind} first"] = fit(kind, first, 4, 1, background=True)
        here = f"{folder}/{kind}/on-{os.environ['WORLD_SIZE']}"
        told[f"{kind} again"] = fit(kind, here, 6, 2, f"{first}/last.ckpt")
    print(f"TOLD {json.dumps(told)}\n", end="", flush=True)  # in one write: the other ranks print on the same pipe
    os._exit(0)  # gloo's threads abort now and then on the interpreter's own way out


if __name__ == "__main__":
    main(*sys.argv[1:])
