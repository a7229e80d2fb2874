"""DeepSpeed's engine with ckpt's checkpoints.

>>> use(engine, "runs/a")  # doctest: +SKIP
>>> engine.save_checkpoint()  # to runs/a/global_step100, in the background  # doctest: +SKIP
>>> engine.load_checkpoint()  # the newest of runs/a, of any stage and number of ranks  # doctest: +SKIP

DeepSpeed hands a ``CheckpointEngine`` one pickled dict for each rank and file, without a layout, so the two methods are replaced on this
engine. ``ckpt.state.flat_parameters`` has what an engine is made of. Source: ``deepspeed/runtime/engine.py``, 0.19.8.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt.errors import UsageError
from ckpt.io_backends.registry import join_url, real_url
from ckpt.needs import needed
from ckpt.policies import All, KeepPolicy
from ckpt.runs.named_run import NamedRun
from ckpt.state.walk import ReceivedState
from ckpt.text import url_text

from . import replace_methods

with needed("deepspeed", "deepspeed"):
    from deepspeed.runtime.engine import DeepSpeedEngine


class EngineCheckpoints:
    """What :func:`use` gives: what the engine's own methods are replaced by."""

    def __init__(self, engine: DeepSpeedEngine, checkpointer: NamedRun) -> None:
        self.engine = engine
        self.checkpointer = checkpointer
        self._own = replace_methods(engine, self, ("save_checkpoint", "load_checkpoint"))

    def state(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """The state as ``ckpt.load`` takes it."""
        return {"engine": self.engine, "client_state": dict(client_state)}

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,  # noqa: FBT001  DeepSpeed's
        exclude_frozen_parameters: bool = False,  # noqa: FBT001
    ) -> bool:
        """In place of ``DeepSpeedEngine.save_checkpoint``. Without a ``tag``, below the root, it is one of the run's steps."""
        if exclude_frozen_parameters or not save_latest:
            hint = "use(engine, root, trainable=True) leaves frozen parameters out; the newest is found without a file that names it"
            raise UsageError("exclude_frozen_parameters and save_latest=False are not those of this save_checkpoint", hint=hint)
        state, run, root = partial(self.state, client_state or {}), self.checkpointer, self._root(save_dir)
        if tag is None and root == run.root:
            run.save(self.engine.global_steps, state)
        else:
            run.save_at(join_url(root, f"global_step{self.engine.global_steps}" if tag is None else str(tag)), state)
        return True

    def _root(self, folder: str | os.PathLike[str] | None) -> str:
        """A directory that was named: that of the run in the words of the run."""
        own = self.checkpointer.root
        return own if folder is None or real_url(url_text(folder)) == real_url(own) else url_text(folder)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        load_module_strict: bool = True,  # noqa: FBT001
        load_optimizer_states: bool = True,  # noqa: FBT001
        load_lr_scheduler_states: bool = True,  # noqa: FBT001
        load_module_only: bool = False,  # noqa: FBT001
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """In place of ``DeepSpeedEngine.load_checkpoint``; what DeepSpeed has written itself goes to its own method. Without a ``tag`` what
        was saved last, under any; DeepSpeed's own while there is nothing else. Gives the URL and the client's state; twice None if there is
        no checkpoint."""
        run, root = self.checkpointer, self._root(load_dir)
        last, is_step = run.saved_last(root if tag is None else join_url(root, str(tag)))
        if last is None and (tag is not None or any(os.path.exists(os.path.join(root, n)) for n in ("latest", "latest_universal"))):
            flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
            return self._own["load_checkpoint"](root, tag, *flags)  # type: ignore[no-any-return]
        if custom_load_fn is not None:
            raise UsageError("custom_load_fn is not called by this load_checkpoint", hint="ckpt.load(url, state, rename=...) maps names")
        wanted = {"optimizer": load_optimizer_states, "lr_scheduler": load_lr_scheduler_states, "counters": True}
        parts = [name for name, is_so in wanted.items() if is_so and not load_module_only]
        only = ["engine.module.*", *(f"engine.{name}*" for name in parts), "client_state*"]
        options: dict[str, Any] = {"strict": load_module_strict} | ({} if len(parts) == len(wanted) else {"only": only})
        client = ReceivedState()  # takes tensors, too, which an empty dict does not
        state = {"engine": self.engine, "client_state": client}
        if last is not None and (tag is not None or not is_step):
            run.load_from(last, state, **options)
        elif root != run.root:
            raise UsageError(f"there is no checkpoint in {root}", hint="name the directory that save_checkpoint was given, or its run")
        elif run.restore(state, **options) is None:
            return None, None
        elif run.restored_from is not None:  # a damaged one is passed over
            last = run.restored_from.url
        return last, client.value or {}


def use(engine: DeepSpeedEngine, root: str | os.PathLike[str], *, keep: KeepPolicy | None = None, **options: Any) -> EngineCheckpoints:
    """Make ``save_checkpoint`` and ``load_checkpoint`` of an engine ckpt's: in the background, loaded on any number of ranks and into any
    stage.

    Args:
        root: path or URL of the run; ``save_checkpoint()`` saves to ``global_step<n>`` below it.
        keep: what stays of the run, by default all.
        options: those of :class:`ckpt.Checkpointer`: ``codec``, ``job``, ``trainable``...
    """
    return EngineCheckpoints(engine, NamedRun(url_text(root), "global_step{}", keep=keep or All(), **options))
