"""The network interfaces of this machine: their addresses, and which of them a setting such as ``NCCL_SOCKET_IFNAME`` chooses."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import UsageError

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


@dataclass(frozen=True, kw_only=True)
class InterfaceFilter:
    """Interfaces by name, written as for NCCL: ``eth,ib`` are prefixes, ``=eth0,eth1`` names, and ``^`` before either excludes them."""

    names: tuple[str, ...]
    exact: bool
    exclude: bool

    @classmethod
    def parse(cls, text: str, *, exact: bool = False) -> InterfaceFilter:
        """``exact``: names without ``=`` are whole names, too."""
        rest = text.strip()
        exclude = rest.startswith("^")
        rest = rest.removeprefix("^")
        exact = exact or rest.startswith("=")
        names = tuple(name.strip() for name in rest.removeprefix("=").split(",") if name.strip())
        return cls(names=names, exact=exact, exclude=exclude)

    def of(self, addresses: list[InterfaceAddress]) -> list[InterfaceAddress]:
        """Those that are chosen; in the order of the names, or their own where names exclude."""
        if self.exclude:
            return [a for a in addresses if self._place(a.interface) is None]
        places = [(place, a) for a in addresses if (place := self._place(a.interface)) is not None]
        return [a for _, a in sorted(places, key=lambda pair: pair[0])]

    def _place(self, interface: str) -> int | None:
        for i, name in enumerate(self.names):
            if interface == name or (not self.exact and interface.startswith(name)):
                return i
        return None


def choose(variable: str, text: str, addresses: list[InterfaceAddress]) -> list[InterfaceAddress]:
    """What the setting chooses of ``addresses``. The names of ``GLOO_SOCKET_IFNAME`` are whole ones, as Gloo reads it."""
    chosen = InterfaceFilter.parse(text, exact=variable == "GLOO_SOCKET_IFNAME").of(addresses)
    if not chosen:
        known: dict[str, list[str]] = {}
        for a in addresses:
            known.setdefault(a.interface, []).append(a.host)
        listed = ", ".join(f"{name} ({' '.join(hosts)})" for name, hosts in known.items()) or "none that can be listed on this system"
        message = f"{text!r} names no network interface that has an address; there are {listed}"
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
