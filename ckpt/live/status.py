"""What a source says of itself: versions, and which sink has which. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import NotFoundError
from ckpt.net.message_fields import Either, Kind, checked, is_count, is_seconds

from .control import ControlClient, split_address

_VERSION = {"step": is_count, "digest": str, "bytes": is_count, "ranks": is_count, "age": is_seconds, "taken_by": [str]}
_TOOK = {"digest": str, "bytes": is_count, "seconds": is_seconds, "from": {str: is_count}, "dense": {str: is_count}}
_SINK = {
    "sink": str,
    "ranks": is_count,
    "state": str,
    "lost_ranks": [is_count],
    "step": Either(is_count, None),
    "relays": bool,
    "late": bool,
    "taking": Either({"seconds": is_seconds}, None),
    "took": [_TOOK],
    "error": Either(str, None),
}
STATUS: Kind = {"run": str, "versions": [_VERSION], "sinks": [_SINK], "lost_ranks": [is_count]}
"""What the leader of a source answers (``VersionRegistry.status``)."""


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """A version that is kept: its ``bytes`` in all, replicas included, over so many ``ranks``, and the seconds since it was there."""

    step: int
    digest: str
    bytes: int
    ranks: int
    age: float
    taken_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SinkStatus:
    """A sink: ``state`` is ``"waiting"``, ``"taking"``, ``"left"`` (it was closed) or ``"lost"`` (its connection broke, or some of its
    ranks died: ``lost_ranks``); ``step`` is of the version that it has. ``late``: there is a newer one, and it has not left. ``seconds``
    since it began to take a version. ``took``: digest, bytes and seconds of each kept version that it has taken; ``took_from``: the bytes
    of the last of these by whom they came from, ``"source"`` or another sink, and ``dense``: what of them came whole from a source with
    ``delta=True``, by why (``TakeReport``). ``relays``: it passes the version on that it has, or takes.
    ``error`` of its last take, or None."""

    sink: str
    ranks: int
    state: str
    step: int | None
    late: bool
    seconds: float | None
    took: tuple[tuple[str, int, float], ...]
    took_from: Mapping[str, int]
    relays: bool
    error: str | None
    lost_ranks: tuple[int, ...] = ()
    dense: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SourceStatus:
    """All that the leader of a source knows; versions are the oldest first. ``lost_ranks`` of the source itself have died: it publishes
    nothing any more."""

    address: str
    run: str
    versions: tuple[VersionStatus, ...]
    sinks: tuple[SinkStatus, ...]
    lost_ranks: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, address: str, data: Any) -> SourceStatus:
        """Raises:
        FormatError: it is something else.
        """
        checked(data, STATUS, "status", address)
        versions = tuple(
            VersionStatus(**{name: v[name] for name in _VERSION if name != "taken_by"}, taken_by=tuple(v["taken_by"]))
            for v in data["versions"]
        )
        sinks = tuple(
            SinkStatus(
                sink=s["sink"],
                ranks=s["ranks"],
                state=s["state"],
                step=s["step"],
                late=s["late"],
                seconds=s["taking"]["seconds"] if s["taking"] else None,
                took=tuple((t["digest"], t["bytes"], t["seconds"]) for t in s["took"]),
                took_from=s["took"][-1]["from"] if s["took"] else {},
                relays=s["relays"],
                error=s["error"],
                lost_ranks=tuple(s["lost_ranks"]),
                dense=s["took"][-1]["dense"] if s["took"] else {},
            )
            for s in data["sinks"]
        )
        return cls(address=address, run=data["run"], versions=versions, sinks=sinks, lost_ranks=tuple(data["lost_ranks"]))

    def of_step(self, step: int) -> SourceStatus:
        """The same of one version.

        Raises:
            NotFoundError: it is not kept.
        """
        versions: Sequence[VersionStatus] = [v for v in self.versions if v.step == step]
        if not versions:
            raise NotFoundError(f"no version of step {step} is kept", where=self.address, hint=f"kept: {[v.step for v in self.versions]}")
        digests = {v.digest for v in versions}
        sinks = tuple(replace(s, took=tuple(t for t in s.took if t[0] in digests)) for s in self.sinks)
        return replace(self, versions=tuple(versions), sinks=sinks)


def ask_status(address: str, secret: bytes, timeout: float) -> SourceStatus:
    """Ask the leader of the source at ``address``."""
    client = ControlClient(address, secret, timeout)
    try:
        answer, _ = client.ask({"op": "status", "name": split_address(address)[2]})
    finally:
        client.close()
    return SourceStatus.from_json(address, answer)
