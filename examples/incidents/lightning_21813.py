"""Lightning-AI/pytorch-lightning#21813: a run resumes from another run's checkpoint on a remote file system, and deletes it. Under
Lightning's ``ModelCheckpoint`` ckpt does not help: it is asked to delete."""

from __future__ import annotations

from pathlib import Path

import fsspec
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from outcome import Outcomes, show

import ckpt
from ckpt.integrations.lightning import CkptIO
from ckpt.policies import Latest


def fit(folder: Path, root: str, *plugins: CkptIO) -> list[str]:
    """Two runs, of which the second one resumes from the first one's checkpoint, each keeping its newest: the files left of the first."""
    resume = None
    for number in (1, 2):
        keep = ModelCheckpoint(dirpath=f"{root}/{number}", every_n_train_steps=2, save_top_k=1, monitor=None)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
        trainer = Trainer(max_steps=2 * number, callbacks=[keep], plugins=[*plugins], default_root_dir=folder, accelerator="cpu", **quiet)
        trainer.fit(BoringModel(), ckpt_path=resume)
        resume = keep.best_model_path
    return fsspec.filesystem("memory").find(f"{root}/1")


def play(folder: Path) -> Outcomes:
    left = fit(folder, "memory://lightning")
    below = "kept" if fit(folder, "memory://ckpt", CkptIO()) else "deleted, too"
    first, second, again = BoringModel(), BoringModel(), BoringModel()
    for number, model in ((1, first), (2, second)):
        with ckpt.Checkpointer(folder / f"{number}", keep=Latest(1)) as checkpointer:
            checkpointer.restore({"model": model}, begin_from=None if number == 1 else ckpt.latest(folder / "1"))
            checkpointer.save(2 * number, {"model": model})
    ckpt.load(ckpt.latest(folder / "1"), {"model": again})
    kept = torch.equal(again.layer.weight, first.layer.weight) and torch.equal(second.layer.weight, first.layer.weight)
    return (
        f"mended: {left} are left" if left else "deleted",
        f"Checkpointer keeps it; CkptIO, below ModelCheckpoint: {below}" if kept else "",
    )


if __name__ == "__main__":
    show(play, "lightning")
