"""A run whose steps lie where another library would have put them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpt.api import load, save_async
from ckpt.engine.save.background import SaveHandle
from ckpt.engine.save.options import SaveArguments
from ckpt.errors import UsageError
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.registry import join_url, open_backend

from .checkpointer import Checkpointer, job_of


class NamedRun(Checkpointer):
    """A run whose directories have a framework's names, such as ``checkpoint_{}``, and a job that also saves elsewhere."""

    def __init__(self, root: str, name: str, **options: Any) -> None:
        wrong = [key for key in ("local", "memory", "member") if options.get(key)]
        if wrong:
            raise UsageError(f"{wrong[0]}= does not go with names of a framework", hint="save with your own ckpt.Checkpointer")
        self._name = name
        self._elsewhere: SaveHandle | None = None
        self._saving = {k: v for k, v in options.items() if k in (*SaveArguments.__annotations__, "capture", "staging_bytes")}
        super().__init__(root, **options)

    def url(self, n: int) -> str:
        return join_url(self.root, self._name.format(n))

    _place = url

    def save_at(self, url: str, state: Callable[[], Mapping[str, Any]]) -> None:
        """Begin to save to a place that is none of the run's steps."""
        self.wait()
        with job_of(self)[0].fails_together("save", url):
            made = state()
        self._elsewhere = save_async(url, made, **self._saving)

    def is_checkpoint(self, url: str) -> bool:
        """Whether a checkpoint of ckpt is there, as the leading rank sees it, once the save that goes on is; collective."""
        self.wait()
        group, timeout = job_of(self)
        call = group.call("load", url, timeout)
        return bool(call.map_reduce("format", dict, lambda rows: committed_id(open_backend(url)) is not None))

    def load_from(self, url: str, state: Mapping[str, Any], **options: Any) -> None:
        """Load what is at ``url``, with the options of the run."""
        same = ("only", "trainable", "layout", "job", "progress")
        load(url, state, **{k: v for k, v in self._saving.items() if k in same} | options)

    def wait(self) -> None:
        handle, self._elsewhere = self._elsewhere, None
        if handle is not None:
            handle.result()
        super().wait()
