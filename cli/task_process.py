"""What a task runs: the command again, up to its part, with signs of life while it runs."""

from __future__ import annotations

import json
import os
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.errors import CkptError, RankFailedError, UsageError, error_to_json
from ckpt.net.channel import Row
from ckpt.net.divided_work import PartEnded, PartOrder, TaskPart
from ckpt.settings import __version__
from ckpt.text import parse_json

from .dividing import task_part
from .main import cli

SIGN = 2.0
"""Seconds between two signs of life of a task."""


def signs_of_part(call: str) -> Iterator[str]:
    """Do one part: a sign every ``SIGN`` seconds, the last one with its row or its error."""
    fields = parse_json(call)
    part = TaskPart(PartOrder.from_json(fields.pop("order")))
    end: dict[str, Any] = {}
    over = threading.Event()

    def work() -> None:
        try:
            end["row"] = _run_part(part, **fields)
        except Exception as err:  # noqa: BLE001 - the boundary of the task: the command raises it
            error = error_to_json(err)
            if not isinstance(err, CkptError):
                error["message"] = traceback.format_exc()
            end["error"] = error
        finally:
            over.set()

    threading.Thread(target=work, name="ckpt-part", daemon=True).start()
    host = socket.gethostname()
    yield json.dumps({"host": host, "progress": part.progress})
    while not over.wait(SIGN):
        yield json.dumps({"host": host, "progress": part.progress})
    yield json.dumps({"host": host, "progress": part.progress, **end})


def _run_part(part: TaskPart, version: str, arguments: list[str], folder: str, variables: Mapping[str, str]) -> Row:
    """Run the command up to its part."""
    if version != __version__:
        text = f"the machine has version {__version__} of ckpt, and the command {version}"
        raise UsageError(text, hint="install the same version on all machines of the cluster")
    try:
        os.chdir(folder)  # paths of the arguments may be relative
    except OSError as err:
        hint = "start the command in a folder that every machine has, such as /, with absolute paths or other URLs"
        raise UsageError(f"the machine has no folder {folder}: {err.strerror}", hint=hint) from err
    os.environ.update(variables)
    try:
        with task_part(part), cli.make_context("ckpt", list(arguments)) as context:
            cli.invoke(context)
    except PartEnded as end:
        if end.error is not None:
            raise end.error from None
        return end.row or {}
    raise RankFailedError("the command ended before its part in a task", hint="please report this")
