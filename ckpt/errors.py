"""Every error that ckpt raises on purpose.

The tree (the builtin that each class also is stands in brackets; the number is the exit code of the ``ckpt`` command)::

    CkptError                                   1
    ├── UsageError [ValueError]                 2    the caller asked for something that cannot be
    │   ├── StateError [TypeError]              2    a value of the state cannot be stored
    │   └── LayoutError                         2    a layout does not fit the tensors or the ranks
    ├── NotFoundError [FileNotFoundError]      10    nothing is there
    ├── NotCommittedError                      11    files are there, but no commit record
    ├── FormatError                            12    not a format, version or feature that we know
    ├── CorruptError                           20    bytes are not what the digests say
    ├── MismatchError                          --    checkpoint and state do not fit
    │   ├── NamesError [KeyError]              21    missing or unexpected names
    │   └── ShapeError [ValueError]            22    shapes or dtypes differ
    ├── ConsistencyError                       22    the ranks' states do not make one checkpoint
    │   ├── CoverageError                      22    holes or overlaps
    │   └── ReplicaError                       22    replicas differ
    ├── StorageError [OSError]                 30    the storage failed
    │   ├── NoSpaceError                       30    it is full
    │   ├── AccessError [PermissionError]      30    it refuses us
    │   └── ConflictError [FileExistsError]    33    what is there is in the way, or has to stay
    ├── TornError                              23    a live state is a mix of two versions
    ├── BusyError                              32    a save is in progress already
    ├── CancelledError                        130    the caller cancelled it
    └── GroupError                             31    another rank
        ├── RankFailedError                    31    raised
        ├── ExchangeError                      31    sent bytes that came damaged
        └── DeadlineError [TimeoutError]       31    died or hangs

Each message names the problem, the place and the remedy. ``hint`` is the remedy, kept apart so that the command line can print it
on its own line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .text import in_known_places, printable

__all__ = [
    "AccessError",
    "BusyError",
    "CancelledError",
    "CkptError",
    "ConflictError",
    "ConsistencyError",
    "CorruptError",
    "CoverageError",
    "DeadlineError",
    "ExchangeError",
    "FormatError",
    "GroupError",
    "LayoutError",
    "MismatchError",
    "NamesError",
    "NoSpaceError",
    "NotCommittedError",
    "NotFoundError",
    "RankFailedError",
    "ReplicaError",
    "ShapeError",
    "StateError",
    "StorageError",
    "TornError",
    "UsageError",
]


class CkptError(Exception):
    """Root of the tree. ``hint`` says what to do about it; ``where`` is the URL, file or tensor it is about.

    ``str`` gives all three, fit for a terminal: control characters in names are escaped, and places are called as users know them.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = self.message
        if self.where is not None:
            text += f"\n  where: {self.where}" if "\n" in text else f" ({self.where})"
        if self.hint is not None:
            text += f"\n  try: {self.hint}"
        return printable(in_known_places(text))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.message, where=self.where, hint=self.hint), ()


def error_to_json(err: BaseException) -> dict[str, Any]:
    """An error, for another process: JSON, since nothing that a peer sends is unpickled."""
    message, where, hint = (err.message, err.where, err.hint) if isinstance(err, CkptError) else (str(err), None, None)
    ranks = {"ranks": err.ranks} if isinstance(err, GroupError) and err.ranks else {}
    causes = {"causes": err.causes} if isinstance(err, RankFailedError) and err.causes else {}
    return {"type": type(err).__name__, "message": message, "where": where, "hint": hint, **ranks, **causes}


def error_from_json(data: object) -> CkptError:
    """The error that :func:`error_to_json` was given. Whatever a peer sends, it is one of ours: the root if no other is named."""
    row: Mapping[str, Any] = data if isinstance(data, dict) else {}
    kind: type[CkptError] = globals()[row["type"]] if row.get("type") in __all__ else CkptError
    message, where, hint = (value if isinstance(value := row.get(name), str) else None for name in ("message", "where", "hint"))
    error = kind(message or "an error without a message", where=where, hint=hint)
    ranks = row.get("ranks")
    if isinstance(error, GroupError) and isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
        error.ranks = tuple(ranks)
    causes = row.get("causes")
    if isinstance(error, RankFailedError) and isinstance(causes, list) and all(isinstance(name, str) for name in causes):
        error.causes = tuple(causes)
    return error


def raised(err: BaseException, *kinds: type[CkptError]) -> bool:
    """Whether ``err`` is one of these, here or on another rank."""
    names = err.causes if isinstance(err, RankFailedError) else ()
    return isinstance(err, kinds) or any(issubclass(globals()[name], kinds) for name in names if name in __all__)


def storage_failed(err: BaseException) -> bool:
    """Whether the storage failed, here or on other ranks, and nothing else did. Of a conflict the storage is not the cause."""
    names = err.causes if isinstance(err, RankFailedError) else (type(err).__name__,)
    kinds = [globals()[name] if name in __all__ else CkptError for name in names]
    return bool(kinds) and all(issubclass(kind, StorageError) and kind is not ConflictError for kind in kinds)


class UsageError(CkptError, ValueError):
    """The caller asked for something that cannot be."""

    exit_code = 2


class StateError(UsageError, TypeError):
    """A value of the state cannot be stored, or is ambiguous."""


class LayoutError(UsageError):
    """A layout does not fit the tensors or the ranks."""


class NotFoundError(CkptError, FileNotFoundError):
    """Nothing is there."""

    exit_code = 10


class NotCommittedError(CkptError):
    """Files of a save are there, but no commit record: the save did not finish."""

    exit_code = 11


class FormatError(CkptError):
    """Not a format, version or feature that this software knows."""

    exit_code = 12


class CorruptError(CkptError):
    """Bytes are not what the digests say, or files are missing or truncated."""

    exit_code = 20


class MismatchError(CkptError):
    """Checkpoint and state do not fit each other."""

    exit_code = 22


class NamesError(MismatchError, KeyError):
    """Missing or unexpected names."""

    exit_code = 21

    def __str__(self) -> str:
        return CkptError.__str__(self)  # KeyError would print the repr


class ShapeError(MismatchError, ValueError):
    """Shapes or dtypes differ."""


class TornError(CkptError):
    """A take in place, or the switch to a version, broke off: the state is a mix of two versions until another one is taken."""

    exit_code = 23


class ConsistencyError(CkptError):
    """The ranks' states do not make one checkpoint: they disagree about a shape, a dtype or a value."""

    exit_code = 22


class CoverageError(ConsistencyError):
    """The chunks of a tensor leave a hole or overlap."""


class ReplicaError(ConsistencyError):
    """Ranks that should hold the same bytes do not."""


class StorageError(CkptError, OSError):
    """The storage failed."""

    exit_code = 30


class NoSpaceError(StorageError):
    """The storage is full."""


class AccessError(StorageError, PermissionError):
    """The storage refuses us."""


class ConflictError(StorageError, FileExistsError):
    """What is there is in the way, or has to stay: another checkpoint, a tag, a part of one that is in use. It stays as it is."""

    exit_code = 33


class BusyError(CkptError):
    """A save of the same job is going on in the background, and the caller did not want to wait for it."""

    exit_code = 32


class CancelledError(CkptError):
    """The caller cancelled a save in the background. Nothing was committed."""

    exit_code = 130


class GroupError(CkptError):
    """Another rank ended the call."""

    exit_code = 31
    ranks: tuple[int, ...] = ()
    """Which ranks, where the error was made and that is known; a copy by pickle has none."""


class RankFailedError(GroupError):
    """Another rank raised; the message has its name and its error."""

    causes: tuple[str, ...] = ()
    """Names of the classes that were raised, those of the lowest rank first. A copy by pickle has none."""
    departed: bool = False
    """The ranks raised nothing: connections have ended, and this process has seen it."""

    @property
    def cause(self) -> str | None:
        """The first of :attr:`causes`, if there is one."""
        return self.causes[0] if self.causes else None

    def cause_class(self) -> type[CkptError]:
        """The class of the first cause, so that its name and exit code can be given here; this one's own where that is no error of ours."""
        kind = globals().get(self.cause or "")
        return kind if isinstance(kind, type) and issubclass(kind, CkptError) else type(self)


class ExchangeError(GroupError):
    """What another rank sent was damaged on the way. That says nothing about what is stored."""


class DeadlineError(GroupError, TimeoutError):
    """A rank died or hangs: nothing was heard of it within the deadline. Or the job's store is gone, or has not answered within it."""
