"""Ports for servers that are started later: none that the kernel gives to others in the meantime."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Below those of outgoing connections and of ``bind`` to port 0, at random: the tests that run beside this one draw others."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 32_768
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = random.SystemRandom().randrange(max(first - 22_000, 1024), first)
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports
