"""Where other machines of the job can reach this process: a port of its own, and the machine's addresses, the most likely first."""

from __future__ import annotations

import socket
from contextlib import suppress

from .store import Store

BACKLOG = 1024
"""Connections that may wait until this rank looks at them."""
_NOWHERE = "192.0.2.1"
"""An address that is reserved for documentation: asking for the way to it gives the way that most addresses have."""


def listen() -> socket.socket:
    """A socket that listens on a free port of all addresses of this machine."""
    with suppress(OSError):  # a machine without IPv6, or with only one of the two on a socket
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)


def own_addresses(store: Store) -> list[str]:
    """This machine's addresses, first the one that it reaches the job's store from: the other ranks reach the store, too."""
    found = [address for host in [_host(store), _NOWHERE] if host and (address := _way_to(host))]
    if all(address.startswith("127.") or address == "::1" for address in found):
        found += _addresses_of(socket.gethostname())
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _host(store: object) -> str | None:
    """The machine that serves the store; stores are wrapped in others that add a prefix, and a store of files has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) else None


def _way_to(host: str) -> str | None:
    """The address of this machine that packets to ``host`` would come from. Sends none."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    return None


def _addresses_of(name: str) -> list[str]:
    with suppress(OSError):
        return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []
