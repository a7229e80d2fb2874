"""A run whose steps lie where another library would have put them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ckpt.api import load, save_async
from ckpt.engine.save.background import SaveHandle
from ckpt.engine.save.options import SaveArguments
from ckpt.errors import UsageError
from ckpt.io_backends.registry import join_url

from .checkpointer import Checkpointer, job_of
from .step_listing import list_steps


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

    def saved_last(self, root: str) -> tuple[str | None, bool]:
        """URL of the checkpoint that was saved last at ``root`` or below it, under any name, as the leading rank sees it, and whether
        :meth:`restore` takes it; None if there is none. Waits for the save that goes on; collective."""
        self.wait()

        def look() -> tuple[str | None, bool]:
            there = [s for s in list_steps(root) if s.id is not None]
            last = max(there, key=lambda s: s.id or "", default=None)
            highest = max((s.number for s in there if s.number is not None and s.abandoned is None), default=-1)
            return (last.url, last.url == self._place(max(highest, 0))) if last is not None else (None, False)

        group, timeout = job_of(self)
        url, is_step = group.call("load", root, timeout).map_reduce("latest", dict, lambda rows: look())
        return url, is_step

    def load_from(self, url: str, state: Mapping[str, Any], **options: Any) -> None:
        """Load what is at ``url``, with the options of the run."""
        same = ("only", "trainable", "layout", "job", "progress")
        load(url, state, **{k: v for k, v in self._saving.items() if k in same} | options)

    def wait(self) -> None:
        handle, self._elsewhere = self._elsewhere, None
        if handle is not None:
            with suppress(Exception):  # counted below, so that the next save does not raise it
                handle.result()
            error = self._failed_saves.count(f"the save of {handle.url} failed", handle.durable.exception(), level=logging.INFO)
            if error is not None:
                raise error
        super().wait()
