"""Events in a run of Weights & Biases: metrics, and for each checkpoint an artifact that refers to it. No bytes of it are uploaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.events.event import Event
from ckpt.needs import needed

from .numbers import numbers, reference, uri

if TYPE_CHECKING:
    from wandb import Run


class WandB:
    """Metrics ``ckpt/…`` over ``ckpt/step``; and artifacts ``checkpoint-<run>`` of type ``checkpoint``, which refer to the URL and have id
    and digest as metadata. An alert becomes one of W&B.

    Metrics join the row that training logs next, so that the run's own steps stay as they are.

    Args:
        run: what ``wandb.init`` gave; by default the run of this process.
        artifacts: whether checkpoints are logged as artifacts.

    Raises:
        ImportError: wandb is not installed.
        ValueError: there is no run.
    """

    def __init__(self, run: Run | None = None, *, artifacts: bool = True) -> None:
        with needed("wandb", "wandb"):
            import wandb
        self._wandb = wandb
        run = run if run is not None else wandb.run
        if run is None:
            raise ValueError("there is no run of W&B: make the monitor after wandb.init(), or give it the run")
        self._run = run
        self._artifacts = artifacts
        self._run.define_metric("ckpt/step", hidden=True)
        self._run.define_metric("ckpt/*", step_metric="ckpt/step")

    def __call__(self, event: Event) -> None:
        metrics = {f"ckpt/{name}": value for name, value in numbers(event).items()}
        if metrics:
            self._run.log({**metrics, "ckpt/step": event.step}, commit=False)
        if event.kind == "save.durable" and self._artifacts and event.url is not None:
            artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata=reference(event))
            artifact.add_reference(uri(event.url), name="checkpoint", checksum=False)
            self._run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])
        elif event.kind == "alert":
            self._run.alert(title=f"ckpt: {event.topic}", text=event.reason or "")
