"""``ckpt-delta.json``: what a delta is made from, its files, and the digests of what it makes. It comes last and makes the delta exist."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ckpt.dtypes import DTYPES, DType
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.native.paths import path_problem
from ckpt.io_backends.registry import absolute_url
from ckpt.text import parse_json

MANIFEST = "ckpt-delta.json"
VERSION = 1
_FORMAT = "ckpt-delta"
_SIBLING = "../"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedExport:
    """Another export: its ``url``, and the ``id`` that tells it from every other one that might lie there."""

    url: str
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFile:
    """A file of a delta: ``head`` are the bytes of its header and of its table of sections, and ``digest`` the XXH3-128 of these."""

    path: str
    size: int
    head: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTensor:
    """A tensor of the model."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaManifest:
    """``number`` counts the deltas since the anchor, from 1. ``tensors`` are those of the model, sorted by name. ``result`` is the digest
    of the whole model, ``changed`` counts elements, ``dense_bytes`` is the size of the model."""

    number: int
    base: LinkedExport
    anchor: LinkedExport
    tensors: tuple[DeltaTensor, ...]
    files: tuple[DeltaFile, ...]
    result: str
    changed: int
    dense_bytes: int

    @property
    def id(self) -> str:
        """XXH3-128 of all that it says, but for where other exports lie: they may move together."""
        return xxhash.xxh3_128_hexdigest(json.dumps({**self._fields(), "base": self.base.id, "anchor": self.anchor.id}).encode())

    def to_bytes(self, url: str) -> bytes:
        """As the file at ``url``. An export in the directory beside is named relative to it, so that a chain can move as a whole."""
        near = {key: {"url": _relative(export.url, url), "id": export.id} for key, export in (("base", self.base), ("anchor", self.anchor))}
        return json.dumps({**self._fields(), **near, "id": self.id}, indent=1).encode() + b"\n"

    def _fields(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": VERSION,
            "number": self.number,
            "changed": self.changed,
            "dense_bytes": self.dense_bytes,
            "result": self.result,
            "files": [{"path": f.path, "size": f.size, "head": f.head, "digest": f.digest} for f in self.files],
            "tensors": [[t.name, t.dtype.name, list(t.shape)] for t in self.tensors],
        }

    @classmethod
    def from_bytes(cls, data: bytes, url: str) -> DeltaManifest:
        """What the file at ``url`` says."""
        where = f"{url.rstrip('/')}/{MANIFEST}"
        try:
            fields = parse_json(data)
            known = fields["format"] == _FORMAT
            version = fields["version"]
        except (ValueError, KeyError, TypeError) as err:
            raise _damaged(f"is no manifest of a delta ({err!r})", where) from err
        if not known or version != VERSION:
            raise FormatError(
                f"this is a delta of version {version!r}", where=where, hint=f"this software reads version {VERSION}: update it"
            )
        try:
            manifest = cls(
                number=_count(fields["number"]),
                base=_export(fields["base"], url),
                anchor=_export(fields["anchor"], url),
                tensors=tuple(DeltaTensor(name=_text(n), dtype=DTYPES[d], shape=tuple(map(_count, s))) for n, d, s in fields["tensors"]),
                files=tuple(_file(f) for f in fields["files"]),
                result=_text(fields["result"]),
                changed=_count(fields["changed"]),
                dense_bytes=_count(fields["dense_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise _damaged(f"lacks or misspells a member ({err!r})", where) from err
        if fields.get("id") != manifest.id:
            raise _damaged(f"was changed after it was written: its id is {fields.get('id')}, should be {manifest.id}", where)
        names = [t.name for t in manifest.tensors]
        if names != sorted(set(names)):
            raise _damaged("has tensors that are not in the order of names, or twice", where)
        return manifest


def _file(fields: Mapping[str, Any]) -> DeltaFile:
    path = _text(fields["path"])
    if path_problem(path) is not None or "/" in path:
        raise ValueError(f"a file called {path!r}")
    return DeltaFile(path=path, size=_count(fields["size"]), head=_count(fields["head"]), digest=_text(fields["digest"]))


def _export(fields: Mapping[str, Any], url: str) -> LinkedExport:
    text = _text(fields["url"])
    beside = absolute_url(url).rstrip("/").rpartition("/")[0]
    if text.startswith(_SIBLING):
        name = text.removeprefix(_SIBLING)
        if not name or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"an export at {text!r}")
        text = f"{beside}/{name}"
    return LinkedExport(url=text, id=_text(fields["id"]))


def _relative(export: str, url: str) -> str:
    beside = absolute_url(url).rstrip("/").rpartition("/")[0]
    whole = absolute_url(export).rstrip("/")
    return _SIBLING + whole.removeprefix(f"{beside}/") if whole.startswith(f"{beside}/") else whole


def _text(value: object) -> str:
    if type(value) is not str or not value or len(value) > 4096:
        raise ValueError(f"{value!r:.80} is no text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.80} is no count")
    return value


def _damaged(what: str, where: str) -> CorruptError:
    return CorruptError(f"the manifest of a delta {what}", where=where, hint="it is damaged: export again, with a full anchor")
