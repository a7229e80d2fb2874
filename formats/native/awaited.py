"""What a run of several jobs waits for while a step is not committed (docs/format.md §17)."""

from __future__ import annotations

from ckpt.errors import NotCommittedError, NotFoundError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.text import parse_object

GENERATION_PATH = "joint.json"
"""Beside the steps: the members of the run, and which restart they have in common."""
GENERATION_LIMIT = 1 << 20
"""Bytes of it that are read."""
MARKS = "members"
"""Directory of a joint step that says which members have saved it."""


def unfinished_step(backend: Backend, prefix: str, url: str) -> str | None:
    """Which members have saved the step at ``url``, below ``prefix`` of ``backend``, that has no commit record, and who is awaited; None if
    no member has marked it."""
    latest = max(backend.list_dir(f"{prefix}{MARKS}"), default="").rstrip("/")
    names = backend.list_dir(f"{prefix}{MARKS}/{latest}") if latest else []
    saved = sorted({name.partition("-")[0] for name in names if name.count("-") == 3 and not name.startswith(".")})
    if not saved:
        return None
    by = f"saved by {', '.join(saved)}"
    generation, joined = _members(url.rstrip("/").rpartition("/")[0])
    if not joined:
        return f"{by}: the other members are awaited"
    if generation != latest:
        return f"{by} before the members restarted: it will not be committed"
    awaited = [name for name in joined if name not in saved]
    return f"{by}; awaited: {', '.join(awaited)}" if awaited else f"{by}: all members; none of them has committed it"


def unfinished_run(url: str) -> NotCommittedError | None:
    """That the run of several jobs at ``url`` has no step, and which members have begun; None if there is no such run."""
    joined = _members(url)[1]
    if not joined:
        return None
    states = ", ".join(f"{name} ({'restored' if there else 'awaited'})" for name, there in joined.items())
    return NotCommittedError(
        f"this is a run of several jobs whose members have committed no step: {states}",
        where=url,
        hint="a step exists once all members have saved it; `ckpt ls` shows which have",
    )


def _members(run: str) -> tuple[str, dict[str, bool]]:
    """The generation of a run, and of each of its members whether it takes part; none if nobody can say."""
    backend = open_backend(run)
    backend.evict(GENERATION_PATH)
    try:
        values = parse_object(backend.read_whole(GENERATION_PATH, GENERATION_LIMIT))
        return str(values["id"]), {str(name): name in values["joined"] for name in values["members"]}
    except (NotFoundError, ValueError, KeyError, TypeError):  # who restores says that it is damaged
        return "", {}
