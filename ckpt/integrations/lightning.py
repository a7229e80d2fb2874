"""Lightning with ckpt's checkpoints.

>>> trainer = Trainer(plugins=[CkptIO()])  # doctest: +SKIP
>>> trainer.fit(model, ckpt_path="runs/a/last.ckpt")  # doctest: +SKIP

Lightning collects the dict and says where it goes; the file ``last.ckpt`` becomes a directory that holds a ckpt checkpoint. Source of the
interface: ``lightning.fabric.plugins.io.checkpoint_io``, 2.6.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from ckpt.api import load, save, save_async
from ckpt.api import open as open_view
from ckpt.engine.save.background import BackgroundSave, start_save
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.save import save_state
from ckpt.engine.view import read_state
from ckpt.errors import UsageError
from ckpt.io_backends.registry import configure_storage
from ckpt.needs import needed, warn_if_untried
from ckpt.net.group import Group, Job
from ckpt.runs.removal import remove_at
from ckpt.state.walk import ReceivedState

with needed("lightning", "lightning"):
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
warn_if_untried("lightning", "2.6")

Loadable = TypeVar("Loadable")


def load_from_checkpoint(
    cls: type[Loadable],
    url: str | os.PathLike[str],
    map_location: str | torch.device | None = None,
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,  # noqa: FBT001  as in Lightning
    **arguments: Any,
) -> Loadable:
    """``cls.load_from_checkpoint(url)`` for a checkpoint of :class:`CkptIO`: Lightning opens a path itself and takes it for a file.

    The dict that was saved is handed to Lightning in memory, as a file that it can read: for that moment it is there twice.

    Args:
        cls: a ``LightningModule`` or ``LightningDataModule``.
        map_location, hparams_file, strict, arguments: as for ``cls.load_from_checkpoint``.
    """
    file = io.BytesIO()
    torch.save(read_state(open_view(url)), file)
    file.seek(0)
    loaded: Loadable = cls.load_from_checkpoint(  # type: ignore[attr-defined]
        file, map_location=map_location, hparams_file=hparams_file, strict=strict, weights_only=False, **arguments
    )
    return loaded


class CkptIO(BackgroundSave, CheckpointIO):
    """A ``CheckpointIO`` for strategies that hold the whole state on each rank: one device, DDP. Values that are not tensors must be plain.

    Strategies for sharded models write by themselves and do not use it: take :class:`CkptModelParallelStrategy` or
    :class:`CkptFSDPStrategy`.

    Args:
        background: save in the background, from a copy that is made in the call; an error is raised by the next save or at the end.
        codec: as for :func:`ckpt.save`.
        threads: as for :class:`ckpt.Job`.
    """

    def __init__(self, *, background: bool = False, codec: str | None = None, threads: int | None = None) -> None:
        self.background = background
        self._options = SaveOptions.of({"check_replicas": False, "merge_flat_shards": False, "codec": codec, "job": Job(threads=threads)})
        self._group = Group(0, (0,))
        """Lightning calls this on one rank, whatever the size of the job."""

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """``storage_options`` hold for ``path`` from then on, also when it is loaded or removed: see :func:`ckpt.configure_storage`."""
        if storage_options:
            configure_storage(os.fspath(path), storage_options)
        self.wait()
        if self.background:
            self._saving = start_save(os.fspath(path), dict(checkpoint), self._group, self._options, "eager")
        else:
            save_state(os.fspath(path), dict(checkpoint), self._group, self._options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,  # noqa: FBT001  Lightning's
    ) -> dict[str, Any]:
        """The dict that was saved. ``weights_only`` makes no difference: nothing is ever unpickled."""
        if not isinstance(map_location, str | torch.device | None):
            raise UsageError(f"map_location must be a device, not {type(map_location).__name__}")
        self.wait()
        state: dict[str, Any] = read_state(open_view(path), threads=self._options.threads)
        if map_location is None:
            return state
        moved: dict[str, Any] = tree_map_only(torch.Tensor, lambda t: t.to(map_location), state)
        return moved

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint; of a link, such as those of ``save_last="link"``, the link alone."""
        self.wait()
        remove_at(os.fspath(path))
        for folder, _, _ in () if os.path.islink(path) else os.walk(path, topdown=False):
            with suppress(OSError):  # a path that is still there is not used again by Lightning
                os.rmdir(folder)

    def teardown(self) -> None:
        self.wait()


# Lightning's strategies for sharded models, with ckpt's checkpoints: each rank saves its shards, and any number of ranks resumes.
#
# The modules and optimizers are saved as they are, under ``model`` and ``optimizer.0``, and are loaded in place; what else Lightning has in
# its dict is below ``trainer``, as rank 0 has it. Source of the interface: ``lightning.pytorch.strategies``, 2.6.

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
        if named.get("state_dict_type") == "full" or not named.get("save_distributed_checkpoint", True):
            raise UsageError("these strategies save shards, and no whole state", hint="`ckpt convert --to torch` makes one file of them")
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
        state, rest = self._live(optimizers=fitting), ReceivedState()
        only = [*(f"{name}.*" for name in state), "trainer*"]
        load(url, {**state, "trainer": rest}, only=only, strict=self.lightning_module.strict_loading)
        trainer: dict[str, Any] = rest.value
        return trainer

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
