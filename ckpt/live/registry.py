"""What the leader of a source knows: the versions that are complete, where each rank's part is, and which sinks take what. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import FormatError, NotFoundError
from ckpt.net.channel import Row
from ckpt.net.wire import check, encoded, is_count, is_seconds

from .control import Answer, SinkStatus, VersionStatus
from .holdings import Manifest, Version
from .relay import RELAY

WAIT = 0.5
"""Seconds after which a sink that waits for a version is told that there is none yet: it asks again, and both see that the other lives."""
REMEMBERED = 1024
"""Sinks that are gone, of which the report still tells."""
FORMING = 1.0
"""Seconds within which a sink that passes a version on says so, once it was told of it: as long the next one waits for it."""
_TOOK = {"bytes": is_count, "seconds": is_seconds, "took_from": {str: is_count}, "dense": {str: is_count}}
"""What a sink tells of a version that it has taken."""
MOST_RELAYS = 7
"""Sinks that another one is told to take from: with the source, as many as one receiver divides its requests among."""


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

    def status(self, sinks: Iterable[SinkRecord], now: float) -> VersionStatus:
        digest, segments = self.version.digest, self.manifest.segments
        return VersionStatus(
            step=self.version.step,
            digest=digest,
            bytes=sum(nbytes for nbytes, _ in segments.values()),
            ranks=len(segments),
            age=round(now - self.sealed, 3),
            taken_by=tuple(s.name for s in sinks if digest in s.took),
        )


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
    """By digest of the version: bytes, seconds, and bytes by whom they came from."""
    forming: str = ""
    """The version that it takes and will pass on, as long as it has not said from where."""
    forming_until: float = 0.0
    offered: str = ""
    """The version that its ranks pass on; ``relays`` says where each of them is."""
    relays: Sequence[Row] = ()
    receivers: int = 0
    """Sinks that were told to take from it."""
    lost_ranks: set[int] = field(default_factory=set)
    """Of its ranks, who has died: the others take nothing any more."""

    @property
    def state(self) -> str:
        if self.left and not self.lost_ranks:
            return "left"
        return "lost" if self.lost or self.lost_ranks else "taking" if self.taking else "waiting"

    def status(self, newest: Version | None, now: float) -> SinkStatus:
        last: Row = next(reversed(self.took.values()), {"took_from": {}, "dense": {}})
        return SinkStatus(
            sink=self.name,
            ranks=self.ranks,
            state=self.state,
            lost_ranks=tuple(sorted(self.lost_ranks)),
            step=None if self.has is None else self.has.step,
            relays=bool(self.relays) and not (self.lost or self.left),
            late=not self.left and newest is not None and self.has != newest,
            seconds=None if self.taking is None else round(now - self.since, 3),
            took=tuple((digest, row["bytes"], row["seconds"]) for digest, row in self.took.items()),
            took_from=last["took_from"],
            dense=last["dense"],
            error=self.error,
        )


class VersionRegistry:
    """The versions of one source, and its sinks. Thread-safe."""

    def __init__(self, name: str, run: str, keep: int) -> None:
        self.run = run
        self._name = name
        self._keep = keep
        self._versions: list[CompleteVersion] = []
        self._blobs: dict[str, bytes] = {}
        self._sinks: dict[str, SinkRecord] = {}
        self._lost_ranks: set[int] = set()
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

    def lose(self, rank: int) -> None:
        """A rank of the source has died: without it there is no newer version."""
        with self._condition:
            self._lost_ranks.add(rank)
            self._condition.notify_all()

    # ---- for sinks

    def handle(self, peer: str, question: Row) -> Answer:
        """Answer what ``peer`` asks; see ``answer_questions``."""
        if question.get("name") != self._name:
            raise NotFoundError(f"there is no source {question.get('name')!r} here, but {self._name!r}", hint="check the address")
        try:
            match question["op"]:
                case "newest":
                    after = None if question["after"] is None else Version.from_json(question["after"])
                    return self._newest(peer, question, after)
                case "blobs":
                    return self._give(question["digests"])
                case "offer":
                    return self._offer(peer, question)
                case "progress":
                    return self._note(peer, question)
                case "lost":
                    with self._condition:
                        self._sink(peer, question).lost_ranks.add(int(question["rank"]))
                    return {}, ()
                case "leave":
                    with self._condition:
                        self._sink(peer, question).left = True
                    return {}, ()
                case "status":
                    return self.status(), ()
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise FormatError(f"a question that cannot be read: {err!r}", hint="use the same release of ckpt at both ends") from err
        raise FormatError(f"{question['op']!r} is not a request", hint="use the same release of ckpt at both ends")

    def _newest(self, peer: str, question: Row, after: Version | None) -> Answer:
        with self._condition:
            sink = self._sink(peer, question)
            sink.taking, sink.offered, sink.relays, sink.forming = None, "", (), ""
            self._condition.wait_for(lambda: self._lost_ranks or (self._versions and self._versions[-1].version != after), WAIT)
            if not self._versions or self._versions[-1].version == after:
                return {"version": None, "lost": sorted(self._lost_ranks)}, ()
            if question["relays"] is not None and question["base"] not in self._kept():
                self._await_turn(sink, self._versions[-1].version.digest, float(question["relays"]))
            newest = self._versions[-1]
            # Where other sinks pass a version on: the nearest, of these the least used; so many for each set of boxes.
            given: dict[str, list[SinkRecord]] = {}
            for each in self._sinks.values():
                if each is not sink and each.offered == newest.version.digest and each.relays and not (each.lost or each.left):
                    given.setdefault(str([row["wanted"] for row in each.relays]), []).append(each)

            def distance(other: SinkRecord) -> tuple[bool, bool, int]:
                return other.relays[0]["machine"] != question["machine"], other.relays[0]["domain"] != question["domain"], other.receivers

            chosen = [each for group in given.values() for each in sorted(group, key=distance)[:MOST_RELAYS]]
            for each in chosen:
                each.receivers += 1
            relays = [{**row, "sink": each.name} for each in chosen for row in each.relays]
            kept = self._kept()
        return {"version": newest.version.to_json(), "holders": list(newest.holders), "relays": relays, "kept": kept}, [newest.data]

    def _kept(self) -> list[str]:
        """What holders call the versions that are here."""
        return [each.manifest.name for each in self._versions]

    def _await_turn(self, sink: SinkRecord, digest: str, patience: float) -> None:
        """Sinks that hear of a version at once form a tree: each begins when the one before can be taken from."""
        end = time.monotonic() + patience
        while True:
            now = time.monotonic()
            until = max((s.forming_until for s in self._sinks.values() if s is not sink and s.forming == digest), default=0.0)
            if now >= min(until, end):
                break
            self._condition.wait(min(until, end) - now)
        sink.forming, sink.forming_until = digest, now + FORMING

    def _offer(self, peer: str, question: Row) -> Answer:
        """A sink says from where others can take the version that it takes."""
        check(question["relays"], [RELAY])
        with self._condition:
            sink = self._sink(peer, question)
            sink.offered, sink.relays, sink.receivers = Version.from_json(question["version"]).digest, list(question["relays"]), 0
            sink.forming = ""
            self._condition.notify_all()
        return {}, ()

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
        if question["phase"] == "taken":
            check(question, _TOOK)
        with self._condition:
            sink = self._sink(peer, question)
            sink.error, sink.forming = None, sink.forming if question["phase"] == "taking" else ""
            self._condition.notify_all()
            if question["phase"] == "taking":
                sink.taking, sink.since = version, time.time()
            elif question["phase"] == "taken":
                sink.has, sink.taking = version, None
                if version.digest in {each.version.digest for each in self._versions}:
                    sink.took[version.digest] = {name: question[name] for name in _TOOK}
            else:
                sink.taking, sink.error = None, str(question["error"])[:2000]
                sink.offered, sink.relays = "", ()
        return {}, ()

    def gone(self, peer: str) -> None:
        """The connection of a peer has ended."""
        with self._condition:
            for sink in self._sinks.values():
                if sink.peer == peer:
                    sink.lost, sink.forming = not sink.left, ""
            self._condition.notify_all()
            for name in [name for name, sink in self._sinks.items() if sink.lost or sink.left][:-REMEMBERED]:
                del self._sinks[name]

    def status(self) -> dict[str, Any]:
        """For ``ckpt live status`` and reports: versions, the oldest first, and sinks."""
        now = time.time()
        with self._condition:
            newest = self._versions[-1].version if self._versions else None
            return {
                "run": self.run,
                "name": self._name,
                "lost_ranks": sorted(self._lost_ranks),
                "versions": [encoded(each.status(self._sinks.values(), now)) for each in self._versions],
                "sinks": [encoded(sink.status(newest, now)) for sink in self._sinks.values()],
            }
