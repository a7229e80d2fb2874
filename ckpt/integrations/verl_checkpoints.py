"""verl's FSDP engines save and resume with ckpt: in the background, to any storage, on any number of ranks.

>>> use()  # doctest: +SKIP

in a module that verl imports in each worker (``VERL_USE_EXTERNAL_MODULES``), or once before the engine is made. verl has no registry of
checkpoint managers: its engines make the one of ``verl.utils.checkpoint.fsdp_checkpoint_manager``, whose name leads to ours from then on.
For verl 0.9.1.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import verl.utils.checkpoint.fsdp_checkpoint_manager as own
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from ckpt.api import load, save_async
from ckpt.concurrency import Pending
from ckpt.engine.save.background import BackgroundSave
from ckpt.errors import UsageError
from ckpt.formats.fsdp import FORMAT_NAME
from ckpt.formats.registry import find_format
from ckpt.io_backends.registry import join_url
from ckpt.needs import warn_if_untried
from ckpt.runs.removal import remove_at
from ckpt.training import Generators

if TYPE_CHECKING:
    from ckpt.engine.save.background import SaveHandle

log = logging.getLogger("ckpt")

_OWN = own.FSDPCheckpointManager
_STEP = re.compile(r".*?(global_step_(\d+)(?:/.*)?)", re.DOTALL)
_RNG = "extra_state.rng"
_PARTS = {"model": ["model.*"], "optimizer": ["optim.*"], "extra": ["extra_state.lr_scheduler.*", _RNG]}


class CkptCheckpointManager(BackgroundSave, _OWN):  # type: ignore[misc, valid-type]
    """In place of verl's manager for FSDP versions 1 and 2. Configuration and tokenizer, and with ``hf_model`` the weights, are written to
    ``huggingface/`` as verl does.

    ``checkpoint.async_save=True`` saves in the background: then the tracker file is written when the checkpoint is committed.
    """

    checkpoint_save_contents: Any
    root: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}

    def url(self, local_path: str) -> str:
        """Where the checkpoint lies that verl calls ``local_path``."""
        match = _STEP.fullmatch(local_path.rstrip("/"))
        if self.root is None:
            return local_path
        if match is None:
            raise UsageError("use(root=) needs the step in the path: …/global_step_N/…", where=local_path)
        return join_url(self.root, match[1])

    def state(self) -> dict[str, Any]:
        """The state, by the names of verl's files."""
        parts = {"model": self.model, "optim": self.optimizer, "extra_state": {"rng": Generators(), "lr_scheduler": self.lr_scheduler}}
        return {name: part for name, part in parts.items() if part is not None}

    def _part(self, contents: Any) -> dict[str, Any]:
        """The arguments for the part of the state that ``contents`` names."""
        wanted = [glob for name, globs in _PARTS.items() if name in contents for glob in globs]
        part: dict[str, Any] = {} if len(_PARTS.keys() - set(contents)) == 0 else {"only": wanted}
        return part | ({"trainable": True} if self.should_save_lora_only and self._has_lora() else {})

    def save_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """As verl calls it. Raises also what an earlier save failed with."""
        if local_path is None:
            return
        if hdfs_path is not None:
            raise UsageError("default_hdfs_dir is not used", where=hdfs_path, hint='use(root="s3://bucket/run")')
        self.wait()
        contents = self.checkpoint_save_contents
        self.checkpoint_save_contents = ["hf_model"] if self.should_save_hf_model else []
        try:
            super().save_checkpoint(local_path, None, global_step, None)
        finally:
            self.checkpoint_save_contents = contents
        # Eager: verl may move the parameters to the host when this returns.
        handle = save_async(self.url(local_path), self.state(), **{"capture": "eager", **self._part(contents), **self.options})
        background = bool(self.checkpoint_config and self.checkpoint_config.get("async_save", False))
        tracked = global_step if background else None
        self._saving = Pending(partial(self._finish, handle, local_path, max_ckpt_to_keep, tracked), "ckpt-verl")
        if not background:
            self.wait()

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        """Verl calls it before the checkpoint is committed: too early."""

    def _finish(self, handle: SaveHandle, path: str, keep: int | None, tracked: int | None) -> None:
        handle.durable.result()
        if self.rank != 0:
            return
        run = _STEP.fullmatch(path)
        if tracked is not None and run is not None:  # verl leaves it to the manager then
            tracker = Path(get_checkpoint_tracker_filename(path[: run.start(1)]))
            new = tracker.with_suffix(".new")
            new.write_text(str(tracked))
            os.replace(new, tracker)
        super().register_checkpoint(path, keep)

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        """Verl's retention: the commit record goes first, so that no half of a checkpoint is taken for one."""
        for each in [path] if isinstance(path, str) else path:
            remove_at(self.url(each))
        super().remove_previous_save_local_path(path)

    def load_checkpoint(self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:  # noqa: FBT001
        """As verl calls it. Files that verl has written are read as well, on any number of ranks, without the random numbers."""
        if local_path is None:
            return
        self.wait()
        url, part = self.url(local_path), self._part(self.checkpoint_load_contents)
        if self.root is not None and find_format(url) is None:
            url = local_path  # from before the run had this root
        if find_format(url) == FORMAT_NAME:
            part["only"] = [glob for glob in part.get("only", [g for globs in _PARTS.values() for g in globs]) if glob != _RNG]
            log.warning("%s is of verl: its random numbers are not taken", url)
        load(url, self.state(), **{k: v for k, v in self.options.items() if k == "job"}, **part)
        if self.rank == 0 and local_path not in self.previous_saved_paths:
            self.previous_saved_paths.append(local_path)


def use(root: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Have the FSDP engines of this process save and resume with ckpt.

    Args:
        root: where checkpoints go, such as ``s3://bucket/run``; without it, where verl's ``default_local_dir`` is. That directory has the
            position in the data and the tracker file in any case, so it must outlive the machine.
        options: of :func:`ckpt.save_async`: ``codec``, ``job``...
    """
    warn_if_untried("verl", "0.9.1")
    CkptCheckpointManager.root, CkptCheckpointManager.options = None if root is None else os.fspath(root), options
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "verl" and vars(module).get("FSDPCheckpointManager") is _OWN:
            module.FSDPCheckpointManager = CkptCheckpointManager  # type: ignore[attr-defined]
