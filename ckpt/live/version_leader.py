"""The leader's part of a publication: do the parts that all ranks have sealed make one state? Then it is a version."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckpt.engine.save.leader import grouped
from ckpt.engine.save.replicas import compare_replicas
from ckpt.errors import ConsistencyError
from ckpt.net.call import Call
from ckpt.net.rows import Row
from ckpt.plan.tables import Table, join_tables
from ckpt.plan.values import join_values
from ckpt.text import parse_json

from .registry import VersionRegistry
from .versions import Manifest, SegmentDigest, digest_of_blob


class VersionLeader:
    """Completes versions, and has them registered. ``endpoints``: where each rank gives its pieces."""

    def __init__(self, registry: VersionRegistry, endpoints: Mapping[int, Row]) -> None:
        self.registry = registry
        self._endpoints = endpoints
        self._tables = ""
        """What the tensors of the last version came from; as long as it is the same, so are they."""
        self._names = ""
        """The digest of their names, sorted."""

    def complete(self, call: Call, number: int, rows: dict[int, Row]) -> Row:
        """Make the version ``number`` of what all ranks have sealed; what they need to serve it, and the numbers that are dropped."""
        steps = {rank: row["step"] for rank, row in rows.items()}
        if len(set(steps.values())) > 1:
            raise ConsistencyError(
                f"the ranks publish different steps: {steps}", where=call.url, hint="publish the same step on every rank"
            )
        compare_replicas(call, rows)
        digests = [d for row in rows.values() for d in (row["table"], row["state"], row["own"]) if d is not None]
        new = [d for d in dict.fromkeys(digests) if not self.registry.knows(d)]
        call.fetch_all(new)
        blobs = {d: call.fetch(d) for d in new}
        known = {d: blobs[d] if d in blobs else self.registry.blob(d) for d in digests}
        tables = tuple((digest, tuple(ranks)) for digest, ranks in grouped(rows, "table"))
        own = {rank: row["own"] for rank, row in rows.items() if row["own"] is not None}
        states = grouped(rows, "state")
        state = states[0][0]
        if len(states) > 1:
            joined = json.dumps(join_values([(ranks, parse_json(known[digest])) for digest, ranks in states])).encode()
            state = digest_of_blob(joined)
            blobs[state] = joined
        own_tables = [parse_json(known[digest])["table"] for digest in own.values()]
        same = json.dumps([tables, own_tables])
        if same != self._tables:
            joined_tables = join_tables([(ranks, Table.from_bytes(known[digest])) for digest, ranks in tables], stored=False)
            names = {*joined_tables.tensors}
            names.update(t.name for text in own_tables for t in Table.from_bytes(text.encode()).tensors)
            self._tables, self._names = same, call.leave(json.dumps(sorted(names)).encode())
        manifest = Manifest(
            run=self.registry.run,
            step=next(iter(steps.values())),
            number=number,
            ranks=call.group.ranks,
            tables=tables,
            state=state,
            own=own,
            segments={rank: SegmentDigest(nbytes=row["segment"][0], digest=row["segment"][1]) for rank, row in rows.items()},
        )
        holders = [{"rank": rank, **self._endpoints[rank], "at": row["at"]} for rank, row in rows.items()]
        version, oldest = self.registry.add(manifest, holders, blobs)
        return {"version": version.to_json(), "oldest": oldest, "names": self._names}
