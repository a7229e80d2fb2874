"""What a conversion leaves at its destination while it goes on (docs/formats.md): a record, and a mark for each file that is durable.
An export leaves a record alone, of another kind at the same place.

``convert.json`` and ``convert-<id>/``, or ``NAME.convert.json`` and ``NAME.convert-<id>/`` where the destination is the one file NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.formats.native.paths import id_of, path_problem
from ckpt.text import parse_json

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
