"""Who has what: the old states of all ranks become one catalog, whose chunks lie in their memory.

every rank   collect: names, shapes, layouts, values ──► a row of digests ──► leader
leader       fetch each part of a table once, join them; all of them are one value, which ranks hand on to each other
every rank   tables ──► LiveCatalog, the same everywhere

Where all ranks have the tables of the last reshard, digests say so, and no table moves.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from ckpt import tree
from ckpt.adapters.collect import collect
from ckpt.adapters.shard_cache import ShardCache
from ckpt.adapters.tensors import LocalTensor
from ckpt.coordination.call import Call
from ckpt.coordination.rows import Row
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.load.job import LoadJob
from ckpt.engine.save.leader import grouped, grouped_parts
from ckpt.engine.save.plan import replicated_chunks
from ckpt.engine.save.replicas import Replicas, compare_replicas
from ckpt.errors import ConsistencyError, UsageError
from ckpt.layout.runs import numbers_in, runs_of
from ckpt.live.catalog import LiveCatalog
from ckpt.live.client import Holder
from ckpt.live.filling import PlanCache
from ckpt.live.server import PieceServer
from ckpt.live.versions import own_blob
from ckpt.plan import machines
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.plan.tables import Table, join_tables, split_tables, tables_from_bytes, tables_to_bytes
from ckpt.plan.values import join_values
from ckpt.text.json_reader import parse_json
from ckpt.transport.shm_pool import machine

from .reshard_phases import Meeting, Offered, OldMemory

if TYPE_CHECKING:
    from ckpt.layout.layout import Layout


@dataclass(eq=False)
class ReshardCache:
    """What the last reshard of a group found: between the same layouts the next one joins no tables and makes no plan."""

    old_shards: ShardCache = field(default_factory=ShardCache)
    new_shards: ShardCache = field(default_factory=ShardCache)
    key: str = ""
    """A digest of what ``catalog`` was made of: the tables of all ranks, or their digests."""
    catalog: LiveCatalog | None = None
    plans: PlanCache = field(default_factory=PlanCache)
    tensors: tuple[TensorSpec, ...] = ()
    assignments: Mapping[str, ChunkAssignment] = field(default_factory=dict)
    """How ``tensors``, those of this rank that others know too, are cut where their replicas are compared."""

    def replicas(self, tensors: tuple[TensorSpec, ...], local: Mapping[str, LocalTensor], rank: int) -> Replicas:
        if self.tensors != tensors:
            self.tensors, self.assignments = tensors, assign(tensors)
        return Replicas(self.assignments, replicated_chunks(self.assignments, rank), local.__getitem__, rank)


def meet(call: Call, options: str, *, has_old: bool, has_new: bool) -> Meeting:
    """Which ranks have what. Collective. ``options``: what all must have asked for alike."""
    ranks = call.group.ranks

    def local() -> Row:
        return {"old": has_old, "new": has_new, "machine": machine(), "options": options}

    def lead(rows: dict[int, Row]) -> Row:
        old = [rank for rank in ranks if rows[rank]["old"]]
        if not old:
            raise UsageError("no rank has an old state: all are empty", hint="pass the state that the job has as old_state")
        if len({row["options"] for row in rows.values()}) > 1:
            hint = "give the same only=, rename=, strict=, cast=, check_replicas= and names= everywhere"
            raise ConsistencyError("the ranks reshard with different options", hint=hint)
        return {
            "old": runs_of(old),
            "new": runs_of(rank for rank in ranks if rows[rank]["new"]),
            "machines": machines.spell([rows[rank]["machine"] for rank in ranks]),
            "secret": secrets.token_hex(32),
        }

    agreed: Row = call.map_reduce("meet", local, lead)
    if call.group.tree is not None:
        call.group.tree.know_machines(agreed["machines"])
    return Meeting(
        old=tuple(numbers_in(agreed["old"])),
        new=tuple(numbers_in(agreed["new"])),
        near=machines.neighbours(agreed["machines"], ranks.index(call.group.rank), ranks),
        secret=bytes.fromhex(agreed["secret"]),
    )


def offer(
    job: LoadJob,
    meeting: Meeting,
    state: Mapping[str, Any],
    layout: Layout | None,
    server: PieceServer | None,
    cache: ReshardCache,
    *,
    check_replicas: bool,
) -> Offered:
    """Say what this rank has, and hear what all have. Collective. ``server``: what gives this rank's part, if it serves."""
    call, rank = job.call, job.call.group.rank
    local: dict[str, LocalTensor] = {}

    def collected() -> Row:
        if rank not in meeting.old:
            return {"known": cache.key}
        if layout is not None:
            layout.check_ranks(meeting.old)
        with job.span("collect"):
            mine = collect(state, rank=rank, ranks=meeting.old, layout=layout, shards=cache.old_shards)
        table = mine.shard_table
        local.update(table.tensors)
        settle_devices(devices_of(table.tensors.values()), call.url)
        shared, own = split_tables((t.info for t in table.tensors.values()), table.aliases, table.own)
        row: Row = {
            "table": " ".join(call.share(part.to_bytes()) for part in shared.parts()),
            "state": call.share(tree.text(mine.state).encode()),
        }
        row["known"] = cache.key
        if mine.own or table.own:
            row["own"] = call.share(own_blob(mine.own, own))
        if check_replicas and len(meeting.old) > 1:
            with job.span("hash"):
                replicas = cache.replicas(shared.tensors, local, rank)
                replicas.hash(job.options.threads, call.heartbeat)
                row["replicas"] = replicas.row(call)
        if server is not None:
            row |= {"addresses": server.addresses, "network": server.network}
        return row

    agreed: Row = call.map_reduce("offer", collected, partial(_lead_offer, call, meeting, cache))
    call.fetch_all(agreed[key] for key in ("values", "tables") if key in agreed)
    values = parse_json(call.fetch(agreed["values"]))
    if "tables" in agreed:
        _join(call, meeting, cache, agreed["key"], call.fetch(agreed["tables"]), values["own"])
    assert cache.catalog is not None  # of which all ranks have told the key
    return Offered(
        meeting=meeting,
        local=local,
        before=[(name, OldMemory(part.memory)) for name, tensor in local.items() for part in tensor.parts],
        catalog=cache.catalog.with_values(values["state"], {int(place): row["values"] for place, row in values["own"].items()}),
        holders={
            rank: Holder(rank=rank, addresses=tuple((host, port) for host, port in addresses), network=network)
            for rank, addresses, network in values["holders"]
        },
    )


def _lead_offer(call: Call, meeting: Meeting, cache: ReshardCache, rows: dict[int, Row]) -> Row:
    """Leader: check that the old states make one, and leave for all ranks what they need to know of it."""
    offers = {rank: rows[rank] for rank in meeting.old}
    if "replicas" in offers[meeting.old[0]]:
        compare_replicas(call, offers)
    call.fetch_all(row[key] for row in offers.values() for key in ("state", "own") if key in row)
    own = {meeting.old.index(rank): parse_json(call.fetch(row["own"])) for rank, row in offers.items() if "own" in row}
    values = {
        "state": join_values([(ranks, parse_json(call.fetch(digest))) for digest, ranks in grouped(offers, "state")]),
        "own": own,
        "holders": [[rank, row["addresses"], row["network"]] for rank, row in offers.items() if "addresses" in row],
    }
    agreed = {"values": call.leave(json.dumps(values).encode())}
    parts = grouped_parts(offers)
    key = _key(meeting.old, parts, own)
    if any(row["known"] != key for row in rows.values()):
        call.fetch_all(parts)
        tables = tables_to_bytes((ranks, call.fetch(digest)) for digest, ranks in parts.items())
        _join(call, meeting, cache, key, tables, own)
        agreed |= {"key": key, "tables": call.leave(tables)}
    return agreed


def _key(old: Sequence[int], parts: Mapping[str, Sequence[int]], own: Mapping[int, Row]) -> str:
    """A digest of all that a catalog is made of, but the values."""
    made_of = [old, [*parts.items()], [[place, row["table"]] for place, row in own.items()]]
    return xxhash.xxh3_128_hexdigest(json.dumps(made_of).encode())


def _join(call: Call, meeting: Meeting, cache: ReshardCache, key: str, tables: bytes, own: Mapping[Any, Row]) -> None:
    """The catalog of all old states, unless it is that of the last reshard. ``own``: what single ranks have, by place."""
    if cache.catalog is not None and cache.key == key:
        return
    own_tables = {int(place): Table.from_bytes(row["table"].encode()) for place, row in own.items()}
    joined = join_tables(tables_from_bytes(tables), stored=False)
    aliases = joined.aliases | {n: to for table in own_tables.values() for n, to in table.aliases.items()}
    cache.catalog = LiveCatalog.of(
        replace(joined, aliases=aliases),
        None,
        url=call.url,
        world_size=len(meeting.old),
        own=[(place, tensor) for place, table in own_tables.items() for tensor in table.tensors],
    )
    cache.key = key
