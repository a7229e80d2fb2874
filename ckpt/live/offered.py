"""The newest version of a source, found by all ranks of a sink together: its leader asks that of the source over a connection of its own,
and hands on what it hears."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ckpt import settings
from ckpt.errors import AccessError, CkptError, CorruptError, DeadlineError, FormatError, NotFoundError, RankFailedError, UsageError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.shared_memory import machine
from ckpt.net.wire import ADDRESSES, Either, Kind, checked, decoded, is_count, is_hex, kind_of
from ckpt.plan.tables import ranks_text
from ckpt.text import parse_json

from .control import ControlClient, SinkSecret, split_address
from .holdings import VERSION, Manifest, Version, digest_of_blob
from .relay import RelayHolders, RelayOffer

if TYPE_CHECKING:
    from .segment_reader import SharedChecks

# What the leader of a sink asks the leader of the source, and tells it.

log = logging.getLogger("ckpt")

_numbers = count(1)
"""Of the sinks of this process."""
_PATIENCE = 5.0
"""Seconds for a source that is to hear of a rank that died."""
_LOOK = 0.1
"""Seconds between looks for the secret of a source that has not started yet."""
_HOLDER: Kind = {
    "rank": is_count,
    "pid": is_count,
    "at": (is_count, is_hex),
    "addresses": ADDRESSES,
    "network": str,
    "machine": str,
    "domain": Either(str, None),
    "delta": bool,
}
NEWEST: Kind = Either(
    {"version": None, "lost": [is_count]}, {"version": VERSION, "holders": [_HOLDER], "relays": [kind_of(RelayOffer)], "kept": [str]}
)
"""The answer to the question for the newest version."""


def _never(newer: str, lost: Sequence[int], where: str) -> RankFailedError:
    """The error where a sink waits for a version of a source that has lost ranks."""
    message = f"the source has {newer}, and publishes none any more: its {ranks_text(lost)} died"
    error = RankFailedError(message, where=where, hint="start the trainer again, and take again")
    error.ranks = tuple(lost)
    return error


class SourceConnection:
    """A connection that is made when something is asked, and again when it was lost. ``ranks``: how many the sink has.
    ``relays``: it passes on what it takes."""

    def __init__(self, address: str, secret: SinkSecret, timeout: float, ranks: int, *, relays: bool) -> None:
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._relays = relays
        name = f"{socket.gethostname()}:{os.getpid()}/{next(_numbers)}"
        self._who: Row = {"name": split_address(address)[2], "sink": name, "ranks": ranks}
        self._client: ControlClient | None = None
        self._left = False
        self._lock = threading.Lock()
        """Whoever asks something has it: takes, and the thread that hears of a rank that died."""

    def newest(self, after: Version | None, end: float, alive: Callable[[], None], *, base: str | None = None) -> tuple[Row, bytes]:
        """The newest version and where its parts are, and the bytes of its manifest; waits until ``end`` for another one than ``after``.
        A sink that relays may be told a moment later, when it can take from those before it; at once where it has a ``base`` that is kept,
        and takes only changes."""
        question: Row = {
            "op": "newest",
            "after": None if after is None else after.to_json(),
            "machine": machine(),
            "domain": settings.domain(),
            "base": base,
        }
        tries = 2  # a source that has started again has closed the old connection
        while True:
            alive()
            patience = max(0.0, min(self._timeout / 4, end - time.monotonic())) if self._relays else None
            try:
                answer, data = self._ask(question | {"relays": patience}, end, alive)
            except CkptError as err:
                tries -= 1
                if not tries or isinstance(err, (AccessError, DeadlineError, FormatError, NotFoundError)):
                    raise
                continue
            checked(answer, NEWEST, "answer about versions", self._address)
            if answer["version"] is not None:
                if digest_of_blob(data) != answer["version"]["digest"]:
                    raise CorruptError("the manifest of a version came damaged", where=self._address, hint="take again")
                return answer, data
            newer = "no version yet" if after is None else f"no version newer than {after}"
            if answer["lost"]:
                raise _never(newer, answer["lost"], self._address)
            if time.monotonic() >= end:
                hint = "look whether it publishes, or wait longer (timeout=)"
                raise DeadlineError(f"the source has {newer}", where=self._address, hint=hint)

    def blobs(self, digests: Sequence[str], alive: Callable[[], None]) -> dict[str, bytes]:
        """What manifests refer to, by digest."""
        if not digests:
            return {}
        answer, data = self._ask({"op": "blobs", "digests": digests}, time.monotonic() + self._timeout, alive)
        sizes = checked(answer, {"sizes": (is_count,) * len(digests)}, "answer about parts of a version", self._address)["sizes"]
        blobs, at = {}, 0
        for digest, size in zip(digests, sizes, strict=True):
            blobs[digest] = data[at : at + size]
            at += size
            if digest_of_blob(blobs[digest]) != digest:
                raise CorruptError("a part of a version's manifest came damaged", where=self._address, hint="take again")
        return blobs

    def offer(self, version: Version, relays: Sequence[Row]) -> None:
        """Let other sinks take a version from ranks of this one; or say that they cannot, with none."""
        self._tell({"op": "offer", "version": version.to_json(), "relays": relays})

    def tell(self, version: Version, phase: str, **more: object) -> None:
        """Let the source know how far this sink is. That it does not hear it harms nothing."""
        self._tell({"op": "progress", "phase": phase, "version": version.to_json(), **more})

    def tell_taken(self, version: Version, took_from: Mapping[str, int], dense: Mapping[str, int], seconds: float) -> None:
        """Let the source know that this sink has a version, by whom its bytes came, and why they came whole."""
        self.tell(version, "taken", bytes=sum(took_from.values()), seconds=round(seconds, 6), took_from=took_from, dense=dense)

    def tell_lost(self, rank: int) -> None:
        """Let the source know that a rank of this sink has died. Any thread."""
        try:
            if not self._left:
                self._ask({"op": "lost", "rank": rank}, time.monotonic() + _PATIENCE, lambda: None)
        except CkptError as err:
            log.debug("live: the source was not told of a rank that died: %s", err)

    def _tell(self, message: Row) -> None:
        with self._lock:
            if self._client is None or self._client.closed:
                return
            try:
                self._client.ask({**self._who, **message})
            except CkptError as err:
                log.debug("live: the source was not told: %s", err)

    def leave(self) -> None:
        """Say good-bye, if the source is there; a take that broke off may have ended the connection."""
        self._left = True
        if self._client is None:
            return
        with suppress(CkptError):
            self._ask({"op": "leave"}, time.monotonic(), lambda: None, patience=_PATIENCE)
        with self._lock:
            self._client.close()

    def _ask(self, question: Row, end: float, alive: Callable[[], None], *, patience: float | None = None) -> tuple[Row, bytes]:
        """The answer of the source. Until it was reached for the first time, it may start until ``end``. ``patience``: wait no longer for
        an answer."""
        with self._lock:
            if self._client is None or self._client.closed:
                self._client = self._connected(max(end, time.monotonic() + 1.0), alive)
            if patience is not None:
                self._client.hurry(patience)
            return self._client.ask({**self._who, **question}, alive)

    def _connected(self, end: float, alive: Callable[[], None]) -> ControlClient:
        """Until the source was reached for the first time, it may start until ``end``: its secret may come then, too, or another one."""
        patient = self._client is None
        while patient and self._secret.find() is None and time.monotonic() < end and self._secret.may_come():
            alive()
            time.sleep(_LOOK)
        while True:
            secret = self._secret()
            try:
                reach = end - time.monotonic()
                return ControlClient(self._address, secret, self._timeout, alive, reach=reach, patient=patient)
            except AccessError:
                if self._secret() == secret:  # else the source has started since it was read
                    raise


DROPS = 5
"""Times that a take begins again since its version was dropped: a source that keeps so few versions is too fast for this sink."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OfferedVersion:
    """A version that may be taken: where each rank of the source is, and all that its manifest refers to. ``kept``: what holders call the
    versions that they have, of which they can tell what changed since."""

    version: Version
    manifest: Manifest
    blobs: Mapping[str, bytes]
    holders: Mapping[int, Row]
    relays: RelayHolders
    kept: Set[str]
    checks: Sequence[str]
    """Where the ranks of the sink share what they have checked (``SharedChecks``)."""


def find_newest(
    call: Call,
    source: SourceConnection,
    known: Mapping[str, bytes],
    newer_than: Version | None,
    end: float,
    *,
    base: str | None,
    checks: SharedChecks,
) -> OfferedVersion:
    """The newest version; collective. ``known``: what the last version that all ranks have taken refers to. ``end``, ``base``: as for
    ``SourceConnection.newest``."""
    row: Row = {"after": None if newer_than is None else newer_than.to_json(), "blobs": digest_of_blob("".join(sorted(known)).encode())}
    with call.phase("find"):
        if call.is_leader:
            answer, data, new = _ask(source, known, newer_than, end, base, call.check_failures)
            manifest = Manifest.from_bytes(data)
            shared = checks.begin(manifest) if call.group.size > 1 and settings.live_local() == "on" else []
            holders = {"source": answer["holders"], "relays": answer["relays"], "kept": answer["kept"], "checks": shared}

            def hand_on(rows: dict[int, Row]) -> Row:
                if any(each["after"] != row["after"] for each in rows.values()):
                    raise UsageError("the ranks of the sink take versions newer than different ones", hint="give the same newer_than=")
                # A rank that lost the others at the end of the last take has what came before: then all get everything.
                alike = all(each["blobs"] == row["blobs"] for each in rows.values())
                handed: Sequence[bytes] = [*new.values()] if alike else [new[d] if d in new else known[d] for d in manifest.blobs()]
                return {
                    "manifest": call.leave(data),
                    "blobs": [call.leave(blob) for blob in handed],
                    "holders": call.leave(json.dumps(holders).encode()),
                }

            call.lead(row, hand_on)
        else:
            agreed = call.follow(row)
            call.fetch_all([agreed["manifest"], *agreed["blobs"], agreed["holders"]])
            data = call.fetch(agreed["manifest"])
            new = {digest: call.fetch(digest) for digest in agreed["blobs"]}
            holders = parse_json(call.fetch(agreed["holders"]))
        return _version_of(data, {**known, **new}, holders, call.url)


def _ask(
    source: SourceConnection,
    known: Mapping[str, bytes],
    newer_than: Version | None,
    end: float,
    base: str | None,
    alive: Callable[[], None],
) -> tuple[Row, bytes, dict[str, bytes]]:
    """Leader: the newest version with the bytes of its manifest, and what that refers to and is not known."""
    tries = DROPS
    while True:
        answer, data = source.newest(newer_than, end, alive, base=base)
        try:
            return answer, data, source.blobs([d for d in Manifest.from_bytes(data).blobs() if d not in known], alive)
        except NotFoundError:  # it was dropped between the two questions
            tries -= 1
            if not tries:
                raise


def _version_of(data: bytes, blobs: Mapping[str, bytes], holders: Row, where: str) -> OfferedVersion:
    manifest = Manifest.from_bytes(data)
    by_rank = {row["rank"]: row for row in holders["source"]}
    if by_rank.keys() != {*manifest.ranks} or by_rank.keys() != manifest.segments.keys():
        raise FormatError("the ranks of the source are not those of its manifest", where=where, hint="please report this")
    return OfferedVersion(
        version=manifest.version(data),
        manifest=manifest,
        blobs={digest: blobs[digest] for digest in manifest.blobs()},
        holders=by_rank,
        relays=RelayHolders(ranks=by_rank, offers=[decoded(RelayOffer, row) for row in holders["relays"]]),
        kept=frozenset(holders["kept"]),
        checks=holders["checks"],
    )
