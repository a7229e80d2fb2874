"""What a format gives to be recognised and opened. A further format is a room of its own with one ``Format`` value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.io_backends.protocol import Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format: ``name`` for people, how to recognise it, how to open it.

    ``recognises(backend, names)`` is given the names directly below the root, directories with a trailing slash. It may read small files to
    be sure, and returns False, never an error, for what is not its own. ``open`` raises NotFoundError, NotCommittedError, FormatError or
    CorruptError.
    """

    name: str
    recognises: Callable[[Backend, Sequence[str]], bool]
    open: Callable[[Backend], Catalog]
    open_within: Callable[[Backend, Sequence[str] | None], Catalog] | None = None
    """The same for a format that points at other places: below which roots they may lie; None: anywhere. Raises AccessError."""
