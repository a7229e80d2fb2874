"""Which format a checkpoint is in: recognised by its content, never by its name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from ckpt.errors import FormatError, NotFoundError

from .protocol import Format

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.io_backends.protocol import Backend

ENTRY_POINTS = "ckpt.formats"
"""Group of entry points that are ``Format`` values of other distributions."""

_BUILTIN = (
    "ckpt.formats.native.catalog:FORMAT",
    "ckpt.formats.dcp.catalog:FORMAT",
    "ckpt.formats.safetensors.catalog:FORMAT",
    "ckpt.formats.fsdp.catalog:FORMAT",
    "ckpt.formats.torchzip.catalog:FORMAT",
)
"""Formats of this distribution, most specific first; loaded when they are asked."""

_SHOWN = 8


def formats() -> Iterator[Format]:
    """All formats that can be read: ours, then those of other distributions by name. Loaded one at a time, as the caller goes on."""
    for reference in _BUILTIN:
        module, _, attribute = reference.partition(":")
        found: Format = getattr(import_module(module), attribute)
        yield found
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        yield point.load()


def open_catalog(url: str) -> Catalog:
    """Open the checkpoint at ``url``, whatever known format it is in.

    Raises:
        NotFoundError: nothing is there.
        NotCommittedError: a save was there, but it did not finish.
        FormatError: what is there is no checkpoint that we know; the message names what was found.
        CorruptError: it is one, and damaged.
    """
    from ckpt.io_backends.registry import open_backend

    from .native.catalog import not_committed
    from .native.paths import has_debris
    from .single import open_single

    backend: Backend = open_backend(url)
    names = _names(backend)
    if not names:
        single = open_single(url)
        if single is None:
            raise NotFoundError("there is no checkpoint", where=url, hint="check the URL")
        backend, names = single, [single.name]
    known = []
    for candidate in formats():
        if candidate.recognises(backend, names):
            return candidate.open(backend)
        known.append(candidate.name)
    if has_debris(backend):
        raise not_committed(url)
    raise FormatError(
        f"this is not a checkpoint of a known format ({', '.join(known)}); found {_some(names)}", where=url, hint=_hint(names)
    )


def find_format(url: str) -> str | None:
    """The name of the format that the checkpoint at ``url`` is in; None if it is in none that is known, or nothing is there.

    Nothing is opened, so the checkpoint may be damaged.
    """
    from ckpt.io_backends.registry import open_backend

    backend = open_backend(url)
    names = _names(backend)
    return next((f.name for f in formats() if f.recognises(backend, names)), None) if names else None


def _names(backend: Backend) -> list[str]:
    """What lies directly below the root. Other hidden files than that of DCP are what a killed writer may leave."""
    return [name for name in backend.children() if not name.startswith(".") or name == ".metadata"]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _hint(names: list[str]) -> str:
    steps = [n for n in names if n.startswith("step-") and n.endswith("/")]
    if steps:
        return f"this is a run: open one of its steps, such as {steps[-1].rstrip('/')}"
    return f"other formats can be added through entry points of the group {ENTRY_POINTS}"
