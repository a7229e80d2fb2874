"""Which format a checkpoint is in: recognised by its content, never by its name."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt import settings
from ckpt.errors import CorruptError, FormatError, NotCommittedError, NotFoundError
from ckpt.io_backends.retries import read_checked
from ckpt.needs import attribute, entry_points
from ckpt.text import url_text

from .conversion import CONVERTING
from .protocol import Format

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.formats.native.catalog import Reading
    from ckpt.io_backends.protocol import Backend

ENTRY_POINTS = "ckpt.formats"
"""Group of entry points that are ``Format`` values of other distributions."""

_BUILTIN = (
    "ckpt.formats.native.catalog:FORMAT",
    "ckpt.formats.megatron.catalog:FORMAT",
    "ckpt.formats.megatron.catalog:UNFINISHED",
    "ckpt.formats.dcp.catalog:FORMAT",
    "ckpt.formats.dcp.catalog:UNFINISHED",
    "ckpt.formats.deepspeed.catalog:FORMAT",
    "ckpt.formats.deltas.catalog:FORMAT",
    "ckpt.formats.safetensors:FORMAT",
    "ckpt.formats.fsdp:FORMAT",
    "ckpt.formats.torchzip.catalog:FORMAT",
)
"""Formats of this distribution, most specific first; loaded when they are asked."""

_SHOWN = 8
_EVICTED = 1024


def formats() -> Iterator[Format]:
    """All formats that can be read: ours, then those of other distributions by name. Loaded one at a time, as the caller goes on."""
    for reference in _BUILTIN:
        builtin: Format = attribute(reference)
        yield builtin
    for point in entry_points(ENTRY_POINTS).values():
        yield point.load()


def open_catalog(
    url: str | os.PathLike[str],
    *,
    sources: Sequence[str | os.PathLike[str]] | None = None,
    read: Reading | None = None,
) -> Catalog:
    """Open the checkpoint at ``url``, whatever known format it is in.

    Args:
        sources: where the files may lie that a virtual checkpoint or a delta points into; by default as ``CKPT_SOURCES`` says.
        read: gives the files of the index of a checkpoint of ours, in place of ``read_index``.

    Raises:
        NotFoundError: nothing is there.
        NotCommittedError: a save was there, but it did not finish.
        FormatError: what is there is no checkpoint that we know; the message names what was found.
        CorruptError: it is one, and damaged.
    """
    url = url_text(url)
    from ckpt.formats.native.catalog import open_native, read_index, read_record
    from ckpt.io_backends.registry import open_backend

    record = read_record(native := open_backend(url))
    if record is not None:  # by far the most common case: no listing for it
        roots = None if sources is None else tuple(map(url_text, sources))
        return open_native(native, record, roots, read or read_index)
    backend, names = _look(url)
    open_it = partial(_open_foreign, url, backend, names, sources)
    return read_checked(_Files(url, backend, names), "", open_it, faults=(CorruptError, FormatError))


class _Files(NamedTuple):
    """The files of a checkpoint without digests: whichever was read wrong, all are forgotten."""

    url: str
    backend: Backend
    names: Sequence[str]

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        for name in self.names[:_EVICTED]:
            if not name.endswith("/"):
                self.backend.evict(name)


def _open_foreign(url: str, backend: Backend, names: list[str], sources: Sequence[str | os.PathLike[str]] | None) -> Catalog:
    from ckpt.formats.native.catalog import not_committed
    from ckpt.formats.native.paths import has_orphans

    if not names:
        raise NotFoundError("there is no checkpoint", where=url, hint="check the URL")
    if CONVERTING in names:
        message = f"a conversion into this directory did not finish: {CONVERTING} is there"
        raise NotCommittedError(message, where=url, hint="run the same `ckpt convert` again: it goes on; or the same export")
    _check_no_data(url, backend, names)
    known = []
    for candidate in formats():
        if candidate.recognises(backend, names):
            return candidate.open(backend) if candidate.open_within is None else candidate.open_within(backend, settings.sources(sources))
        known.append(candidate.name)
    if has_orphans(backend):
        raise not_committed(url)
    below = _below(url, names)
    if below is not None:
        hint = f"name one of them, such as {below}; `ckpt ls` lists them"
        raise FormatError("this directory holds checkpoints, but is not one itself", where=url, hint=hint)
    raise FormatError(
        f"this is not a checkpoint of a known format ({', '.join(known)}); found {_some(names)}", where=url, hint=_hint(names)
    )


def find_format(url: str) -> str | None:
    """The name of the format that the checkpoint at ``url`` is in; None if it is in none that is known, or nothing is there.

    Nothing is opened, so the checkpoint may be damaged.
    """
    backend, names = _look(url)
    if not names or CONVERTING in names or _is_data(backend, names):
        return None
    return next((f.name for f in formats() if f.recognises(backend, names)), None)


def list_foreign(root: str, known: Collection[str]) -> dict[str, str]:
    """Checkpoints of other formats: that at ``root`` itself, else those in the directories right below it, but for the URLs in ``known``.

    Returns:
        URL → name of the format.
    """
    from ckpt.io_backends.registry import join_url, open_backend

    if root in known:
        return {}
    urls = [join_url(root, name.rstrip("/")) for name in open_backend(root).list_dir() if name.endswith("/")]
    for group in ([root], [url for url in urls if url not in known]):
        formats_of = {url: name for url in group if (name := find_format(url)) is not None}
        if formats_of:
            return formats_of
    return {}


def _look(url: str) -> tuple[Backend, list[str]]:
    """What lies directly below a URL, or the file that it is."""
    # Other hidden files than that of DCP are what a killed writer may leave.
    from ckpt.formats.external.base import open_single
    from ckpt.formats.native.commit import COMMIT_PATH
    from ckpt.io_backends.registry import open_backend

    backend: Backend = open_backend(url)
    names = [name for name in backend.list_dir() if not name.startswith(".") or name == ".metadata"]
    single = open_single(url) if not names else None
    if single is None or single.name == COMMIT_PATH:  # a commit record is no checkpoint by itself
        return backend, names
    return single, [single.name]


def _is_data(backend: Backend, names: list[str]) -> bool:
    """Whether this is the directory with the data files of a checkpoint of ours. One of them alone is a safetensors file like any other."""
    from ckpt.formats.external.base import SingleFile
    from ckpt.formats.native.paths import id_of

    return not isinstance(backend, SingleFile) and any(id_of(f"data/{name}") is not None for name in names)


def _check_no_data(url: str, backend: Backend, names: list[str]) -> None:
    if _is_data(backend, names):
        message = "these are the data files of a checkpoint, which say nothing without its index"
        raise FormatError(message, where=url, hint="name the directory above it")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _hint(names: list[str]) -> str:
    from ckpt.formats.megatron.legacy_ranks import FILE
    from ckpt.formats.torchzip.catalog import SUFFIXES

    if FILE in names:
        return "this is what one rank of a Megatron job wrote: name the directory above it, such as iter_0001000"
    archives = [n for n in names if n.endswith(SUFFIXES)]
    if len(archives) > 1:
        return f"these look like several torch.save files: name one of them, such as {archives[0]}"
    return f"name the directory that holds the checkpoint; other formats can be added through entry points of the group {ENTRY_POINTS}"


def _below(url: str, names: list[str]) -> str | None:
    """The last of the directories right below that has a checkpoint; only a few of them are looked into."""
    from ckpt.io_backends.registry import join_url

    below = [join_url(url, name.rstrip("/")) for name in names if name.endswith("/")]
    return next((u for u in reversed(below[-_SHOWN:]) if find_format(u) is not None), None)
