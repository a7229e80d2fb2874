"""Which format a checkpoint is in: recognised by its content, never by its name.

And what a conversion leaves at its destination while it goes on (docs/formats.md): a record, and a mark for each file that is durable.
An export leaves a record alone, of another kind at the same place.

``convert.json`` and ``convert-<id>/``, or ``NAME.convert.json`` and ``NAME.convert-<id>/`` where the destination is the one file NAME.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt import settings
from ckpt.catalog import Format
from ckpt.errors import CorruptError, FormatError, NotCommittedError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.formats.native.paths import id_of
from ckpt.io_backends.checks import path_problem, read_checked
from ckpt.needs import attribute, plugin, plugin_names
from ckpt.text import parse_json, url_text

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.formats.native.catalog import Reading
    from ckpt.io_backends.protocol import Backend


CONVERTING = "convert.json"
CLAIM = "finish"
"""The mark of the process that finishes."""
MARKS = "convert"
_CONVERSION, _EXPORT = "ckpt-convert", "ckpt-export"
_ID = re.compile(r"[0-9a-z]{16}")
_PLACE = r"(?:(?P<directory>[^/]+)/)?(?:(?P<name>[^/]+)\.)?"
RECORD_PATH = re.compile(rf"{_PLACE}convert\.json")
MARK_PATH = re.compile(rf"{_PLACE}convert-(?P<id>[0-9a-z]{{16}})/(?P<mark>[^/]+)")
"""Paths below a root that is the destination, or the directory in which it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRecord:
    """A record: ``digest`` is of everything that the result depends on, ``files`` are those that are written, with their sizes in bytes, or
    None for what is not known before."""

    id: str
    digest: str
    files: Mapping[str, int | None]

    def to_bytes(self) -> bytes:
        fields = {"format": _CONVERSION, "version": 1, "id": self.id, "digest": self.digest, "files": dict(self.files)}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> ConversionRecord | None:
        """None if it is no record, or one of a version that did not say all of this."""
        try:
            fields = parse_json(data)
            record = cls(id=fields["id"], digest=fields["digest"], files=dict(fields["files"]))
        except (ValueError, KeyError, TypeError):
            return None
        known = fields.get("format") == _CONVERSION and isinstance(record.digest, str)
        named = isinstance(record.id, str) and _ID.fullmatch(record.id) is not None
        return record if known and named and all(_is_its_own(record.id, *file) for file in record.files.items()) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """The record of an export: ``files`` are those that it makes, all of them at the destination itself. ``replaces`` says that they may be
    those of the export before; ``id`` is no other export's."""

    files: tuple[str, ...]
    id: str = ""
    replaces: bool = True

    def to_bytes(self) -> bytes:
        fields = {"format": _EXPORT, "version": 1, "id": self.id, "replaces": self.replaces, "files": self.files}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> ExportRecord | None:
        """None if it is no record of an export."""
        try:
            fields = parse_json(data)
            kind, files, replaces = fields["format"], tuple(fields["files"]), fields.get("replaces", True)
        except (ValueError, KeyError, TypeError):
            return None
        own = all(type(path) is str and path_problem(path) is None and "/" not in path and path != COMMIT_PATH for path in files)
        return cls(files=files, id=str(fields.get("id", "")), replaces=replaces is not False) if kind == _EXPORT and own else None


def _is_its_own(id: str, path: str, size: object) -> bool:
    """Whether a conversion may have such a file: none of a checkpoint that is there, and none elsewhere."""
    return path_problem(path) is None and path != COMMIT_PATH and id_of(path) in (None, id) and (size is None or type(size) is int)


def record_path(name: str | None) -> str:
    """Where the record is; ``name`` is that of the only file, if the destination is one."""
    return CONVERTING if name is None else f"{name}.{CONVERTING}"


def marks_prefix(name: str | None, id: str) -> str:
    """What the paths of all marks begin with."""
    return f"{MARKS if name is None else f'{name}.{MARKS}'}-{id}/"


def mark_name(number: int) -> str:
    """The mark of file ``number``, in the order of the record's files."""
    return f"{number:05d}"


ENTRY_POINTS = "ckpt.formats"
"""Group of entry points that are ``Format`` values of other distributions."""

_BUILTIN = (
    "ckpt.formats.native.catalog:FORMAT",
    "ckpt.formats.megatron.catalog:FORMAT",
    "ckpt.formats.megatron.catalog:UNFINISHED",
    "ckpt.formats.dcp:FORMAT",
    "ckpt.formats.dcp:UNFINISHED",
    "ckpt.formats.deepspeed.catalog:FORMAT",
    "ckpt.formats.deltas:FORMAT",
    "ckpt.formats.safetensors:FORMAT",
    "ckpt.formats.fsdp:FORMAT",
    "ckpt.formats.torchzip:FORMAT",
)
"""Formats of this distribution, most specific first; loaded when they are asked."""

_SHOWN = 8
_LOOKED_INTO, _NAMED = 32, 4
_EVICTED = 1024


def formats(unusable: list[str] | None = None) -> Iterator[Format]:
    """All formats that can be read: ours, then those of other distributions by name. Loaded one at a time, as the caller goes on; why one
    cannot be is added to ``unusable``."""
    for reference in _BUILTIN:
        builtin: Format = attribute(reference)
        yield builtin
    for name in plugin_names(ENTRY_POINTS):
        try:
            given = plugin(ENTRY_POINTS, name, Format)
        except UsageError as err:
            if unusable is not None:
                unusable.append(err.message)
        else:
            if given is not None:
                yield given


def open_catalog(
    url: str | os.PathLike[str], *, sources: Sequence[str | os.PathLike[str]] | None = None, read: Reading | None = None
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
    from ckpt.formats.native.catalog import open_native, read_index
    from ckpt.formats.native.commit import read_record
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
    from ckpt.formats.native.virtual import GENERATION_PATH, unfinished_run, unfinished_step
    from ckpt.formats.native.virtual import MARKS as JOINT_MARKS

    if not names:
        raise NotFoundError("there is no checkpoint", where=url, hint="check the URL; `ckpt ls` lists the checkpoints there")
    if CONVERTING in names:
        message = f"a conversion into this directory did not finish: {CONVERTING} is there"
        raise NotCommittedError(message, where=url, hint="run the same `ckpt convert` again: it continues; or the same export")
    if _is_data(backend, names):
        message = "these are the data files of a checkpoint, which say nothing without its index"
        raise FormatError(message, where=url, hint="name the directory above it")
    known, unusable = list[str](), list[str]()
    for candidate in formats(unusable):
        if candidate.recognises(backend, names):
            return candidate.open(backend) if candidate.open_within is None else candidate.open_within(backend, settings.sources(sources))
        known.append(candidate.name)
    if has_orphans(backend):
        raise not_committed(url)
    if f"{JOINT_MARKS}/" in names and (reason := unfinished_step(backend, "", url)) is not None:
        raise NotCommittedError(f"this step of several jobs is not committed: {reason}", where=url, hint="load an earlier step")
    below = _below(url, names)
    if below is not None:
        hint = f"name one of them, such as {below}; `ckpt ls` lists them"
        raise FormatError("this directory holds checkpoints, but is not one itself", where=url, hint=hint)
    if GENERATION_PATH in names and (unfinished := unfinished_run(url)) is not None:
        raise unfinished
    if runs := runs_below(url, names):
        hint = f"name a checkpoint in one of them; `ckpt ls {runs[-1]}` lists those of the last"
        raise FormatError(f"this directory holds runs, but is not a checkpoint itself: {some_runs(runs)}", where=url, hint=hint)
    raise FormatError(
        "; ".join([f"this is not a checkpoint of a known format ({', '.join(known)})", *unusable, f"found {_some(names)}"]),
        where=url,
        hint=_hint(names),
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
    from ckpt.formats.native.commit import COMMIT_PATH
    from ckpt.io_backends.registry import open_backend

    from .external import open_single

    backend: Backend = open_backend(url)
    names = [name for name in backend.list_dir() if not name.startswith(".") or name == ".metadata"]
    single = open_single(url) if not names else None
    if single is None or single.name == COMMIT_PATH:  # a commit record is no checkpoint by itself
        return backend, names
    return single, [single.name]


def _is_data(backend: Backend, names: list[str]) -> bool:
    """Whether this is the directory with the data files of a checkpoint of ours. One of them alone is a safetensors file like any other."""
    from ckpt.formats.native.paths import id_of

    from .external import SingleFile

    return not isinstance(backend, SingleFile) and any(id_of(f"data/{name}") is not None for name in names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _hint(names: list[str]) -> str:
    from ckpt.formats.megatron.catalog import FILE

    from .torchzip import SUFFIXES

    if FILE in names:
        return "this is what one rank of a Megatron job wrote: name the directory above it, such as iter_0001000"
    archives = [n for n in names if n.endswith(SUFFIXES)]
    if len(archives) > 1:
        return f"these look like several torch.save files: name one of them, such as {archives[0]}"
    return f"name the directory that holds the checkpoint; other formats can be added through entry points of the group {ENTRY_POINTS}"


def _below(url: str, names: Sequence[str]) -> str | None:
    """The last of the directories right below that has a checkpoint; only a few of them are looked into."""
    from ckpt.io_backends.registry import join_url

    below = [join_url(url, name.rstrip("/")) for name in names if name.endswith("/")]
    return next((u for u in reversed(below[-_SHOWN:]) if find_format(u) is not None), None)


def runs_below(url: str, names: Sequence[str]) -> list[str]:
    """URLs of directories right below ``url`` that hold checkpoints themselves: where somebody meant who named the directory above. Of
    many ``names`` only the first are looked at."""
    from ckpt.io_backends.registry import join_url, open_backend

    runs = []
    for name in [name for name in names if name.endswith("/")][:_LOOKED_INTO]:
        run = join_url(url, name.rstrip("/"))
        with suppress(StorageError):  # of a directory that may not be read
            if _below(run, open_backend(run).list_dir()) is not None:
                runs.append(run)
    return runs


def some_runs(runs: Sequence[str]) -> str:
    """The first of them by name, and how many there are more."""
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return ", ".join(runs[:_NAMED]) + more
