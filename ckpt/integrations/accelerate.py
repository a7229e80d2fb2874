"""Hugging Face ``Accelerator`` with ckpt's checkpoints.

>>> use(accelerator, "runs/a")  # doctest: +SKIP
>>> accelerator.save_state()  # to runs/a/checkpoint_0, in the background  # doctest: +SKIP
>>> accelerator.load_state()  # the newest of runs/a  # doctest: +SKIP

accelerate has no hook for optimizers, so methods are replaced on this accelerator. Source of what belongs to its state, and of the names:
``accelerate/accelerator.py`` and ``checkpointing.py``, 1.15.
"""

from __future__ import annotations

import os
from typing import Any

from ckpt.errors import ConflictError, NotFoundError, UsageError
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.registry import is_file_system, join_url, open_backend
from ckpt.needs import needed, warn_if_untried
from ckpt.policies import All, KeepPolicy, Latest
from ckpt.runs.checkpointer import agreed_latest, job_of
from ckpt.runs.named_run import NamedRun
from ckpt.text import url_text
from ckpt.training import Generators, LoaderState

from . import refuse, refuse_arguments, replace_methods

with needed("accelerate", "accelerate"):
    from accelerate import Accelerator
warn_if_untried("accelerate", "1.15")


class _Epochs:
    """The epoch that each loader comes to next. accelerate shuffles by it, and no loader has it in its own state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.loaders = accelerator._dataloaders
        self.running = accelerator.gradient_state.dataloader_references if accelerator.even_batches else []

    def state_dict(self) -> dict[str, Any]:
        # A loader counts its epoch when it is asked for more than the last batch. Without even batches ranks come there at other steps.
        return {"next": [getattr(each, "iteration", 0) + (each in self.running and each.end_of_dataloader) for each in self.loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader, epoch in zip(self.loaders, state["next"], strict=False):  # another job may have more
            loader.iteration = epoch


class AcceleratorCheckpoints:
    """What :func:`use` gives: what the accelerator's own methods are replaced by."""

    def __init__(self, accelerator: Accelerator, run: NamedRun, *, background: bool) -> None:
        self.accelerator, self.checkpointer, self.background = accelerator, run, background
        self._hooks_get_models = accelerator.distributed_type.value != "FSDP"
        self._own = replace_methods(accelerator, self, ("save_state", "load_state", "end_training"))

    def state(self) -> dict[str, Any]:
        """The state as ``ckpt.load`` takes it. Several objects of a kind are ``model``, ``model_1``…"""
        acc = self.accelerator
        kinds = {
            "model": acc._models,
            "optimizer": [getattr(each, "optimizer", each) for each in acc._optimizers],
            "scheduler": acc._schedulers,
            "loader": [LoaderState(each) for each in acc._dataloaders if getattr(each, "use_stateful_dataloader", False)],
            "custom": acc._custom_objects,
            "scaler": [acc.scaler] if acc.scaler is not None else [],
        }
        named = {f"{kind}_{i}" if i else kind: each for kind, several in kinds.items() for i, each in enumerate(several)}
        return named | {"rng": Generators(), "step": acc.step, "epochs": _Epochs(acc)}

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any) -> str:  # noqa: FBT001  accelerate's
        """In place of ``Accelerator.save_state``. ``safe_serialization`` makes no difference: nothing is ever pickled."""
        refuse_arguments(options)
        naming, run = self.accelerator.project_configuration, self.checkpointer
        numbered = output_dir is None or naming.automatic_checkpoint_naming
        url = run.url(naming.iteration) if numbered else url_text(output_dir or "")
        run.wait()

        def state() -> dict[str, Any]:
            """Called in the save: what fails on one rank ends it on all."""
            if numbered and committed_id(open_backend(url)) is not None:
                hint = "accelerator.load_state() resumes from the newest; ProjectConfiguration(iteration=...) sets the next number"
                raise ConflictError("there is a checkpoint of this number", where=url, hint=hint)
            # As accelerate gives them. That a hook takes some away leaves nothing out of the checkpoint.
            weights = [each.state_dict() for each in self.accelerator._models if self._hooks_get_models]
            for hook in self.accelerator._save_model_state_pre_hook.values():
                if is_file_system(url):
                    os.makedirs(url, exist_ok=True)
                hook(self.accelerator._models, weights, url)
            return self.state()

        try:
            run.save(naming.iteration, state) if numbered else run.save_at(url, state)
        except ConflictError:
            naming.iteration -= 1
            raise
        finally:
            naming.iteration += 1  # also if it failed here alone: others hear of that in the background
        if not self.background:
            run.wait()
        return url

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """In place of ``Accelerator.load_state``. A folder that accelerate has written itself goes to its own method."""
        run = self.checkpointer
        url = run.root if input_dir is None else url_text(input_dir)
        if input_dir is not None and run.saved_last(url)[0] != url and os.path.isdir(url):
            self._own["load_state"](url, load_kwargs, **options)
            return
        if options.pop("map_location", None) not in (None, "cpu", "on_device"):
            raise UsageError("map_location is 'cpu' or 'on_device'; tensors are filled where they are")
        refuse_arguments({**options, **(load_kwargs or {})})
        run.wait()
        if input_dir is None and (newest := agreed_latest(run)) is not None:
            url = run.url(newest)
        with job_of(run)[0].fails_together("load", url):
            state, models = self.state(), [each for each in self.accelerator._models if self._hooks_get_models]
            for hook in self.accelerator._load_model_state_pre_hook.values() if url != run.root else ():
                hook(models, url)
        if input_dir is not None:
            run.load_from(url, state)
        else:
            number = run.restore(state)
            if number is None:
                raise NotFoundError("there is no checkpoint", where=url, hint="save one with accelerator.save_state()")
            self.accelerator.project_configuration.iteration = number + 1
        self.accelerator.step = state["step"]

    def end_training(self) -> None:
        """In place of ``Accelerator.end_training``: the last save is waited for first."""
        self.checkpointer.close()
        self._own["end_training"]()


def use(
    accelerator: Accelerator,
    root: str | os.PathLike[str] | None = None,
    *,
    keep: KeepPolicy | None = None,
    background: bool = True,
    **options: Any,
) -> AcceleratorCheckpoints:
    """Make ``save_state`` and ``load_state`` of an accelerator ckpt's.

    The state is all that was prepared (models, optimizers, schedulers, loaders with a state of their own), what was given to
    ``register_for_checkpointing``, the gradient scaler, random numbers of every rank and the accelerator's step. Call it before or after
    ``prepare``. It loads on any number of ranks. One process, DDP, FSDP 1 and 2.

    Args:
        root: path or URL of numbered checkpoints; by default ``checkpoints`` below the accelerator's ``project_dir``, or here.
            A directory that ``save_state`` and ``load_state`` are given is taken as it is.
        keep: what stays of the numbered ones, by default as many as ``total_limit`` of the ``ProjectConfiguration`` says, or all.
        background: whether ``save_state`` returns while the save goes on. The next one, ``load_state`` and ``end_training`` wait for it.
        options: those of :class:`ckpt.Checkpointer`: ``codec``, ``job``, ``trainable``...

    Raises:
        UsageError: the accelerator uses something that this does not go with.
    """
    naming, kind = accelerator.project_configuration, accelerator.distributed_type.value
    all_nodes = "save_on_each_node: root and directories are seen by all nodes"
    by_itself = {f"{kind}, which saves by itself": kind in ("DEEPSPEED", "MEGATRON_LM", "XLA")}
    refuse("accelerate", by_itself | {all_nodes: naming.save_on_each_node})
    if root is None:
        root = join_url(url_text(accelerator.project_dir or "."), "checkpoints")
    keep = keep or (All() if naming.total_limit is None else Latest(naming.total_limit))
    run = NamedRun(url_text(root), "checkpoint_{}", keep=keep, **options)
    return AcceleratorCheckpoints(accelerator, run, background=background)
