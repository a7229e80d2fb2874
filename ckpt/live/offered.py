"""The newest version of a source, found by all ranks of a sink together: its leader asks that of the source, and hands on what it hears."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from ckpt.coordination.call import Call
from ckpt.coordination.rows import Row
from ckpt.errors import FormatError, NotFoundError, UsageError
from ckpt.text.json_reader import parse_json

from .relays.relay import RelayHolders, RelayOffer
from .source_connection import SourceConnection
from .versions import Manifest, Version, digest_of_blob

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


def find_newest(
    call: Call, source: SourceConnection, known: Mapping[str, bytes], newer_than: Version | None, end: float, *, base: str | None
) -> OfferedVersion:
    """The newest version; collective. ``known``: what the last version that all ranks have taken refers to. ``end``, ``base``: as for
    ``SourceConnection.newest``."""
    row: Row = {
        "after": None if newer_than is None else newer_than.to_json(),
        "blobs": digest_of_blob("".join(sorted(known)).encode()),
    }
    with call.phase("find"):
        if call.is_leader:
            answer, data, new = _ask(source, known, newer_than, end, base, call.check_failures)
            holders = {"source": answer["holders"], "relays": answer["relays"], "kept": answer["kept"]}

            def hand_on(rows: dict[int, Row]) -> Row:
                if any(each["after"] != row["after"] for each in rows.values()):
                    raise UsageError("the ranks of the sink take versions newer than different ones", hint="give the same newer_than=")
                # A rank that lost the others at the end of the last take has what came before: then all get everything.
                alike = all(each["blobs"] == row["blobs"] for each in rows.values())
                needed = Manifest.from_bytes(data).blobs()
                handed: Sequence[bytes] = [*new.values()] if alike else [new[d] if d in new else known[d] for d in needed]
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
        relays=RelayHolders(ranks=by_rank, offers=[RelayOffer.of(row) for row in holders["relays"]]),
        kept=frozenset(holders["kept"]),
    )
