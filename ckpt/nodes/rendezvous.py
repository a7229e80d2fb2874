"""How the ranks of a job find out which nodes they run on, and reach each other's files; and the memory of machines where no rank runs. No
torch.

look     every rank   its machine, directory and domain ──► leader: the nodes, in the order of their first ranks
serve    first rank of each node   a server, and a file in its directory ──► leader: addresses of all
apart    every rank   whose files do I see? ──► leader: those of my node, or two machines have one name; and, of the first ranks, no others,
                                                or this is one directory for all
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ckpt import settings
from ckpt.concurrency import map_tasks
from ckpt.errors import AccessError, CkptError, FormatError, UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_below, real_url
from ckpt.net.channel import Row
from ckpt.net.endpoints import network
from ckpt.net.group import Group
from ckpt.plan.tables import ranks_text

from . import memory_client
from . import memory_connection as memory_place
from .file_server import NodeConnections, NodeServer, RemoteNode
from .memory_client import secret_for
from .memory_remote import MemoryConnections
from .nodes import StorageNode

# Memory daemons of machines where no rank runs (``CKPT_MEMORY``): what the job before had there is read, never changed.

HELLO_SECONDS = 10.0
"""After so long without an answer a machine counts as gone."""
_THREADS = 16

log = logging.getLogger("ckpt")


def surviving_nodes(directory: str, known: Collection[str | None]) -> Sequence[StorageNode]:
    """Those that answer of the daemons that ``CKPT_MEMORY`` names, without the ones whose ids are ``known``: these are the job's own. There
    are none if the ``directory`` of the run is no ``memory://name``."""
    addresses = settings.memory_machines() if is_memory(directory) else ()
    if not addresses:
        return ()
    greeted = map_tasks(_greet, addresses, _THREADS, "ckpt-survivors")
    met = {address: who for address, who in zip(addresses, greeted, strict=True) if who is not None}
    there = {id: (address, host) for address, (id, host) in met.items() if id not in known}
    nodes = []
    for address, host in there.values():
        root = f"memory://{address}/{directory.removeprefix('memory://')}"
        node = StorageNode(name=f"{host}:{root}", domain=host, below=partial(open_below, root), host=host, in_memory=True)
        nodes.append(node)
    return nodes


def _greet(address: str) -> tuple[str, str] | None:
    memory = MemoryConnections(address, secret_for(address), HELLO_SECONDS)
    try:
        return memory.hello()
    except (AccessError, FormatError):
        raise
    except CkptError as err:
        log.warning("the memory daemon at %s (CKPT_MEMORY) is passed over: %s", address, err)
        return None
    finally:
        memory.close()


SCHEME = "memory://"
_PATIENCE = 30.0
"""Seconds without a byte after which a node counts as away: others may have what it has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobNodes:
    """What a rank knows of all nodes, and what it has open for them. ``own`` is the number of its node."""

    nodes: Sequence[StorageNode]
    own: int
    server: NodeServer | None = None
    """On the first rank of a node."""
    connections: Sequence[NodeConnections] = ()
    survivors: Sequence[StorageNode] = ()
    """Machines where no rank runs, whose memory has something of the run."""

    def close(self) -> None:
        for one in self.connections:
            one.close()
        if self.server is not None:
            self.server.close()


def is_memory(url: str) -> bool:
    """Whether this is the memory of the machine: not that of another one, whose address would come first."""
    first = url.removeprefix(SCHEME).partition("/")[0]
    return url.startswith(SCHEME) and bool(first) and not first.rpartition(":")[2].isdecimal()


def own_node(directory: str, ranks: tuple[int, ...] = ()) -> StorageNode:
    """The node of this process alone, which is all it knows of before the ranks have met."""
    host = socket.gethostname()
    # What tells nodes apart: a directory of a machine, or one of its memory daemons.
    place = f"{memory_place.folder()}:{directory}" if is_memory(directory) else real_url(directory)
    domain = settings.domain() or host
    below, in_memory = partial(open_below, directory), is_memory(directory)
    return StorageNode(name=f"{host}:{place}", domain=domain, below=below, ranks=ranks, host=host, in_memory=in_memory)


def meet(group: Group, directory: str, url: str, timeout: float) -> JobNodes:
    """Find all nodes of the job. Collective."""
    me = own_node(directory, (group.rank,))
    if group.size == 1:
        return JobNodes(nodes=[me], own=0, survivors=surviving_nodes(directory, [_daemon_id(directory)]))
    call = group.call("nodes", url, timeout)
    rows = call.map_reduce("look", lambda: {"node": me.name, "domain": me.domain, "host": me.host, "daemon": _daemon_id(directory)}, _nodes)
    own = next(n for n, row in enumerate(rows) if row["name"] == me.name)
    first = rows[own]["ranks"][0] == group.rank
    with ExitStack() as failed:
        server, token = None, f".prepare-{secrets.token_hex(8)}.tmp"
        secret = secrets.token_bytes(32)
        local = me.below("")

        def serve() -> Row:
            nonlocal server
            if not first:
                return {}
            local.prepare()
            local.put_if(token, b"", expected=None)
            failed.callback(local.delete, token)
            server = NodeServer(local, secret, timeout, store=group.store.host if group.store is not None else None)
            failed.callback(server.close)
            return {"addresses": server.addresses, "network": server.network, "secret": secret.hex(), "token": token}

        reached = call.map_reduce("serve", serve, lambda served: [served[node["ranks"][0]] for node in rows])
        mine = reached[own]["token"]
        others = [one["token"] for n, one in enumerate(reached) if n != own] if first else []
        survivors: list[StorageNode] = []

        def greet() -> Row:  # in a phase of the call, so that all ranks hear of an error
            survivors.extend(surviving_nodes(directory, [row["daemon"] for row in rows]))
            return {}

        call.map_reduce("survivors", greet, lambda rows: None)
        call.map_reduce("apart", partial(_seen, local, mine, others), partial(_check_apart, directory, rows))
        call.drain()
        failed.pop_all()
    if first:
        local.delete(token)
    nodes, connections = [], []
    for n, (row, where) in enumerate(zip(rows, reached, strict=True)):
        if n == own:
            nodes.append(own_node(directory, tuple(row["ranks"])))
        else:
            addresses = [(host, port) for host, port in where["addresses"]]
            secret, near = bytes.fromhex(where["secret"]), where["network"] == network()
            there = NodeConnections(row["name"], addresses, secret, min(timeout, _PATIENCE), same_network=near)
            connections.append(there)
            node = {name: row[name] for name in ("name", "domain", "host")}
            nodes.append(StorageNode(**node, below=partial(RemoteNode, there), ranks=tuple(row["ranks"]), in_memory=me.in_memory))
    return JobNodes(nodes=nodes, own=own, server=server, connections=connections, survivors=survivors)


def _daemon_id(directory: str) -> str | None:
    """Of the memory daemon of this machine, which is started if the directory is one of memory."""
    return memory_client.connect().changes()[0] if is_memory(directory) else None


def _nodes(rows: dict[int, Row]) -> list[Row]:
    nodes: dict[str, Row] = {}
    for rank, row in rows.items():
        node = nodes.setdefault(row["node"], {"name": row["node"], **{key: row[key] for key in ("domain", "host", "daemon")}, "ranks": []})
        node["ranks"].append(rank)
        if node["domain"] != row["domain"]:
            message = f"{ranks_text(node['ranks'])} are on one node and name different domains: {node['domain']!r} and {row['domain']!r}"
            raise UsageError(message, where=row["node"], hint="set CKPT_DOMAIN alike for all processes of a machine, or for none")
    return list(nodes.values())


def _seen(local: Backend, mine: str, others: Sequence[str]) -> Row:
    names = {*local.list_dir("")}
    return {"own": mine in names, "sees": [token for token in others if token in names]}


def _check_apart(directory: str, nodes: Sequence[Row], rows: dict[int, Row]) -> None:
    strangers = [rank for rank, row in rows.items() if not row["own"]]
    if strangers:
        node = next(node for node in nodes if strangers[0] in node["ranks"])
        who = f"{ranks_text(strangers)} and rank {node['ranks'][0]}"
        raise UsageError(
            f"{who} have the same host name, {node['host']!r}, and do not see each other's files",
            where=node["name"],
            hint="give each machine or container its own host name: names distinguish them",
        )
    together = [rank for rank, row in rows.items() if row["sees"]]
    if together:
        raise UsageError(
            f"several nodes share the directory of NodeLocal: {ranks_text(together)} see the files of another node there",
            where=directory,
            hint=f"give a directory on a disk of each node; or, as it is shared, local={os.fspath(directory)!r} without NodeLocal",
        )
