"""Where other ranks of the job can reach this process: ports of its own at the addresses of this machine, the most likely first."""

from __future__ import annotations

import array
import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakSet

from ckpt import settings
from ckpt.errors import CkptError, UsageError

# What every TCP connection of ours has set, and how bytes come without waiting.

_sockets: WeakSet[socket.socket] = WeakSet()


def close_when_forked(sock: socket.socket) -> None:
    """Close a socket in processes that this one forks, as data loaders do. A connection that a child has, too, does not end with the
    process that talks on it: whoever waits at the other end would wait until the child has ended."""
    _sockets.add(sock)


def _close() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close)


def prepare(sock: socket.socket, timeout: float) -> None:
    """A connection that neither waits with small messages nor waits for a silent machine for much longer than ``timeout`` seconds: the
    kernel asks whether the other end is still there, and gives up what is not acknowledged. It ends with this process."""
    close_when_forked(sock)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = min(timeout, 86400.0)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(seconds / 4))),
        ("TCP_KEEPINTVL", max(1, int(seconds / 8))),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000))),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive_exactly(sock: socket.socket, size: int, have: bytes = b"") -> bytes:
    """What came of a message of ``size`` bytes, of which ``have`` came before."""
    try:
        data = sock.recv(size - len(have))
    except BlockingIOError:
        return have
    if not data:
        raise ConnectionError("the stream ended early")
    return have + data


# The network interfaces of this machine: their addresses, and which of them a setting such as ``NCCL_SOCKET_IFNAME`` chooses.

_SIOCGIFCONF = 0x8912
_FIRST_BUFFER = 64 << 10
_SCOPE_LINK = 0x20
_UNUSABLE = 0x08 | 0x20 | 0x40
"""Flags of an IPv6 address that has a duplicate, is deprecated, or is not yet known to have no duplicate."""


@dataclass(frozen=True, kw_only=True)
class InterfaceAddress:
    """One address of one interface."""

    interface: str
    host: str


def choose(variable: str, text: str, addresses: list[InterfaceAddress]) -> list[InterfaceAddress]:
    """What the setting chooses of ``addresses``, in the order of the names in it, or their own where these exclude.

    It is written as for NCCL: ``eth,ib`` are prefixes, ``=eth0,eth1`` names, and ``^`` before either excludes them. The names of
    ``GLOO_SOCKET_IFNAME`` are whole ones without ``=``, too, as Gloo reads it.
    """
    listed = text.strip().removeprefix("^")
    exact = variable == "GLOO_SOCKET_IFNAME" or listed.startswith("=")
    names = [name.strip() for name in listed.removeprefix("=").split(",") if name.strip()]

    def place(address: InterfaceAddress) -> int | None:
        fits = (i for i, name in enumerate(names) if address.interface == name or (not exact and address.interface.startswith(name)))
        return next(fits, None)

    if text.strip().startswith("^"):
        chosen = [a for a in addresses if place(a) is None]
    else:
        places = [(at, a) for a in addresses if (at := place(a)) is not None]
        chosen = [a for _, a in sorted(places, key=lambda pair: pair[0])]
    if not chosen:
        known: dict[str, list[str]] = {}
        for a in addresses:
            known.setdefault(a.interface, []).append(a.host)
        there = ", ".join(f"{name} ({' '.join(hosts)})" for name, hosts in known.items()) or "none that can be listed on this system"
        message = f"{text!r} names no network interface that has an address; there are {there}"
        raise UsageError(message, where=variable, hint="name one of these: eth for all names that begin so, =eth0 for one whole name")
    return chosen


def interface_addresses() -> list[InterfaceAddress]:
    """All addresses of this machine in the order of its interfaces, IPv4 first, without link-local ones of IPv6, which say nothing to other
    machines. Empty where the system does not tell (it is not Linux)."""
    with suppress(OSError):
        order = {name: index for index, name in socket.if_nameindex()}
        return sorted([*_ipv4(), *_ipv6()], key=lambda a: order.get(a.interface, len(order)))
    return []


def is_loopback(host: str) -> bool:
    """Whether this leads to the machine itself; a name, or what is no address at all, is not known to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ipv4() -> list[InterfaceAddress]:
    """netdevice(7). Aliases such as ``eth0:1`` belong to their interface."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return []
    record = 40 if struct.calcsize("P") == 8 else 32
    size = _FIRST_BUFFER
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        while True:
            buffer = array.array("B", bytes(size))
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iP", size, buffer.buffer_info()[0]))
            used = struct.unpack("iP", answer)[0]
            if used <= size - record:
                break
            size *= 2
    records = [buffer[at : at + record].tobytes() for at in range(0, used, record)]
    return [InterfaceAddress(interface=r[:16].split(b"\0")[0].decode().split(":")[0], host=socket.inet_ntoa(r[20:24])) for r in records]


def _ipv6() -> list[InterfaceAddress]:
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:  # a kernel without IPv6
        rows = [line.split() for line in file]
        return [
            InterfaceAddress(interface=name, host=socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
            for address, _, _, scope, flags, name in rows
            if int(scope, 16) != _SCOPE_LINK and not int(flags, 16) & _UNUSABLE
        ]
    return []


BACKLOG = 1024
"""Connections that may wait until this rank looks at them."""
MOST = 8
"""Addresses at which a rank listens: a machine of a container platform can have hundreds."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of calls that make a socket where this process or this machine has too many."""
_NOWHERE = "192.0.2.1"
"""An address that is reserved for documentation: asking for the way to it gives the way that most addresses have."""

log = logging.getLogger("ckpt")


def listen(store: str | None, port: int = 0) -> list[socket.socket]:
    """Sockets that listen at :func:`own_addresses`, on this port or free ones. ``store``: the host of the job's store, if it has one."""
    sockets: list[socket.socket] = []
    try:
        for host in own_addresses(store):
            if len(sockets) < MOST or is_loopback(host):  # which is last
                sockets += _listening(host, port)
        return sockets or _listening("::", port) or _listening("0.0.0.0", port)
    except OSError as err:
        for sock in sockets:
            sock.close()
        raise exhausted("no connection between ranks can be made", err) from err


def _listening(host: str, port: int) -> list[socket.socket]:
    """One socket, or none if the address cannot be listened at: its interface is down, or the kernel has no IPv6."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        close_when_forked(sock)
        return [sock]
    except OSError as err:
        if err.errno in EXHAUSTED:
            raise
        log.debug("this rank does not listen at %s: %s", host, err)
        return []


def exhausted(what: str, err: OSError) -> CkptError:
    """The error that says ``what`` cannot be, since there are too many files."""
    return CkptError(
        f"{what}: {err}", hint="raise the limit of open files (`ulimit -n`), and look what this process has open (/proc/PID/fd)"
    )


def own_addresses(store: str | None) -> list[str]:
    """This machine's addresses. Those of the interfaces that a setting chooses, and no others; else first the one that it reaches the
    job's store from, since the other ranks reach the store, too; then the one of most ways, then all others, and loopback last, for ranks
    of this machine."""
    known = interface_addresses()
    likely = [address for host in [store, _NOWHERE] if host and (address := _way_to(host))]
    known.sort(key=lambda a: likely.index(a.host) if a.host in likely else len(likely))
    if (chosen := _chosen(known)) is not None:
        return _in_order(a.host for a in chosen)
    hosts = [*likely, *(a.host for a in known)]
    if not known:
        hosts += _addresses_of(socket.gethostname())
    return _in_order([*hosts, "127.0.0.1"])


def network() -> str:
    """Equal for processes that have the same interfaces: one kernel, one namespace of networks. Machines that were copied from one may look
    like one, too; the secret of each rank tells them apart."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def from_here(addresses: list[tuple[str, int]], *, same_network: bool) -> list[tuple[str, int]]:
    """The addresses of another rank to try, in order. Loopback leads to this machine: it comes first for a rank that shares its interfaces,
    and never for others, unless that rank has nothing else."""
    near = [a for a in addresses if is_loopback(a[0])]
    far = [a for a in addresses if not is_loopback(a[0])]
    return near + far if same_network else far or near


def _chosen(known: list[InterfaceAddress]) -> list[InterfaceAddress] | None:
    for variable, text in settings.socket_interfaces():
        try:
            return choose(variable, text, known)
        except UsageError as err:
            if variable.startswith("CKPT_"):
                raise
            if err.message not in _warned:  # whoever it is for complains himself, if he is in use
                _warned.add(err.message)
                log.warning("%s is not followed: %s", variable, err.message)
    return None


_warned: set[str] = set()


def _in_order(hosts: Iterable[str]) -> list[str]:
    """Each once, then one of loopback: any of them leads to this machine."""
    unique = list(dict.fromkeys(hosts))
    loopback = [host for host in unique if is_loopback(host)]
    return [host for host in unique if host not in loopback] + loopback[:1]


def _way_to(host: str) -> str | None:
    """The address of this machine that packets to ``host`` would come from, unless it is of one link only. Sends none."""
    with suppress(OSError):
        for family, address in _resolved(host):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                own = str(sock.getsockname()[0])
                if not own.lower().startswith("fe80:"):
                    return own
    return None


@lru_cache(maxsize=16)
def _resolved(host: str) -> list[tuple[int, Any]]:
    """Once in a process: a server of names that is gone later does not hold up a save."""
    return [(family, address) for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)]


def _addresses_of(name: str) -> list[str]:
    with suppress(OSError):
        return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []
