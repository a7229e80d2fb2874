"""Versions of a live state, and the manifest that says what one consists of. JSON, nothing is unpickled. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from ckpt.errors import FormatError
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Table, join_tables
from ckpt.text import parse_json

from .holdings import LiveCatalog


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A published state: the ``run`` of its source, a random number in hex; the ``step`` that the trainer gave it; the ``digest`` of its
    manifest, which covers every byte of it."""

    run: str
    step: int
    digest: str

    def __str__(self) -> str:
        return f"step {self.step} of run {self.run}"

    def to_json(self) -> dict[str, Any]:
        return {"run": self.run, "step": self.step, "digest": self.digest}

    @classmethod
    def from_json(cls, data: Any) -> Version:
        """Raises:
        FormatError: it is no version.
        """
        try:
            return cls(run=_hex(data["run"]), step=_count(data["step"]), digest=_hex(data["digest"]))
        except (KeyError, TypeError, ValueError) as err:
            raise _malformed(err) from err


@dataclass(frozen=True, kw_only=True)
class SegmentDigest:
    """What one rank has of a version: bytes of its boxes, and the digest of the digests of their blocks."""

    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a version consists of. Tables, values and the values of single ranks go by the XXH3-128 of their bytes, since most are as
    they were in the version before: ``tables`` with the ranks that have each, ``own`` by rank. ``number`` counts the versions of a run."""

    run: str
    step: int
    number: int
    ranks: tuple[int, ...]
    tables: tuple[tuple[str, tuple[int, ...]], ...]
    state: str
    own: Mapping[int, str]
    segments: Mapping[int, SegmentDigest]

    def to_bytes(self) -> bytes:
        """Equal for equal manifests."""
        data = {
            "run": self.run,
            "step": self.step,
            "number": self.number,
            "ranks": self.ranks,
            "tables": self.tables,
            "state": self.state,
            "own": sorted(self.own.items()),
            "segments": [[rank, s.nbytes, s.digest] for rank, s in sorted(self.segments.items())],
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises:
        FormatError: it is no manifest.
        """
        try:
            raw = parse_json(data)
            return cls(
                run=_hex(raw["run"]),
                step=_count(raw["step"]),
                number=_count(raw["number"]),
                ranks=tuple(map(_count, raw["ranks"])),
                tables=tuple((_hex(digest), tuple(map(_count, ranks))) for digest, ranks in raw["tables"]),
                state=_hex(raw["state"]),
                own={_count(rank): _hex(digest) for rank, digest in raw["own"]},
                segments={_count(r): SegmentDigest(nbytes=_count(n), digest=_hex(d)) for r, n, d in raw["segments"]},
            )
        except (KeyError, TypeError, ValueError) as err:
            raise _malformed(err) from err

    @property
    def name(self) -> str:
        """What the holders of its pieces call it."""
        return f"{self.run}/{self.number}"

    def version(self, data: bytes) -> Version:
        """``data`` are its bytes."""
        return Version(run=self.run, step=self.step, digest=digest_of_blob(data))

    def blobs(self) -> list[str]:
        """The digests of all that it refers to, each once."""
        return list(dict.fromkeys([*(digest for digest, _ in self.tables), self.state, *self.own.values()]))


def digest_of_blob(data: bytes) -> str:
    """By which a manifest refers to something."""
    return xxhash.xxh3_128_hexdigest(data)


def own_blob(values: Mapping[str, Any], table: Table) -> bytes:
    """What one rank alone has: its ``PerRank`` values, and the tensors in them."""
    return json.dumps({"values": values, "table": table.to_bytes().decode()}).encode()


def catalog_of(manifest: Manifest, blobs: Mapping[str, bytes], url: str, like: LiveCatalog | None = None) -> LiveCatalog:
    """The catalog of a version, whose ``blobs`` have been compared with their digests. ``like``: that of a version with the same tables,
    whose tensors it then shares, unless single ranks have others."""
    places = {rank: place for place, rank in enumerate(manifest.ranks)}
    try:
        own = {places[rank]: parse_json(blobs[digest]) for rank, digest in manifest.own.items()}
        own_tensors = [(place, t) for place, each in own.items() for t in Table.from_bytes(each["table"].encode()).tensors]
        values = {place: each["values"] for place, each in own.items()}
        state = parse_json(blobs[manifest.state])
        if like is not None and like.own == own_tensors:
            return replace(like, url=url, state=state, ranks=values)
        tables = [(ranks, Table.from_bytes(blobs[digest])) for digest, ranks in manifest.tables]
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise _malformed(err) from err
    joined = join_tables(tables, stored=False)
    return LiveCatalog.of(joined, state, url=url, world_size=len(manifest.ranks), ranks=values, own=own_tensors)


def tensors_of(manifest: Manifest, blobs: Mapping[str, bytes], rank: int) -> list[TensorSpec]:
    """All tensors that one rank of the source knows."""
    tables = [Table.from_bytes(blobs[digest]) for digest, ranks in manifest.tables if rank in ranks]
    if rank in manifest.own:
        tables.append(Table.from_bytes(parse_json(blobs[manifest.own[rank]])["table"].encode()))
    return [tensor for table in tables for tensor in table.tensors]


def _hex(value: object) -> str:
    if not isinstance(value, str) or len(value) > 64 or not all(c in "0123456789abcdef" for c in value):
        raise ValueError(f"{value!r} is no digest")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _malformed(err: Exception) -> FormatError:
    return FormatError(f"what came is no version of a live state: {err!r}", hint="use the same release of ckpt at both ends")
