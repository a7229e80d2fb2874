"""The port of an object that several processes write together: ``Backend.create_shared`` gives one (``shared`` says how it is used)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SharedObject(Protocol):
    """One process's side of an object of known size.

    ============================================  ==========================================================================
    situation                                     required outcome
    ============================================  ==========================================================================
    ``write``                                     as ``Writer.write``; where ``part_size`` is not 0 only whole parts:
                                                  bytes ``[n·part_size, (n+1)·part_size)`` or up to the end, each by one process, once
    ``flush``                                     all that this process wrote is durable; gives JSON for ``complete``
    ``complete``, every byte is in some receipt   the object exists, whole and durable
    ``complete``, some byte is in none            StorageError; nothing shows
    ``complete``, the name is taken               ConflictError, unless ``replace``: then readers see the old or the new
    ``abort``, in the process that began it       nothing of it is left, unless it was published
    ``abort``, in the others; ``close``           this process writes no more
    ============================================  ==========================================================================
    """

    part_size: int
    """Bytes of which writes have to be made; 0: any ranges."""

    @property
    def token(self) -> str:
        """With it other processes join."""

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None: ...

    def flush(self) -> Any: ...

    def complete(self, receipts: Sequence[Any], *, replace: bool) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...
