"""Whether a store behind fsspec creates objects only if they are absent, tried once per bucket: some take the condition and ignore it.

Without it two jobs that save to one place could both believe that they did, so such a store is refused, unless somebody has said that
never more than one job saves to one place (``CKPT_CONDITIONAL_PUT=emulate``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ckpt import settings
from ckpt.errors import ConflictError, StorageError

from .errors import fsspec_errors

_PROBE, _AGAIN = b"probe", b"again"

_known: dict[tuple[str, str], bool] = {}
_writable: set[tuple[str, str]] = set()
"""File systems and places below which an object could be written."""


def only_if_absent(fs: Any) -> dict[str, Any]:
    """The argument of ``pipe_file`` by which this file system creates an object only if it is absent; none if it has none."""
    parameters = inspect.signature(fs.pipe_file).parameters
    if "mode" not in parameters and "overwrite" in parameters:
        return {"overwrite": False}
    hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())  # to the file system that it wraps, perhaps
    return {"mode": "create"} if "mode" in parameters or hands_on else {}


def is_known(fs: Any, bucket: str) -> bool:
    """Whether ``bucket`` has been tried."""
    return (fs._fs_token, bucket) in _known


def is_writable(fs: Any, place: str) -> bool:
    """Whether an object could be written below ``place`` before."""
    return (fs._fs_token, place) in _writable


def note_writable(fs: Any, place: str) -> None:
    """That one was written there."""
    _writable.add((fs._fs_token, place))


def try_it(fs: Any, bucket: str, key: str, where: str, put: Callable[[dict[str, Any]], object]) -> None:
    """Find out whether ``bucket`` keeps the condition. ``put`` writes ``key``, which is fresh, with these arguments of ``pipe_file``."""
    condition = only_if_absent(fs)
    if not condition:
        put({})
        kept = False
    else:
        kept = _creates(where, lambda: put(condition)) and _refuses(where, lambda: fs.pipe_file(key, _AGAIN, **condition))
    _known[fs._fs_token, bucket] = kept


def _creates(where: str, put: Callable[[], object]) -> bool:
    """False if the file system does not know the argument."""
    try:
        with fsspec_errors(where, "write"):
            put()
    except StorageError as err:
        if isinstance(err.__cause__, NotImplementedError | ValueError | TypeError):
            return False
        raise
    return True


def _refuses(where: str, again: Callable[[], object]) -> bool:
    try:
        with fsspec_errors(where, "write"):
            again()
    except ConflictError:
        return True
    return False


def conditional(fs: Any, bucket: str, where: str) -> bool:
    """Whether ``bucket``, which has been tried, keeps the condition."""
    kept = _known[fs._fs_token, bucket]
    if not kept and settings.conditional_put() == "require":
        raise StorageError(
            "the store ignores or does not offer `create only if absent`, so two saves at once could both believe that they were committed",
            where=where,
            hint="set CKPT_CONDITIONAL_PUT=emulate if never more than one job saves to one place (docs/object-storage.md)",
        )
    return kept
