"""A checkpoint manager with the methods that torchtitan's trainer calls, for training loops written after it. Needs no torchtitan.

>>> checkpointer = CheckpointManager(  # doctest: +SKIP
...     Config(folder="checkpoint", interval=500),
...     dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": state},
... )
>>> checkpointer.load()  # doctest: +SKIP
>>> checkpointer.save(step)  # each step; it saves if it is time to  # doctest: +SKIP

For torchtitan itself: :mod:`ckpt.integrations.torchtitan`. Source of the interface: ``torchtitan/components/checkpointer``, 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from ckpt import units
from ckpt.api import load as load_checkpoint
from ckpt.converters.live_export import export
from ckpt.converters.transaction import check_replaceable
from ckpt.errors import NamesError, UsageError
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.policies import All, EverySteps, Latest
from ckpt.runs.checkpointer import Checkpointer, job_of
from ckpt.state.collect import Fenced
from ckpt.state.torch_objects import copies_of, tensors_of
from ckpt.state.walk import PerRank

from .reading import agreed_latest

MODEL = "model"


class Settings(Protocol):
    """What is read of a configuration: fields of :class:`Config`, or of torchtitan's own, which have the same names."""

    folder: str
    interval: int
    keep_latest_k: int
    load_only: bool
    enable_first_step_checkpoint: bool
    exclude_from_loading: list[str]
    initial_load_path: str | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    initial_load_in_hf_quantized: bool
    last_save_model_only: bool
    last_save_in_hf: bool
    export_dtype: Any


@dataclass(kw_only=True)
class Config:
    """``folder`` is a path or URL below ``base_folder``; ``interval`` in steps; ``keep_latest_k`` 0 keeps all checkpoints. ``async_mode``
    ``"async"`` saves in the background. ``exclude_from_loading``: names of states that a load leaves alone. ``initial_load_path`` is loaded
    when the folder has no checkpoint; with ``initial_load_in_hf`` that is a Hugging Face model, by default the one that ``sd_adapter`` has
    its assets of, and its dtypes are converted. With ``last_save_model_only`` the last step's checkpoint has the model alone, in
    ``export_dtype``; with ``last_save_in_hf`` it is a Hugging Face model in ``hf/`` below the folder."""

    folder: str = "checkpoint"
    interval: int = 500
    keep_latest_k: int = 10
    load_only: bool = False
    enable_first_step_checkpoint: bool = False
    exclude_from_loading: list[str] = field(default_factory=list)
    initial_load_path: str | None = None
    initial_load_model_only: bool = True
    initial_load_in_hf: bool = False
    initial_load_in_hf_quantized: bool = False
    last_save_model_only: bool = True
    last_save_in_hf: bool = False
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    async_mode: Literal["disabled", "async"] = "async"
    codec: str | None = None


class CheckpointManager:
    """Saves and loads what a torchtitan-like trainer has.

    Args:
        config: :class:`Config`, or an object with the same fields.
        dataloader, optimizers, lr_schedulers: torch's own, or anything with ``state_dict`` and ``load_state_dict``. A value that differs
            between ranks needs a key that names the rank, as torchtitan's data loader has it, or ``ckpt.PerRank`` around the object.
        model_parts: the model, or this rank's stages of it: then their names do not collide, and ``optimizers`` is a container whose
            state goes by names, as torchtitan's does.
        states: further objects with a state, by name.
        sd_adapter: translates tensors into those of Hugging Face and back: ``to_hf``, ``from_hf``, ``hf_assets_path``.
        base_folder: what ``config.folder`` is relative to.
    """

    def __init__(
        self,
        config: Settings,
        *,
        dataloader: Any,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        # Loops written after torchtitan may have a configuration from before it had these fields.
        hf = ("initial_load_in_hf", "last_save_in_hf", "initial_load_in_hf_quantized")
        self._load_in_hf, self._save_in_hf, quantized = (bool(getattr(config, name, False)) for name in hf)
        if (self._load_in_hf or self._save_in_hf) and sd_adapter is None:
            raise UsageError(
                "Hugging Face files need names of the model", hint="pass sd_adapter=, the model's StateDictAdapter of torchtitan"
            )
        if self._save_in_hf and not config.last_save_model_only:
            raise UsageError("last_save_in_hf writes the model alone", hint="leave last_save_model_only=True")
        if quantized:
            raise UsageError("initial_load_in_hf_quantized is not supported", hint="load a model that is not quantised")
        self.folder = join_url(base_folder, config.folder) if base_folder else config.folder
        if self._save_in_hf:
            check_replaceable(self._hf, open_backend(self._hf))  # now, not at the last step
        self.config = config
        self.sd_adapter = sd_adapter
        self.background = getattr(config, "async_mode", "async") != "disabled"
        self.model_parts = list(model_parts)
        parts = {"optimizer": optimizers, "lr_scheduler": lr_schedulers, "dataloader": dataloader, **states}
        self.states = {name: _as_stateful(value) for name, value in parts.items() if value is not None}
        keep = Latest(config.keep_latest_k) if config.keep_latest_k else All()
        self.checkpointer = Checkpointer(self.folder, save=EverySteps(config.interval), keep=keep, codec=getattr(config, "codec", None))
        if self._save_in_hf:
            self._in_hf(self._hf)  # what the adapter lacks shows now, too

    @property
    def _hf(self) -> str:
        return join_url(self.folder, "hf")

    def state(self) -> dict[str, Any]:
        """The state as ``ckpt.load`` takes it: ``model`` is the model, or has the tensors of all parts under the names that these give."""
        return {MODEL: self._tensors() if self._by_names() else self.model_parts[0], **self.states}

    def _by_names(self) -> bool:
        """Whether tensors are saved and loaded in place of the model: of several parts, or of one whose state has copies, such as slices
        of fused weights. torch's own optimizers need the model itself."""
        if len(self.model_parts) != 1 or isinstance(self.states.get("optimizer"), torch.optim.Optimizer):
            return len(self.model_parts) != 1
        return bool(copies_of(self.model_parts[0], tensors_of(self.model_parts[0])))

    def _tensors(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Of all parts; floating-point numbers in ``dtype``."""
        tensors = {name: value for part in self.model_parts for name, value in part.state_dict().items()}
        floats = (name for name, t in tensors.items() if isinstance(t, torch.Tensor) and t.is_floating_point())
        return tensors if dtype is None else tensors | {name: tensors[name].to(dtype) for name in floats}

    def load(self, step: int = -1) -> bool:
        """Load the newest checkpoint, or that of ``step``; else what ``initial_load_path`` says. Whether anything was loaded.

        Raises:
            NotFoundError: there is no checkpoint of ``step``.
            CkptError: as :meth:`ckpt.Checkpointer.restore`.
        """
        with job_of(self.checkpointer)[0].fails_together("load", self.folder):
            state = self.state()
        path = self.config.initial_load_path
        latest = agreed_latest(self.checkpointer) if step == -1 else step
        if latest is None and self._load_in_hf:
            url = path or self.sd_adapter.hf_assets_path
            if url is None:
                raise UsageError("initial_load_in_hf has no model to load", hint="set initial_load_path, or the trainer's hf_assets_path")
            self._load_from_hf(url)
            return True
        if latest is None and path is None:
            return False
        model_only = self.config.initial_load_model_only if latest is None else latest == 0
        # What to load, as globs; None for everything
        names = [MODEL] if model_only else [name for name in state if name not in self.config.exclude_from_loading]
        only = None if len(names) == len(state) else [name if isinstance(state[name], PerRank) else f"{name}.*" for name in names]
        if latest is None and path is not None:
            load_checkpoint(path, state, only=only)
        else:
            self.checkpointer.restore(state, step=None if step == -1 and latest else latest, only=only)
        if self._by_names():
            self._put(state[MODEL])
        return True

    def _load_from_hf(self, url: str) -> None:
        tensors = self._in_hf(url)
        load_checkpoint(url, tensors, only=list(tensors), cast=True)
        self._put(self.sd_adapter.from_hf(tensors))

    def _in_hf(self, url: str) -> dict[str, Any]:
        """The model's tensors as the adapter translates them; NamesError unless they are all of the model's."""
        with job_of(self.checkpointer)[0].fails_together("translation", url):
            own = self._tensors()
            tensors: dict[str, Any] = self.sd_adapter.to_hf(own)
            there = self.sd_adapter.from_hf(dict(tensors))  # some of the tensors are the model's own
            buffers = {name for part in self.model_parts for name, _ in part.named_buffers()}
            if missing := sorted(own.keys() - there.keys() - buffers):
                names = f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
                text = f"sd_adapter gives nothing for {units.plural(len(missing), 'tensor')}: {names}"
                raise NamesError(text, where=url, hint="mend its to_hf and from_hf")
        return tensors

    def _put(self, loaded: Mapping[str, Any]) -> None:
        for part in self.model_parts:  # also where the parts' own tensors were filled: others may be copies
            part.load_state_dict({name: loaded[name] for name in part.state_dict() if name in loaded}, strict=False)

    def save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001  torchtitan's
        """Save if it is time to; whether it was.

        Raises:
            CkptError: an earlier save failed; what :func:`ckpt.save_async` raises.
        """
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        if self.config.load_only or not (first or last_step or curr_step % self.config.interval == 0):
            return False
        dtype = getattr(torch, self.config.export_dtype) if last_step and self.config.last_save_model_only else None
        if dtype is not None and self._save_in_hf:
            self.checkpointer.wait()
            with job_of(self.checkpointer)[0].fails_together("export", self._hf):
                tensors = self.sd_adapter.to_hf(self._tensors())
            export(self._hf, tensors, dtype=dtype, overwrite=True)
            return True
        self.checkpointer.save(curr_step, self.state if dtype is None else lambda: {MODEL: self._tensors(dtype)})
        if last_step or not self.background:
            self.checkpointer.wait()
        return True

    def maybe_wait_for_staging(self) -> None:
        """Wait until the state may change. An optimizer's step does it by itself."""
        if self.checkpointer.handle is not None:
            self.checkpointer.handle.fence()

    def maybe_wait_for_saving(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CkptError: it failed.
        """
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()


class _Stateful(Fenced):
    """A container that is an Optimizer by class only: its state is what its own ``state_dict`` says."""

    def __init__(self, value: Any) -> None:
        self.optimizers = getattr(value, "optimizers", [value])
        self.state_dict = value.state_dict
        self.load_state_dict = value.load_state_dict


def _as_stateful(value: Any) -> Any:
    own = isinstance(value, torch.optim.Optimizer) and type(value).state_dict is not torch.optim.Optimizer.state_dict
    return _Stateful(value) if own else value
