"""Events as lines of JSON in a file."""

from __future__ import annotations

import json
import os

from ckpt.events.event import Event


class JsonLines:
    """Appends each event to a local file, a line each, written at once.

    Args:
        path: the file; it and its directory are made if they are not there. The root of a run is a good place: ``runs/a/events.jsonl``.
        every_rank: whether each rank writes, into a file of its own: ``events.jsonl`` becomes ``events-00003.jsonl``.
    """

    def __init__(self, path: str | os.PathLike[str], *, every_rank: bool = False) -> None:
        self.path = os.fspath(path)
        self.every_rank = every_rank

    def __call__(self, event: Event) -> None:
        path = self.path
        if self.every_rank:
            stem, dot, ending = path.rpartition(".")
            path = f"{stem if dot else ending}-{event.rank:05d}{dot}{ending if dot else ''}"
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:  # one write of one line: processes that append do not mix theirs
            file.write(json.dumps(event.to_json()) + "\n")
