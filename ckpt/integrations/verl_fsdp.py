"""The checkpoint manager of verl's FSDP engines, and what all managers share. ``verl_checkpoints.use`` has verl make ours."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import verl.utils.checkpoint.fsdp_checkpoint_manager as own
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager, get_checkpoint_tracker_filename

from ckpt.api import load, save_async
from ckpt.concurrency import Pending
from ckpt.engine.save.background import BackgroundSave
from ckpt.errors import UsageError
from ckpt.formats.fsdp import FORMAT_NAME
from ckpt.formats.registry import find_format
from ckpt.io_backends.registry import join_url
from ckpt.runs.removal import remove_at
from ckpt.training import Generators

log = logging.getLogger("ckpt")

OWN = own.FSDPCheckpointManager
_STEP = re.compile(r".*?(global_step_(\d+)(?:/.*)?)", re.DOTALL)
_RNG = "extra_state.rng"
PARTS = {"model": ["model.*"], "optimizer": ["optim.*"], "extra": ["extra_state.lr_scheduler.*", _RNG]}


class VerlManager(BackgroundSave):
    """In place of a manager of verl: a step is tracked, and earlier ones are removed, when it is committed."""

    root: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    checkpoint_config: Any
    previous_saved_paths: list[str]
    rank: int

    def urls(self, local_path: str) -> list[str]:
        """Where the checkpoints lie of the step that verl calls ``local_path``."""
        match = _STEP.fullmatch(local_path.rstrip("/"))
        if self.root is None:
            return [local_path]
        if match is None:
            raise UsageError("use(root=) needs the step in the path: …/global_step_N/…", where=local_path)
        return [join_url(self.root, match[1])]

    begin: Callable[[str, int], Callable[[], object]]
    """Begin to save a step; what it returns waits until that is committed."""
    read: Callable[[str], object]

    @property
    def background(self) -> bool:
        return bool(self.checkpoint_config and self.checkpoint_config.get("async_save", False))

    def save_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """As verl calls it. Raises also what an earlier save failed with."""
        if local_path is None:
            return
        if hdfs_path is not None:
            raise UsageError("default_hdfs_dir is not used", where=hdfs_path, hint='use(root="s3://bucket/run")')
        self.wait()
        committed = self.begin(local_path, global_step)
        tracked = global_step if self.background else None  # verl leaves it to the manager then
        self._saving = Pending(partial(self._finish, committed, local_path, max_ckpt_to_keep, tracked), "ckpt-verl")
        if not self.background:
            self.wait()

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        """Verl calls it before the checkpoint is committed: too early."""

    def _finish(self, committed: Callable[[], object], path: str, keep: int | None, tracked: int | None) -> None:
        committed()
        if self.rank != 0:
            return
        run = _STEP.fullmatch(path)
        if tracked is not None and run is not None:
            tracker = Path(get_checkpoint_tracker_filename(path[: run.start(1)]))
            new = tracker.with_suffix(".new")
            new.write_text(str(tracked))
            os.replace(new, tracker)
        self.previous_saved_paths = [earlier for earlier in self.previous_saved_paths if earlier != path]
        BaseCheckpointManager.register_checkpoint(self, path, keep)

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        """Verl's retention: the commit record goes first, so that no half of a checkpoint is taken for one."""
        for each in [path] if isinstance(path, str) else path:
            for url in self.urls(each):
                remove_at(url)
        BaseCheckpointManager.remove_previous_save_local_path(self, path)

    def load_checkpoint(self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:  # noqa: FBT001
        """As verl calls it. Files that verl has written are read as well. Retention counts the step."""
        if local_path is None:
            return
        self.wait()
        self.read(local_path)
        if self.rank == 0 and local_path not in self.previous_saved_paths:
            self.previous_saved_paths.append(local_path)


class CkptCheckpointManager(VerlManager, OWN):  # type: ignore[misc, valid-type]
    """In place of verl's manager for FSDP versions 1 and 2. Configuration and tokenizer, and with ``hf_model`` the weights, are written to
    ``huggingface/`` as verl does."""

    checkpoint_save_contents: Any

    def state(self) -> dict[str, Any]:
        """The state, by the names of verl's files."""
        parts = {"model": self.model, "optim": self.optimizer, "extra_state": {"rng": Generators(), "lr_scheduler": self.lr_scheduler}}
        return {name: part for name, part in parts.items() if part is not None}

    def _part(self, contents: Any) -> dict[str, Any]:
        """The arguments for the part of the state that ``contents`` names."""
        wanted = [glob for name, globs in PARTS.items() if name in contents for glob in globs]
        part: dict[str, Any] = {} if len(PARTS.keys() - set(contents)) == 0 else {"only": wanted}
        return part | ({"trainable": True} if self.should_save_lora_only and self._has_lora() else {})

    def begin(self, local_path: str, global_step: int) -> Callable[[], object]:
        contents = self.checkpoint_save_contents
        self.checkpoint_save_contents = ["hf_model"] if self.should_save_hf_model else []
        try:
            OWN.save_checkpoint(self, local_path, None, global_step, None)
        finally:
            self.checkpoint_save_contents = contents
        # Eager: verl may move the parameters to the host when this returns.
        (url,) = self.urls(local_path)
        return save_async(url, self.state(), **{"capture": "eager", **self._part(contents), **self.options}).durable.result

    def read(self, local_path: str) -> None:
        """Files of verl on any number of ranks, without the random numbers."""
        (url,), part = self.urls(local_path), self._part(self.checkpoint_load_contents)
        if self.root is not None and find_format(url) is None:
            url = local_path  # from before the run had this root
        if find_format(url) == FORMAT_NAME:
            part["only"] = [glob for glob in part.get("only", [g for globs in PARTS.values() for g in globs]) if glob != _RNG]
            log.warning("%s is of verl: its random numbers are not taken", url)
        load(url, self.state(), **{k: v for k, v in self.options.items() if k == "job"}, **part)
