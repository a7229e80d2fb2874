"""Hugging Face ``Trainer`` with ckpt's checkpoints.

>>> use(trainer, "runs/a")  # doctest: +SKIP
>>> trainer.train()  # goes on from the newest checkpoint in runs/a, if there is one  # doctest: +SKIP

The Trainer decides when to save, by its own arguments; what it writes then goes to ``runs/a/step-…``, in the background. Source of the
methods that are replaced on the trainer, and of what has to be restored when: ``transformers/trainer.py``, 5.23.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ckpt.api import load
from ckpt.api import open as open_view
from ckpt.errors import StateError, StorageError, UsageError
from ckpt.formats.native.paths import step_number
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.registry import join_url, open_backend, real_url
from ckpt.needs import needed, warn_if_untried
from ckpt.policies import All, KeepPolicy, Latest, SavePolicy, StepInfo
from ckpt.runs.checkpointer import Checkpointer, agreed_latest
from ckpt.runs.save_schedule import FailedSaves
from ckpt.runs.sidecars import Sidecars
from ckpt.runs.step_listing import step_name
from ckpt.text import url_text
from ckpt.training import Generators

from . import refuse, replace_methods

with needed("transformers", "transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState

log = logging.getLogger("ckpt")

_REPLACED = ("train", "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_best_model")


class BestOfTrainer(KeepPolicy):
    """The step whose model the trainer loads at the end."""

    __slots__ = ("trainer",)

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __repr__(self) -> str:
        return "load_best_model_at_end"

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        state = self.trainer.state
        best = {state.best_global_step, _step_of(state.best_model_checkpoint)}  # the first may not have been saved
        return {s.step: repr(self) for s in steps if s.step in best}


class CheckpointCallback(TrainerCallback):
    """What :func:`use` gives a trainer: it saves by ``save``, and holds what the trainer's own methods are replaced by."""

    def __init__(self, trainer: Trainer, root: str, save: SavePolicy | None, options: Mapping[str, Any], *, weights: bool) -> None:
        self.trainer, self.root, self.policy, self.weights, self.options = trainer, root, save, weights, dict(options)
        self.checkpointer: Checkpointer | None = None
        """While the trainer trains."""
        self._sidecars: Sidecars | None = None
        self._failed = FailedSaves(1, leads=True)
        self._folder: str | None = None
        self._url: str | None = None
        self._step: int | None = None
        self._saved: int | None = None
        self._streams: list[tuple[Any, Any]] = []
        """Generators, and the states that they had when the checkpoint was saved."""
        self._own = replace_methods(trainer, self, _REPLACED)

    # ---- what there is to save

    def state(self) -> dict[str, Any]:
        """The state as ``ckpt.load`` takes it: ``model``, ``optimizer``, ``scheduler``, ``rng``, with mixed precision ``scaler``; on the
        first rank ``trainer``, the trainer's own state as JSON. With ``save_only_model`` ``model`` and ``trainer`` alone."""
        trainer = self.trainer
        state: dict[str, Any] = {"model": trainer.model}
        if not trainer.args.save_only_model:
            state["optimizer"] = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            state["scheduler"] = trainer.lr_scheduler
            state["rng"] = Generators()
            if trainer.args.n_gpu > 1:  # DataParallel: this process draws on all of them
                state["rng_devices"] = Generators({f"cuda{i}": g for i, g in enumerate(torch.cuda.default_generators)})
            if trainer.accelerator.scaler is not None:
                state["scaler"] = trainer.accelerator.scaler
        if trainer.args.process_index == 0:
            state["trainer"] = json.dumps(dataclasses.asdict(trainer.state) | {"stateful_callbacks": self._callback_states()})
        return state

    def _callback_states(self) -> dict[str, Any]:
        """As the trainer's own checkpoints have them: by the name of the class, a list if there are several of one class."""
        trainer = self.trainer
        states: dict[str, list[Any]] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: several if len(several) > 1 else several[0] for name, several in states.items()}

    # ---- saving

    @property
    def running(self) -> Checkpointer:
        """The checkpointer of the training that is going on."""
        if self.checkpointer is None:
            raise UsageError("the trainer is not training", hint="call trainer.train()")
        return self.checkpointer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.policy is not None and self.running.step(state.global_step, self.state):
            self._begun(state.global_step)
        if self.running.preempted:
            control.should_training_stop = True

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """In place of ``Trainer._save_checkpoint``."""
        state = self.trainer.state
        self._note_best(state)
        if self._saved == state.global_step:
            return
        self.trainer.store_flos()
        state.stateful_callbacks = self._callback_states()  # so does the method that this replaces
        logged = {k: v for entry in state.log_history if entry.get("step") == state.global_step for k, v in entry.items()}
        metrics = {k: float(v) for k, v in logged.items() if k not in ("step", "epoch") and isinstance(v, int | float)}
        self.running.save(state.global_step, self.state(), metrics=metrics)
        self._begun(state.global_step)

    def _begun(self, step: int) -> None:
        """A save of ``step`` goes on: what ``from_pretrained`` needs comes beside it."""
        self._saved = step
        tensors = self._pretrained_tensors()
        if self._sidecars is not None:
            handle = self.running.handle  # None if it was the last one before a stop, which was waited for
            durable = None if handle is None else handle.durable
            failed: StorageError | None = None
            try:
                self._sidecars.put(step_name(step), lambda folder: self._write_pretrained(folder, tensors), durable)
            except StorageError as err:
                failed = err
            if (error := self._failed.count("files beside a checkpoint are not written", failed)) is not None:
                raise error

    def _pretrained_tensors(self) -> dict[str, Any] | None:
        """The tensors that go beside a checkpoint, whole ones. Collective: each that is sharded is gathered. None for none."""
        model = self.trainer.model
        adapter = hasattr(model, "peft_config")
        if not (self.weights or adapter):
            return None
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        weights = {}
        for name, tensor in model.state_dict().items():
            if not adapter or name in trained:
                value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                if self._sidecars is not None:
                    weights[name] = value.cpu()
        return weights

    def _write_pretrained(self, folder: str, tensors: dict[str, Any] | None) -> None:
        trainer = self.trainer
        if tensors is not None and hasattr(trainer.model, "save_pretrained"):
            trainer.model.save_pretrained(folder, state_dict=tensors)
        else:
            for config in ("config", "generation_config"):
                if getattr(trainer.model, config, None) is not None:
                    getattr(trainer.model, config).save_pretrained(folder)
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    # ---- going on

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """In place of ``Trainer.train``. The URL of a checkpoint of ckpt: from there; another path goes to the trainer as it is. ``False``
        starts from the beginning, ``True`` does not. A trial of a hyperparameter search is a run of its own, such as ``run-0`` below the
        root, and starts from the beginning.

        Raises:
            UsageError: ``True``, and there is no checkpoint.
        """
        _check(self.trainer)
        options, root = self.options if self.policy is None else {"save": self.policy, **self.options}, self.root
        if kwargs.get("trial") is not None:
            root = join_url(root, os.path.basename(self.trainer._get_output_dir(kwargs["trial"])))
            resume_from_checkpoint = resume_from_checkpoint or False
        with Checkpointer(root, **options) as self.checkpointer, TemporaryDirectory() as folder:
            self._sidecars = Sidecars(root) if self.trainer.args.process_index == 0 else None
            self._failed = FailedSaves(options.get("give_up_after", 1), leads=True)
            self._url = self._from(resume_from_checkpoint)
            self._folder = folder if self._url is not None else None
            if self._url is not None:
                trainer_state = open_view(self._url).state().get("trainer")
                if not isinstance(trainer_state, str):
                    hint = "ckpt.load(url, {'model': model}) loads a model alone"
                    raise StateError("this checkpoint was not saved by a Trainer", where=self._url, hint=hint)
                Path(folder, TRAINER_STATE_NAME).write_text(trainer_state)
            given = self._folder or resume_from_checkpoint or None
            result = self._own["train"](resume_from_checkpoint=None if given is True else given, **kwargs)
            self.running.wait()
            if self._sidecars is not None:
                self._sidecars.wait()
        return result

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = None  # also if the trainer begins anew with a smaller batch
        if state.best_model_checkpoint is None:  # the trainer looks for a directory on this machine, and forgets the best one without it
            self._note_best(state)

    def _note_best(self, state: Any) -> None:
        """Name the best step as the best checkpoint if it is saved, or is being saved now."""
        best = state.best_global_step
        if not best or _step_of(state.best_model_checkpoint) == best:
            return
        if best in (state.global_step, self._saved) or any(s.number == best for s in self.running.steps()):
            state.best_model_checkpoint = self.running.url(best)

    def load_best_model(self) -> None:
        """In place of ``Trainer._load_best_model``."""
        self.running.wait()
        url = self.trainer.state.best_model_checkpoint
        if (step := _step_of(url)) is None:
            self._own["_load_best_model"]()
            return
        part = self.options.get("only")
        only = "model.*" if part is None else [name for name in open_view(url) if name.startswith("model.")]
        self.running.restore({"model": self.trainer.model}, step=step, only=only)

    def _from(self, given: Any) -> str | None:
        """The checkpoint to go on from, if it is one of ckpt; ``_step`` is its step if it is in the root."""
        self._step = None
        if given is None or given is True:
            self._step = agreed_latest(self.running)
            if self._step is None and given:
                hint = "resume_from_checkpoint=None goes on if there is one, and starts from the beginning if not"
                raise UsageError(f"no valid checkpoint found in {self.running.root}", hint=hint)
            if self._step is None:
                return None
            # This rank's own listing may have a later one, or not have it yet.
            return next((s.url for s in self.running.steps() if s.number == self._step), self.running.url(self._step))
        url = os.fspath(given) if given else ""
        if not url or committed_id(open_backend(url)) is None:
            return None
        own = (s.number for s in self.running.steps() if real_url(s.url) == real_url(url))
        self._step = next(own, None)
        return str(url)

    def load_from_checkpoint(self, checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """In place of ``Trainer._load_from_checkpoint``: the model is loaded with the optimizer, when both are where they will be."""
        if checkpoint != self._folder:
            self._own["_load_from_checkpoint"](checkpoint, *args, **kwargs)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """In place of ``Trainer._load_optimizer_and_scheduler``."""
        if checkpoint is None or checkpoint != self._folder or self._url is None:
            self._own["_load_optimizer_and_scheduler"](checkpoint)
            return
        state = self.state()
        if "optimizer" not in state:
            log.warning("save_only_model: the optimizer and the schedule begin anew at %s", self._url)
        if self._step is None:  # of another run
            load(self._url, state)
        else:
            self.running.restore(state, step=self._step)
        generators = [value for value in state.values() if isinstance(value, Generators)]
        self._streams = [(stream, stream.get()) for each in generators for stream in each.streams().values()]

    def load_rng_state(self, checkpoint: str | None) -> None:
        """In place of ``Trainer._load_rng_state``, which comes when the batches that were seen have been passed over."""
        if checkpoint is None or checkpoint != self._folder:
            self._own["_load_rng_state"](checkpoint)
        else:
            for stream, saved in self._streams:
                stream.set(saved)


def _step_of(url: str | None) -> int | None:
    return step_number(url.rstrip("/").rpartition("/")[2]) if url else None


def use(
    trainer: Trainer,
    root: str | os.PathLike[str],
    *,
    save: SavePolicy | None = None,
    keep: KeepPolicy | None = None,
    weights: bool = False,
    **options: Any,
) -> CheckpointCallback:
    """Make a trainer save to ``root`` and go on from there.

    ``trainer.train()`` then continues from the newest checkpoint: model, optimizer, scheduler, gradient scaler, random number generators,
    step, epoch, position in the data, logs, stateful callbacks. It saves when the trainer's arguments say so (``save_strategy``,
    ``save_steps``), and what was logged at that step becomes the metrics of the checkpoint. Works on one process, with DDP and with FSDP2.

    Beside each checkpoint lie configuration, tokenizer and, with PEFT, the adapter, as ``from_pretrained`` takes them.

    Args:
        root: path or URL of the run.
        save: further times to save (docs/policies.md), such as ``OnPreemption()``: when the signal has come, training stops after the save.
        keep: what stays, whatever ``save_total_limit`` of the trainer's arguments says; by default as many as that, or everything. With
            ``load_best_model_at_end`` the best checkpoint stays besides.
        weights: whether ``model.safetensors`` lies beside each checkpoint, too: the weights once more, gathered on the first rank, for
            which training waits. ``ckpt convert --to hf`` makes the same of any checkpoint later.
        options: those of :class:`ckpt.Checkpointer`: ``codec``, ``job``, ``capture``...

    Raises:
        UsageError: the trainer uses something that this does not go with.
    """
    warn_if_untried("transformers", "5.23")
    root = url_text(root)
    limit = trainer.args.save_total_limit
    keep = keep if keep is not None else Latest(limit) if limit else All()
    options["keep"] = keep | BestOfTrainer(trainer) if trainer.args.load_best_model_at_end else keep
    _check(trainer)
    if (own := type(trainer)._save_checkpoint) is not Trainer._save_checkpoint:  # in TRL most write a model card
        log.warning("%s is not called: what it writes beside a checkpoint is not there", own.__qualname__)
    made = CheckpointCallback(trainer, root, save, options, weights=weights)
    trainer.remove_callback(CheckpointCallback)
    trainer.add_callback(made)
    return made


def _check(trainer: Trainer) -> None:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    problems = {
        "DeepSpeed, which has an engine of its own": trainer.is_deepspeed_enabled,
        "FSDP version 1: set fsdp_version to 2": trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2,
        "a push of each checkpoint: set hub_strategy to end": trainer.args.push_to_hub and trainer.args.hub_strategy != "end",
    }
    refuse("transformers", problems)
