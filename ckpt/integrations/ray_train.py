"""Ray Train with ckpt's checkpoints: Ray is told of each one that is committed, and one more is saved before a node is taken away.

>>> def train_loop(config):  # doctest: +SKIP
...     with RayCheckpointer(f"{storage_path}/{name}/steps", save=EverySteps(500)) as c:
...         start = c.restore(state)
...         for n in range(0 if start is None else start + 1, steps):
...             c.step(n, state, metrics={"loss": train(n)})

Ray copies no files (``NO_UPLOAD``): ``root`` has to be below the run's own directory in Ray's storage. Workers that Ray starts again,
however many, go on from the newest checkpoint there. Source of the interface: ``ray.train``, 2.60.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.engine.save.background import SaveHandle
from ckpt.errors import UsageError
from ckpt.needs import needed, warn_if_untried
from ckpt.runs.checkpointer import Checkpointer, job_of

with needed("ray", "ray[train]"):
    from ray import train
warn_if_untried("ray", "2.60")

log = logging.getLogger("ckpt")


class RayCheckpointer(Checkpointer):
    """A :class:`ckpt.Checkpointer` in the loop of a ``TorchTrainer``.

    Ray's ``report`` and ``get_preemption_info`` are barriers, so all workers come to them at the same step: a checkpoint is reported when
    the next save begins, in ``wait`` or at the end, with its metrics and its step.

    Args:
        look_every: calls of :meth:`step` between two looks whether a node will be taken away. Then the step is saved, and training goes on
            until Ray starts the workers again. 0: never.
        arguments: those of the Checkpointer, but for ``local`` and ``memory``.
    """

    def __init__(self, root: str | os.PathLike[str], *, look_every: int = 10, **arguments: Any) -> None:
        if arguments.get("local") is not None or arguments.get("memory") is not None:
            raise UsageError("only checkpoints at the root are reported to Ray", hint="leave local= and memory= out")
        context: Any = getattr(sys.modules.get("ray.train.v2._internal.execution.context"), "_train_context", None)  # no public name has it
        if context is not None and context.train_run_context.run_config.checkpoint_config.num_to_keep is not None:
            raise UsageError("Ray would remove what later checkpoints need", hint="leave num_to_keep out, and give keep=")
        super().__init__(root, **arguments)
        self._look_every, self._looks = look_every, 0
        self._preempted_nodes: set[str] = set()
        self._unreported: tuple[int, SaveHandle, Mapping[str, float]] | None = None

    def step(
        self, n: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """As :meth:`ckpt.Checkpointer.step`; and if Ray says so now and then, the step is saved whatever the policy says."""
        begun = super().step(n, state, metrics=metrics)
        self._looks += 1
        if not self._look_every or self._looks % self._look_every:
            return begun
        info = train.get_preemption_info()
        nodes = set(info.preempted_node_ids) if info is not None else set()
        if nodes <= self._preempted_nodes:
            return begun
        self._preempted_nodes |= nodes
        log.warning("step %d is saved: Ray loses %d nodes: %s", n, len(nodes), info)
        if not begun:
            self.save(n, state, metrics=metrics)
        self.wait()
        return True

    def _begin(self, n: int, state: Any, metrics: Mapping[str, float] | None, **options: Any) -> tuple[BaseException | None, SaveHandle]:
        failed, handle = super()._begin(n, state, metrics, **options)
        self._report()  # of the save before, which has ended on all ranks alike
        self._unreported = n, handle, metrics or {}
        return failed, handle

    def wait(self) -> None:
        super().wait()
        self._report()

    def _report(self) -> None:
        if self._unreported is None:
            return
        (n, handle, metrics), self._unreported = self._unreported, None
        if handle.durable.exception() is None:
            group, _ = job_of(self)
            checkpoint = train.Checkpoint(handle.url) if group.rank == group.leader else None
            reported = {**{name: float(value) for name, value in metrics.items()}, "step": n}
            train.report(reported, checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)
