"""Fit a small model with Lightning, stop, and resume with the same command and more epochs.

    python examples/lightning_fit.py runs/lit --epochs 2
    python examples/lightning_fit.py runs/lit --epochs 4     # resumes with the third epoch

Needs pip install 'ckpt-toolkit[lightning]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.lightning import CkptIO


class Model(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self.layers(x), y)
        self.losses[self.global_step] = float(loss.detach())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(run: str, *, epochs: int, background: bool = False) -> Model:
    seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    model = Model(width=16)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[CkptIO(background=background)],  # the line that does it
        callbacks=[ModelCheckpoint(run, save_top_k=2, monitor="loss", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path(run, "last.ckpt")
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16), ckpt_path=last if last.exists() else None)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    model = fit(given.run, epochs=given.epochs)
    print(f"trained steps {min(model.losses)} to {max(model.losses)}; checkpoints: {[s.url for s in ckpt.list_steps(given.run)]}")


if __name__ == "__main__":
    main()
