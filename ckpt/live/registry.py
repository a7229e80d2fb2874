"""What the leader of a source knows: the versions that are complete, where each rank's part is, and which sinks take what. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.coordination.rows import Row
from ckpt.errors import FormatError, NotFoundError

from .control import Answer
from .versions import Manifest, Version

WAIT = 0.5
"""Seconds after which a sink that waits for a version is told that there is none yet: it asks again, and both see that the other lives."""
REMEMBERED = 1024
"""Sinks that are gone, of which the report still tells."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CompleteVersion:
    """A version that all ranks have sealed. ``holders``: for each rank where its part is."""

    version: Version
    manifest: Manifest
    data: bytes
    """Of the manifest."""
    holders: Sequence[Row]
    sealed: float
    """Seconds since the epoch."""


@dataclass(eq=False)
class SinkRecord:
    """One sink, by what it has told."""

    name: str
    ranks: int
    peer: str
    """The connection that it has now."""
    has: Version | None = None
    taking: Version | None = None
    since: float = 0.0
    lost: bool = False
    left: bool = False
    error: str | None = None
    took: dict[str, Row] = field(default_factory=dict)
    """By digest of the version: bytes and seconds."""


class VersionRegistry:
    """The versions of one source, and its sinks. Thread-safe."""

    def __init__(self, name: str, run: str, keep: int) -> None:
        self.run = run
        self._name = name
        self._keep = keep
        self._versions: list[CompleteVersion] = []
        self._blobs: dict[str, bytes] = {}
        self._sinks: dict[str, SinkRecord] = {}
        self._condition = threading.Condition()

    # ---- for the source

    def knows(self, digest: str) -> bool:
        """Whether something that manifests refer to is here already."""
        return digest in self._blobs

    def blob(self, digest: str) -> bytes:
        return self._blobs[digest]

    def add(self, manifest: Manifest, holders: Sequence[Row], blobs: Mapping[str, bytes]) -> tuple[Version, int]:
        """A version is complete. The number of the oldest that is kept from now on."""
        data = manifest.to_bytes()
        version = manifest.version(data)
        with self._condition:
            self._blobs.update(blobs)
            self._versions.append(CompleteVersion(version=version, manifest=manifest, data=data, holders=holders, sealed=time.time()))
            del self._versions[: -self._keep]
            needed = {digest for each in self._versions for digest in each.manifest.blobs()}
            for digest in self._blobs.keys() - needed:
                del self._blobs[digest]
            kept = {each.version.digest for each in self._versions}
            for sink in self._sinks.values():
                sink.took = {digest: row for digest, row in sink.took.items() if digest in kept}
            oldest = self._versions[0].manifest.number
            self._condition.notify_all()
        return version, oldest

    # ---- for sinks

    def handle(self, peer: str, question: Row) -> Answer:
        """Answer what ``peer`` asks; see ``ControlServer``."""
        if question.get("name") != self._name:
            raise NotFoundError(f"there is no source {question.get('name')!r} here, but {self._name!r}", hint="check the address")
        try:
            match question["op"]:
                case "newest":
                    after = None if question["after"] is None else Version.from_json(question["after"])
                    return self._newest(peer, question, after)
                case "blobs":
                    return self._give(question["digests"])
                case "progress":
                    return self._note(peer, question)
                case "leave":
                    with self._condition:
                        self._sink(peer, question).left = True
                    return {}, ()
                case "status":
                    return self.status(), ()
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise FormatError(f"a question that cannot be read: {err!r}", hint="use the same release of ckpt at both ends") from err
        raise FormatError(f"{question['op']!r} is no question", hint="use the same release of ckpt at both ends")

    def _newest(self, peer: str, question: Row, after: Version | None) -> Answer:
        with self._condition:
            self._sink(peer, question).taking = None
            self._condition.wait_for(lambda: self._versions and self._versions[-1].version != after, WAIT)
            if not self._versions or self._versions[-1].version == after:
                return {"version": None}, ()
            newest = self._versions[-1]
        return {"version": newest.version.to_json(), "holders": list(newest.holders)}, [newest.data]

    def _sink(self, peer: str, question: Row) -> SinkRecord:
        """Who asks; it may have another connection than before."""
        name = str(question["sink"])[:200]
        sink = self._sinks.setdefault(name, SinkRecord(name, int(question["ranks"]), peer))
        sink.peer, sink.lost, sink.left = peer, False, False
        return sink

    def _give(self, digests: Sequence[str]) -> Answer:
        with self._condition:
            missing = [digest for digest in digests if digest not in self._blobs]
            if missing:
                raise NotFoundError("a version was dropped before it was taken", hint="take it again: there is a newer one")
            blobs = [self._blobs[digest] for digest in digests]
        return {"sizes": list(map(len, blobs))}, blobs

    def _note(self, peer: str, question: Row) -> Answer:
        """A sink says how far it is."""
        version = Version.from_json(question["version"])
        with self._condition:
            sink = self._sink(peer, question)
            sink.error = None
            if question["phase"] == "taking":
                sink.taking, sink.since = version, time.time()
            elif question["phase"] == "taken":
                sink.has, sink.taking = version, None
                sink.took[version.digest] = {"bytes": int(question["bytes"]), "seconds": float(question["seconds"])}
            else:
                sink.taking, sink.error = None, str(question["error"])[:2000]
        return {}, ()

    def gone(self, peer: str) -> None:
        """The connection of a peer has ended."""
        with self._condition:
            for sink in self._sinks.values():
                sink.lost = sink.lost or (sink.peer == peer and not sink.left)
            for name in [name for name, sink in self._sinks.items() if sink.lost or sink.left][:-REMEMBERED]:
                del self._sinks[name]

    def status(self) -> dict[str, Any]:
        """For ``ckpt live status`` and reports: versions, the oldest first, and sinks."""
        now = time.time()
        with self._condition:
            known = {each.version.digest for each in self._versions}
            newest = self._versions[-1].version if self._versions else None
            return {
                "run": self.run,
                "name": self._name,
                "versions": [
                    {
                        "step": each.version.step,
                        "digest": each.version.digest,
                        "bytes": sum(s.nbytes for s in each.manifest.segments.values()),
                        "ranks": len(each.manifest.ranks),
                        "age": round(now - each.sealed, 3),
                        "taken_by": [s.name for s in self._sinks.values() if each.version.digest in s.took],
                    }
                    for each in self._versions
                ],
                "sinks": [
                    {
                        "sink": s.name,
                        "ranks": s.ranks,
                        "state": "left" if s.left else "lost" if s.lost else "taking" if s.taking else "waiting",
                        "step": None if s.has is None else s.has.step,
                        "late": not (s.lost or s.left) and newest is not None and s.has != newest,
                        "taking": None if s.taking is None else {"step": s.taking.step, "seconds": round(now - s.since, 3)},
                        "took": [{"digest": d, **row} for d, row in s.took.items() if d in known],
                        "error": s.error,
                    }
                    for s in self._sinks.values()
                ],
            }
