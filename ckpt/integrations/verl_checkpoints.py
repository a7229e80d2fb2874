"""verl's engines save and resume with ckpt: in the background, on any number of ranks, and those of FSDP to any storage.

>>> use()  # doctest: +SKIP

in a module that verl imports in each worker (``VERL_USE_EXTERNAL_MODULES``), or once before the engine is made. verl has no registry of
checkpoint managers: its engines make those of ``verl.utils.checkpoint``, whose names lead to ours from then on. For verl 0.9.1.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt.errors import UsageError
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job

from .verl_fsdp import OWN, PARTS, CkptCheckpointManager, VerlManager

_OURS: dict[str, tuple[Any, Any]] = {"FSDPCheckpointManager": (OWN, CkptCheckpointManager)}
try:
    import verl.utils.checkpoint.megatron_checkpoint_manager as own
    import verl.utils.megatron.dist_checkpointing as files

    from .megatron import CkptLoad, CkptSave
except ImportError as err:
    if err.name != "megatron":  # which is not installed
        logging.getLogger("ckpt").warning("the Megatron engine of verl keeps its checkpoint manager: %s", err)
else:
    core, own_load, own_manager = files.dist_checkpointing.core, files.load_dist_checkpointing, own.MegatronCheckpointManager

    class CkptMegatronCheckpointManager(VerlManager, own_manager):  # type: ignore[misc, valid-type]
        """In place of verl's manager for Megatron: the directories are verl's, and ckpt stores the tensors and objects in them. What
        ``use_megatron_fsdp`` saves, verl stores itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if self.root is not None:
                hint = "use() without root, and trainer.default_local_dir on storage that all machines share"
                raise UsageError("use(root=) is not for Megatron engines: Megatron writes common.pt beside", where=self.root, hint=hint)
            super().__init__(*args, **kwargs)
            self._jobs: dict[str, Job] = {}

        def urls(self, local_path: str) -> list[str]:
            return [os.path.join(local_path, part, "dist_ckpt") for part in PARTS]

        def begin(self, local_path: str, global_step: int) -> Callable[[], object]:
            for url in self.urls(local_path):
                Path(url, core.CONFIG_FNAME).unlink(missing_ok=True)  # parts of two saves are not one step
            self._saves: list[tuple[str, Callable[[], object]]] = []
            own_manager.save_checkpoint(self, local_path, None, global_step, None)
            saves, finalized = self._saves, self._finalized

            def committed() -> None:
                with ExitStack() as every:  # of several errors each is seen
                    for _, result in saves:
                        every.callback(result)
                for url, _ in saves if self.rank == 0 else ():
                    core.save_config(core.CheckpointingConfig("ckpt", 1), url)
                finalized()

            return committed

        def _save_dist_checkpoint(self, dist_checkpoint_path: str, state_dict: dict[str, Any]) -> None:
            url, options = dist_checkpoint_path, dict(VerlManager.options)
            if self.background:  # one save of a job goes on at a time, so each part is a job
                part = Path(url).parent.name
                if part not in self._jobs:
                    self._jobs[part] = replace(Job.of(options.get("job")), process_group=dist.new_group())
                options["job"] = self._jobs[part]
            replicas = files.mpu.get_data_parallel_group(with_context_parallel=True)
            strategy = files.FullyParallelSaveStrategyWrapper(CkptSave(**options), replicas)
            given = {"async_sharded_save": self.background, "content_metadata": self._build_sharded_state_dict_metadata()}
            request = files.dist_checkpointing.save(state_dict, url, strategy, **given)
            if request is not None:  # verl 0.9.1 never asks Megatron's queue what has ended
                self._saves.append((url, request.finalize_fns[0]))

        def _finalize_save(self, *, local_path: str, global_step: int, saved_any_dist_ckpt: bool, **_: Any) -> None:
            self._finalized = partial(self._write_checkpoint_manifest, local_path, global_step, saved_any_dist_ckpt)

        def read(self, local_path: str) -> None:
            own_manager.load_checkpoint(self, local_path)

    def load_part(sharded_state_dict: Any, ckpt_dir: str) -> Any:
        """In place of ``load_dist_checkpointing``."""
        written = core.maybe_load_config(ckpt_dir)
        if written is None or written.sharded_backend != "ckpt":
            # Copies: the optimizer's state is looked up by the model's tensors next, and Megatron detaches those that it loads.
            return own_load(files.dist_checkpointing.dict_utils.dict_list_map_outplace(copy, sharded_state_dict), ckpt_dir)
        strategy = CkptLoad(**{k: v for k, v in VerlManager.options.items() if k == "job"})
        return files.dist_checkpointing.load(sharded_state_dict, ckpt_dir, strategy)

    _OURS["MegatronCheckpointManager"] = own_manager, CkptMegatronCheckpointManager
    _OURS["load_dist_checkpointing"] = own_load, load_part


def use(root: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Have the engines of this process save and resume with ckpt.

    Args:
        root: where checkpoints of FSDP engines go, such as ``s3://bucket/run``; without it, where verl's ``default_local_dir`` is. That
            directory has the position in the data and the tracker file in any case, so it must outlive the machine.
        options: of :func:`ckpt.save_async`: ``codec``, ``job``...
    """
    warn_if_untried("verl", "0.9.1")
    VerlManager.root, VerlManager.options = None if root is None else os.fspath(root), options
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"]:
        for name, (theirs, ours) in _OURS.items():
            if vars(module).get(name) is theirs:
                setattr(module, name, ours)
