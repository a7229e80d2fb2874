"""Files of another library in the directories of steps: configuration, tokenizer, adapter, so that ``from_pretrained`` takes a step.

They are no part of the checkpoint: nothing of ckpt reads, copies or verifies them. They come when it is committed, and go when it went.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ckpt.concurrency import Pending
from ckpt.errors import StorageError
from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.formats.native.paths import step_number
from ckpt.io_backends.posix_files import storage_errors
from ckpt.io_backends.registry import open_backend, scheme_of

from .step_listing import step_name

_PREFIX = ".sidecars-"
_BLOCK = 8 << 20


class Sidecars:
    """Those of the run at ``root``, as one process writes them."""

    def __init__(self, root: str) -> None:
        self.backend = open_backend(root)
        self._local = Path(self.backend.url) if scheme_of(root) in ("", "file") else None
        self._names: set[str] = set()
        self._pending: Pending[None] | None = None
        for left in self._local.glob(f"{_PREFIX}*") if self._local is not None else ():  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def put(self, directory: str, write: Callable[[str], object], durable: Future[Any] | None) -> None:
        """``write`` files into the folder that it is given, now; they appear in ``directory`` of the run once ``durable`` is done, if it
        did not fail. That those before could not be put is raised when these are on their way."""
        failed: StorageError | None = None
        try:
            self.wait()
        except StorageError as err:
            failed = err
        with storage_errors(directory, "write the files beside the checkpoint"):
            if self._local is not None:
                self._local.mkdir(parents=True, exist_ok=True)
            folder = Path(mkdtemp(prefix=_PREFIX, dir=self._local))
            try:
                write(str(folder))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        self._pending = Pending(partial(self._put, directory, folder, durable), "ckpt-sidecars")
        if failed is not None:
            raise failed

    def _put(self, directory: str, folder: Path, durable: Future[Any] | None) -> None:
        try:
            if durable is None or durable.exception() is None:
                for file in filter(Path.is_file, sorted(folder.rglob("*"))):
                    name = file.relative_to(folder).as_posix()
                    self._names.add(name)
                    with storage_errors(f"{directory}/{name}", "write the file beside the checkpoint"):
                        self._put_file(file, f"{directory}/{name}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _put_file(self, file: Path, path: str) -> None:
        if self._local is not None:
            (self._local / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, self._local / path)
            return
        self.backend.delete(path)  # of an earlier save of the same step
        with file.open("rb") as source, self.backend.create(path, file.stat().st_size) as writer:
            at = 0
            while data := source.read(_BLOCK):
                writer.write(at, [data])
                at += len(data)
            writer.commit()

    def wait(self) -> None:
        """Until they are there; then those of checkpoints that retention has removed go."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        for step in self.backend.list_dir():
            number = step_number(step)
            if number is not None and step == f"{step_name(number)}/" and COMMIT_PATH not in self.backend.list_dir(step.rstrip("/")):
                there = [entry.path for entry in self.backend.list_prefix(step)]
                if self._names.issuperset(path.removeprefix(step) for path in there):
                    self.backend.delete_many(there)
