"""Notes saves that failed outside of a Checkpointer in the log of the run that they belong to, as a Checkpointer notes its own."""

from __future__ import annotations

import logging
import re
import time

from ckpt.coordination.members import Members
from ckpt.errors import CkptError
from ckpt.formats.native.runlog import PATH, LogEntry, add_entry
from ckpt.io_backends.registry import open_backend

from .event_threads import ListenerThread
from .reporter import error_fields

log = logging.getLogger("ckpt")

_STEP = re.compile(r"(.*[^/])/+step-(\d+)/*")


def note_failed_save(group: Members, url: str, error: BaseException, phase: str, seconds: float) -> None:
    """On the leading rank: note a failed save, if its URL lies in a run, that is, beside a log of one or other steps. Does not wait: a
    program that ends waits for the note (``event_threads.FLUSH``)."""
    match = _STEP.fullmatch(str(url))  # as a Checkpointer names its steps; what is no str was refused, and has no run
    if match is None or group.rank != group.leader or not isinstance(error, Exception):  # who interrupts a save knows it
        return
    root, step = match[1], int(match[2])
    entry = LogEntry(
        kind="save",
        at=time.time(),
        rank=group.rank,
        ranks=group.size,
        step=step,
        url=url,
        phase=phase,
        seconds=seconds,
        **error_fields(error),
    )
    thread: ListenerThread[LogEntry] = ListenerThread(lambda entry: _add(root, url, entry))
    thread.post(entry)
    thread.end()


def _add(root: str, url: str, entry: LogEntry) -> None:
    try:
        backend = open_backend(root)
        own = url.rstrip("/").rpartition("/")[2]
        names = {name.rstrip("/") for name in backend.list_dir()} - {own}
        if any(name == PATH or name.startswith("step-") for name in names):
            add_entry(backend, entry)
    except CkptError as err:
        log.debug("the log of the run %s is not kept: %s", root, err)
