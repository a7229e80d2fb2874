"""Lightning's strategies for sharded models, with ckpt's checkpoints: each rank saves its shards, and any number of ranks resumes.

>>> trainer = Trainer(strategy=CkptModelParallelStrategy())  # doctest: +SKIP
>>> trainer.fit(model, ckpt_path="runs/a/last.ckpt")  # doctest: +SKIP

The modules and optimizers are saved as they are, under ``model`` and ``optimizer.0``, and are loaded in place; what else Lightning has in
its dict is below ``trainer``, as rank 0 has it. Source of the interface: ``lightning.pytorch.strategies``, 2.6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.api import load, save, save_async
from ckpt.needs import needed
from ckpt.runs.removal import remove_at

from .reading import BackgroundSave, read_state

with needed("lightning", "lightning"):
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn

_LIVE = ("state_dict", "optimizer_states")
"""What the state has as live objects."""


class _ShardedCheckpoints(BackgroundSave):
    """What replaces the checkpoints of a strategy.

    Args:
        background: save in the background, while the next steps are trained; an error is raised by the next save or at the end.
        arguments: those of Lightning's strategy.
    """

    model: Any
    optimizers: Any
    lightning_module: Any
    broadcast: Any
    global_rank: int

    def __init__(self, *arguments: Any, background: bool = False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.background = background

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the model is saved as it is, and nothing is copied or gathered for that."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing, as for the model."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Collective. ``storage_options`` are refused, as by Lightning's strategies: :func:`ckpt.configure_storage` takes them.

        Raises:
            CkptError: as :func:`ckpt.save`; or an earlier save in the background failed.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no storage_options: call ckpt.configure_storage")
        if changed := [name for name in _LIVE if any(checkpoint.get(name) or ())]:
            raise TypeError(f"a hook has put something into {', '.join(changed)} of the checkpoint, which would not be saved")
        self.wait()
        url = os.fspath(self.broadcast(filepath))
        rest = self.broadcast({name: value for name, value in checkpoint.items() if name not in _LIVE})
        state = {**self._live(optimizers="optimizer_states" in checkpoint), "trainer": rest}
        if self.background:
            self._saving = save_async(url, state)
        else:
            save(url, state)

    def load_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str],
        weights_only: bool | None = None,  # noqa: FBT001  Lightning's
    ) -> dict[str, Any]:
        """Collective: loads the model, and to go on training the optimizers. ``weights_only`` makes no difference: nothing is ever
        unpickled.

        Raises:
            CkptError: as :func:`ckpt.load`: before anything changes, if the checkpoint does not fit.
        """
        self.wait()
        url = os.fspath(self.broadcast(checkpoint_path))
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        state = self._live(optimizers=fitting)
        load(url, state, only=[f"{name}.*" for name in state], strict=self.lightning_module.strict_loading)
        rest: dict[str, Any] = read_state(url, key="trainer")
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001  Lightning's
        """Nothing: ``load_checkpoint`` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing, as for the model."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        self.wait()
        if self.global_rank == 0:
            remove_at(os.fspath(filepath))

    def _live(self, *, optimizers: bool) -> dict[str, Any]:
        given = {str(i): optimizer for i, optimizer in enumerate(self.optimizers)} if optimizers else {}
        return {"model": self.model, **({"optimizer": given} if given else {})}

    def teardown(self) -> None:
        self.wait()
        super().teardown()  # type: ignore[misc]  # of the strategy


class CkptModelParallelStrategy(_ShardedCheckpoints, ModelParallelStrategy):
    """``ModelParallelStrategy`` (FSDP2, tensor parallelism) with ckpt's checkpoints."""


class CkptFSDPStrategy(_ShardedCheckpoints, FSDPStrategy):
    """``FSDPStrategy`` (the first FSDP) with ckpt's checkpoints."""
