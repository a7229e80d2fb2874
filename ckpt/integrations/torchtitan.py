"""torchtitan with ckpt's checkpoints: its trainer makes the manager from the configuration.

>>> config.checkpoint = CheckpointManager.Config(enable=True, folder="checkpoint", interval=500)  # doctest: +SKIP

This is torchtitan's own manager, which decides when to save and what to load, with all replaced that reads and writes files of DCP; names
are theirs. Source: ``torchtitan/components/checkpointer/dcp.py``, 0.3; in 0.2 it is ``components/checkpoint.py``, with the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from ckpt.api import load
from ckpt.converters.live_export import export
from ckpt.converters.transaction import check_replaceable
from ckpt.errors import NamesError
from ckpt.formats.native.paths import step_number
from ckpt.io_backends.registry import is_file_system, join_url, open_backend
from ckpt.needs import needed, warn_if_untried
from ckpt.policies import All, EverySteps, Latest
from ckpt.runs.checkpointer import Checkpointer, agreed_latest, job_of
from ckpt.state.collect import Fenced
from ckpt.state.walk import PerRank

with needed("torchtitan", "torchtitan"):
    from torchtitan.components import checkpoint


class CheckpointManager(checkpoint.CheckpointManager):
    """torchtitan's, with its arguments. ``last_save_in_hf`` exports to ``hf/`` below the folder, in place of an earlier export. A value
    that differs between ranks needs a key that names the rank, as torchtitan's data loader has it, or ``ckpt.PerRank`` around the object.

    Raises:
        NamesError: ``sd_adapter`` has no Hugging Face name for some weight, and ``last_save_in_hf`` is set.
        UsageError: the storage cannot replace an export.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(getattr(checkpoint.CheckpointManager, "Config", object)):  # type: ignore[misc]  # 0.2 has none
        """torchtitan's fields, and ``codec`` as for :func:`ckpt.save`. Each ``async_mode`` but ``"disabled"`` saves in the background."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        codec: str | None = None

    async_mode: Any
    checkpointer: Any = None  # if checkpoints are enabled
    _newest: int | None = None

    def __init__(self, *arguments: Any, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        if not self.enable:
            return
        warn_if_untried("torchtitan", "0.3")
        if self.async_mode is not checkpoint.AsyncMode.DISABLED:
            self.async_mode = checkpoint.AsyncMode.ASYNC
        self._hf = join_url(self.folder, "hf")
        keep = Latest(self.keep_latest_k) if self.keep_latest_k else All()
        codec = getattr(parts.get("config", arguments[0] if arguments else None), "codec", None)
        self.checkpointer = Checkpointer(self.folder, save=EverySteps(self.interval), keep=keep, codec=codec)
        if self.last_save_in_hf:  # what is wrong shows now, not at the last step
            check_replaceable(self._hf, open_backend(self._hf))
            self._check_adapter(self.states[checkpoint.MODEL].state_dict())

    def _load(self, step: int = -1) -> bool:
        number = self._find_load_step() if step == -1 else step
        create = self._create_checkpoint_id
        if number == -1:  # else torchtitan would look for directories by fsspec, which storage of ckpt does not need
            if self.initial_load_path or self.initial_load_in_hf:
                return bool(super()._load())
            number, create = super()._find_load_step() if is_file_system(self.folder) else -1, super()._create_checkpoint_id
            if number == -1:
                return False
        self.dcp_load(self._states_to_load(number == 0), create(number), from_hf=False, from_quantized=False)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        if self._newest is None:  # else the ranks have asked already
            latest = agreed_latest(self.checkpointer)
            self._newest = -1 if latest is None else latest
        return self._newest

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(self.checkpointer.url(step))

    def _purge_stale_checkpoints(self) -> None:
        pass  # the Checkpointer does

    __del__ = _purge_stale_checkpoints  # and ranks are not collected at one moment

    def _wait_for_saving(self) -> None:
        self.checkpointer.wait()
        self.save_future = None

    def close(self) -> None:
        super().close()
        if self.checkpointer is not None:
            self.checkpointer.close()

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, *_: Any, to_hf: bool = False, **__: Any) -> Any:
        if to_hf:
            with job_of(self.checkpointer)[0].fails_together("export", self._hf):
                tensors = self.sd_adapter.to_hf(state_dict)
            return export(self._hf, tensors, overwrite=True)
        self._newest = None
        handle = self.checkpointer.save(step_number(checkpoint_id.rpartition("/")[2]), _state(state_dict))
        return handle.durable if async_mode is not checkpoint.AsyncMode.DISABLED else self.checkpointer.wait()

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:  # noqa: FBT001
        if from_hf:
            self._check_adapter(state_dict)
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        state, model = _state(state_dict), self.states[checkpoint.MODEL]
        all_names = {*model.state_dict(), *(name for name, value in self.states.items() if value is not None)} - {checkpoint.MODEL}
        globs = [name if isinstance(value, torch.Tensor | PerRank) else f"{name}.*" for name, value in state.items()]
        only = None if state.keys() >= all_names else globs
        step: int | None = step_number(checkpoint_id.rpartition("/")[2])
        fill: Callable[..., object] = partial(load, checkpoint_id, state, only=only, cast=self.initial_load_model_only)
        if step is not None and checkpoint_id == self.checkpointer.url(step):  # the newest one that is whole, if none was asked for
            fill = partial(self.checkpointer.restore, state, step=None if step == self._newest else step, only=only)
        try:
            fill()
        except NamesError as err:
            try:
                fill(rename={"model.*": "*"})  # as ckpt 0.1.0 named them
            except NamesError:
                raise err from None
        model.load_state_dict(state)  # also what was filled: other tensors may be copies

    def _check_adapter(self, own: Mapping[str, Any]) -> None:
        """Raise NamesError unless the adapter translates all tensors of the model: torchtitan would leave them out without a word."""
        with job_of(self.checkpointer)[0].fails_together("translation", self.folder):
            there = self.sd_adapter.from_hf(self.sd_adapter.to_hf(dict(own)))
            buffers = (name for part in self.states[checkpoint.MODEL].model for name, _ in part.named_buffers())
            if missing := sorted(own.keys() - there.keys() - {*buffers}):
                raise NamesError(f"sd_adapter gives nothing for {', '.join(missing[:3])}", hint="mend its to_hf and from_hf")


class _Stateful(Fenced):
    """A container that is an Optimizer by class only: its state is what its own ``state_dict`` says."""

    def __init__(self, value: Any) -> None:
        self.optimizers, self.state_dict, self.load_state_dict = value.optimizers, value.state_dict, value.load_state_dict


def _state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    there = {name: value for name, value in state_dict.items() if value is not None}
    return {name: _Stateful(value) if hasattr(value, "optimizers") and hasattr(value, "step") else value for name, value in there.items()}
