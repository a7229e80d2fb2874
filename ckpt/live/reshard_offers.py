"""Who has what, before a reshard: the old states of all ranks become one catalog, whose chunks lie in their memory. And the values that the
phases of a reshard share.

every rank   collect: names, shapes, layouts, values ──► a row of digests ──► leader
leader       fetch each part of a table once, join them; all of them are one value, which ranks hand on to each other
every rank   tables ──► LiveCatalog, the same everywhere

Where all ranks have the tables of the last reshard, digests say so, and no table moves.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ckpt import units
from ckpt.concurrency import when_dropped
from ckpt.engine.devices import settle_devices
from ckpt.engine.load.fill import LoadJob
from ckpt.engine.save.capture import sample_of
from ckpt.engine.save.replicas import Replicas, compare_replicas
from ckpt.errors import ConsistencyError, NotFoundError, UsageError
from ckpt.net.call import Call, grouped, grouped_parts
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.net.liveness import Members
from ckpt.net.shared_memory import machine
from ckpt.plan import machines, tree
from ckpt.plan.layout.layout import check_layout
from ckpt.plan.layout.partition import numbers_in, runs_of
from ckpt.plan.ownership import ChunkAssignment, assign, replicated_chunks
from ckpt.plan.tables import Table, join_tables, split_tables, tables_from_bytes, tables_to_bytes
from ckpt.plan.values import join_values
from ckpt.state.collect import collect
from ckpt.state.shard_table import ShardCache
from ckpt.state.tensors import LocalTensor, raw_view, reads_otherwise
from ckpt.telemetry.spans import SpanTable
from ckpt.text import number_of, parse_json

from .filling import PlanCache, check_not_freed
from .holdings import BoxMemory, Check, Holdings, LiveCatalog, TensorParts, own_blob
from .pull import Holder, PieceClient
from .server import PieceServer

if TYPE_CHECKING:
    from ckpt.plan.layout.layout import Layout


# What each phase of a reshard gives the next one. Frozen values.


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """Which ranks have an old state, which a new one, and which are on this rank's machine."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    near: Set[int]
    secret: bytes


class OldMemory:
    """Memory of the old state, and what tells that it was written to since: autograd's count of writes, or another address, or other bytes
    in a sample, as neither ``tensor.data`` nor numpy counts."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._before = self._count_and_address(), (None if reads_otherwise(self.memory) else sample_of(raw_view(self.memory)))

    def changed(self) -> bool:
        counted, sample = self._before
        if self._count_and_address() != counted:
            return True  # and there may be nothing to sample
        return sample is not None and not sample.same(sample_of(raw_view(self.memory)))

    def _count_and_address(self) -> tuple[int, int]:
        return 0 if self.memory.is_inference() else self.memory._version, self.memory.data_ptr()


@dataclass(frozen=True, kw_only=True, eq=False)
class Offered:
    """The old states of all ranks as one catalog, and this rank's part of it."""

    meeting: Meeting
    local: Mapping[str, LocalTensor]
    before: Sequence[tuple[str, OldMemory]]
    """What each part was like, by name."""
    catalog: LiveCatalog
    holders: Mapping[int, Holder]

    def check_unchanged(self, targets: Iterable[LocalTensor]) -> None:
        """Raise ConsistencyError if the old state was written to since it was offered, but for memory that the new one shares."""
        shared = {part.memory.untyped_storage().data_ptr() for target in targets for part in target.parts}
        for name, part in self.before:
            if part.memory.untyped_storage().data_ptr() not in shared and part.changed():
                raise ConsistencyError(
                    f"tensor {name} of the old state was changed while it was resharded, so what came of it may be a mix",
                    hint="let nothing write to the old state before the call returns, and reshard again",
                )


@dataclass(frozen=True, eq=False)
class OldTables:
    """The tables of this rank's old state: what other ranks know too, and this rank's own. ``key``: what they were made of."""

    key: tuple[object, ...]
    shared: Table
    own: Table

    @cached_property
    def parts(self) -> list[bytes]:
        """Of ``shared``, as they are sent."""
        return [part.to_bytes() for part in self.shared.parts()]

    @cached_property
    def assignments(self) -> Mapping[str, ChunkAssignment]:
        """How the tensors of ``shared`` are cut where their replicas are compared."""
        return assign(self.shared.tensors)


@dataclass(eq=False)
class ReshardCache:
    """What the last reshard of a group found: between the same layouts the next one joins no tables and makes no plan."""

    old_shards: ShardCache = field(default_factory=ShardCache)
    new_shards: ShardCache = field(default_factory=ShardCache)
    key: str = ""
    """A digest of what ``catalog`` was made of: the tables of all ranks, or their digests."""
    catalog: LiveCatalog | None = None
    plans: PlanCache = field(default_factory=PlanCache)
    old_tables: OldTables | None = None


def meet(call: Call, options: str, secret: str, *, has_old: bool, has_new: bool) -> Meeting:
    """Which ranks have what. Collective. ``options``: what all must have asked for alike; ``secret``: the leader's becomes that of all."""
    ranks = call.group.ranks

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
            "secret": secret,
        }

    agreed: Row = call.map_reduce("meet", lambda: {"old": has_old, "new": has_new, "machine": machine(), "options": options}, lead)
    if call.group.tree is not None:
        call.group.tree.know_machines(agreed["machines"])
    return Meeting(
        old=tuple(numbers_in(agreed["old"])),
        new=tuple(numbers_in(agreed["new"])),
        near=machines.neighbours(agreed["machines"], call.group.position, ranks),
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
            check_layout(layout, meeting.old)
        with job.span("collect"):
            mine = collect(state, rank=rank, ranks=meeting.old, layout=layout, shards=cache.old_shards)
        table = mine.shard_table
        local.update(table.tensors)
        if table.devices:
            settle_devices(table.devices, call.url)
        infos = tuple(t.info for t in table.tensors.values())
        key = infos, dict(table.aliases), frozenset(table.own)
        tables = cache.old_tables
        if tables is None or tables.key != key:
            tables = cache.old_tables = OldTables(key, *split_tables(infos, table.aliases, table.own))
        shared, values = " ".join(map(call.share, tables.parts)), call.share(tree.text(mine.state, sort_keys=False).encode())
        row: Row = {"table": shared, "state": values, "known": cache.key}
        if mine.own or table.own:
            row["own"] = call.share(own_blob(mine.own, tables.own))
        if check_replicas and len(meeting.old) > 1:
            with job.span("hash"):
                assignments = tables.assignments
                replicas = Replicas(assignments, replicated_chunks(assignments, rank), local.__getitem__, rank)
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
        catalog=cache.catalog.with_values(values["state"], {number_of(place): row["values"] for place, row in values["own"].items()}),
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
    own = {str(meeting.old.index(rank)): parse_json(call.fetch(row["own"])) for rank, row in offers.items() if "own" in row}
    values = {
        "state": join_values([(ranks, parse_json(call.fetch(digest))) for digest, ranks in grouped(offers, "state")]),
        "own": own,
        "holders": [[rank, row["addresses"], row["network"]] for rank, row in offers.items() if "addresses" in row],
    }
    agreed = {"values": call.leave(json.dumps(values).encode())}
    parts = grouped_parts(offers)
    # A digest of all that a catalog is made of, but the values.
    made_of = [meeting.old, [*parts.items()], [[place, row["table"]] for place, row in own.items()]]
    key = xxhash.xxh3_128_hexdigest(json.dumps(made_of).encode())
    if any(row["known"] != key for row in rows.values()):
        call.fetch_all(parts)
        tables = tables_to_bytes((ranks, call.fetch(digest)) for digest, ranks in parts.items())
        _join(call, meeting, cache, key, tables, own)
        agreed |= {"key": key, "tables": call.leave(tables)}
    return agreed


def _join(call: Call, meeting: Meeting, cache: ReshardCache, key: str, tables: bytes, own: Mapping[Any, Row]) -> None:
    """The catalog of all old states, unless it is that of the last reshard. ``own``: what single ranks have, by place."""
    if cache.catalog is not None and cache.key == key:
        return
    own_tables = {number_of(place): Table.from_bytes(row["table"].encode()) for place, row in own.items()}
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


# The ranks that reshard together: their calls, the connections that notice who dies, and what the next reshard need not find again.


@dataclass(eq=False)
class ReshardRanks:
    """The ranks of one process group. Their calls are in a part of the job's store that saves and loads do not use: these make no
    connections, and would else see who departs after the last reshard."""

    group: Group
    cache: ReshardCache = field(default_factory=ReshardCache)
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    """Of the leader: what the ranks prove to each other that they know."""
    served: dict[str, Holdings] = field(default_factory=dict)
    """What the server gives, while a reshard goes on."""
    clients: dict[int, PieceClient] = field(default_factory=dict)
    """Connections to other ranks, and their shared memory: the next reshard needs neither a handshake nor new pages."""
    _server: PieceServer | None = None
    _serves: tuple[bytes, float] = b"", 0.0
    _close: Callable[[], object] = lambda: None
    _connected: bool = False

    def __post_init__(self) -> None:
        when_dropped(self, _close_clients, self.clients)

    def server(self, secret: bytes, timeout: float) -> PieceServer:
        """What gives this rank's part: that of the last reshard, unless this one has another secret or timeout, or this is a fork."""
        if self._server is None or self._serves != (secret, timeout) or not self._server.is_alive():
            self.disconnect()
            served = self.served  # not this object, which the threads of the server would keep for ever

            def holdings(version: str) -> Holdings:
                if version not in served:
                    raise NotFoundError(f"there is no {version} here")
                return served[version]

            store = self.group.store.host if self.group.store is not None else None
            self._server, self._serves = PieceServer(holdings, secret, timeout, store=store), (secret, timeout)
            self._close = when_dropped(self, self._server.close)
        return self._server

    def disconnect(self) -> None:
        """After a failure: nobody reads the old state any more, and the next reshard begins anew."""
        _close_clients(self.clients)
        self._close()
        self._server = None

    def connect(self, call: Call) -> None:
        """In their first call the ranks connect to each other: who dies in this one or a later one is named at once. The connections end
        with the process group, or with the process."""
        if self._connected:
            return
        self._connected = True  # on all ranks, however it ends: they must agree on who comes to this phase
        self.group.connect(call, lambda rank: None)
        if self.group.links is not None:
            finalize(self.group, self.group.links.close)


def _close_clients(clients: dict[int, PieceClient]) -> None:
    while clients:
        clients.popitem()[1].close()


def reshard_ranks(base: Group) -> ReshardRanks:
    """Those of a group; made by its first reshard, on all ranks."""
    known = _known.get(base)
    if known is None:
        known = _known[base] = ReshardRanks(base.apart())
    return known


_known: WeakKeyDictionary[Members, ReshardRanks] = WeakKeyDictionary()


# The tensors of a state as holdings: views of their memory where that is on the host, copies of single boxes where it is not.


def holdings_of(tensors: Mapping[int, LocalTensor], check: Check | None = None) -> Holdings:
    """What this rank has, by number of the tensor. The memory stays the state's own: it must not change while it is served."""
    parts = {
        number: TensorParts(len(local.info.shape), local.info.dtype.itemsize, [BoxMemory(part.box, part.memory) for part in local.parts])
        for number, local in tensors.items()
    }
    return Holdings(tensors=parts, rows=tensor_rows, check=check)


def tensor_rows(memory: torch.Tensor, slices: tuple[slice, ...]) -> npt.NDArray[np.generic]:
    """The ``Rows`` of tensors, wherever they are."""
    check_not_freed(memory)
    memory = memory.detach()
    if memory.is_cpu and not reads_otherwise(memory):
        rows: npt.NDArray[np.generic] = raw_view(memory).numpy()
        return rows[slices]
    part = memory[slices]
    if reads_otherwise(part):
        part = part.resolve_conj().resolve_neg()
    copied: npt.NDArray[np.generic] = raw_view(part).contiguous().cpu().numpy()
    return copied


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one rank: ``needed`` by its new state as the old one has them, ``sent`` to others, ``copied`` within its own memory,
    ``received`` from others."""

    needed: int
    sent: int
    copied: int
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """What a reshard did on this rank; on the first rank, ``ranks`` has the bytes of all, elsewhere those of the rank itself.

    ``missing``, ``unexpected``, ``renamed`` and ``cast`` are as in a :class:`ckpt.LoadReport`. ``bytes_needed`` by the tensors of the new
    state, as the old one has them: ``bytes_copied`` of them within this rank, ``bytes_received`` from others. ``bytes_sent`` to others.
    ``seconds`` of wall time. ``spans.sums`` has the seconds and bytes of its phases: ``collect`` (what the old state consists of), ``hash``
    (digests of replicas), ``match``, ``plan``, ``copy`` (within this rank), ``pull`` (one for each connection to a rank), and ``verify``
    within it; none with ``CKPT_SPANS=off``.
    """

    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    bytes_needed: int
    bytes_sent: int
    bytes_copied: int
    bytes_received: int
    seconds: float
    ranks: Mapping[int, Traffic]
    spans: SpanTable

    def __str__(self) -> str:
        return f"moved {units.plural(self.tensors, 'tensor')}, {units.size(self.bytes_needed)}, in {units.duration(self.seconds)}"
