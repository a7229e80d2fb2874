"""The numbers in an event, under the names that all monitors give them; and what says which checkpoint it was."""

from __future__ import annotations

import os

from ckpt.errors import CkptError
from ckpt.events.event import Event
from ckpt.formats.native.writer import read_record
from ckpt.io_backends.registry import is_file_system, open_backend
from ckpt.text.json_reader import parse_json


def numbers(event: Event) -> dict[str, float]:
    """Name → value; empty for events that have none worth a curve."""
    if event.kind == "save.durable":
        values = {
            "save_seconds": event.seconds,
            "save_blocked_seconds": event.blocked,
            "save_bytes": event.tensor_bytes,
            "save_stragglers": len(event.stragglers),
        }
    elif event.kind == "restore" and event.error is None:
        values = {"restore_seconds": event.seconds, "restore_bytes": event.tensor_bytes}
    elif event.kind == "save.published":
        values = {"publish_seconds": event.seconds}
    else:
        values = {}
    return {name: float(value) for name, value in values.items() if value is not None}


def digest_of(url: str) -> str | None:
    """The digest of the commit record at ``url``, which covers the whole checkpoint; None if it cannot be read any more."""
    try:
        data = read_record(open_backend(url))
        return str(parse_json(data)["digest"]) if data is not None else None
    except (CkptError, ValueError, LookupError, TypeError):
        return None


def reference(event: Event) -> dict[str, object]:
    """What another tool has to remember to find this checkpoint again, and to know that it is the same."""
    digest = None if event.url is None else digest_of(event.url)
    fields = {"url": event.url, "id": event.id, "digest": digest, "step": event.step, "tensor_bytes": event.tensor_bytes}
    return {name: value for name, value in fields.items() if value is not None}


def uri(url: str) -> str:
    """``url`` with a scheme, as references to artifacts have it."""
    return f"file://{os.path.abspath(url)}" if is_file_system(url) and "://" not in url else url
