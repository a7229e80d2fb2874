"""Several machines on one: each host is a set of Linux namespaces (network, hostname, processes, mounts, shared memory) with an /etc/hosts,
a boot id and network cards of its own; a bridge for each network joins them. All hosts see the same files, as with shared storage.

    with Bed([Host("h0"), Host("h1"), Host("h2")], folder) as bed:
        job = Job(bed, work.run, [...], hosts=(0, 1, 2))      # jobs.py: ranks, with torch.distributed over the bed's network
        bed.cut(1)                                            # silently: what is sent is lost
        bed.kill(2)                                           # cut, and SIGKILL for everything that runs there

A situation that is not here yet is a ``Host`` with other cards, routes or /etc/hosts: see test_addresses.py. Nothing outlives the process
that made the bed: a host ends when its standard input is closed, and its namespaces with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NETWORK = "10.77.0"
"""Of the card that every host has, unless it says otherwise; host number i has address i + 1 in each network."""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_SCRIPT = Path(__file__).with_name("host.sh")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A network card. ``network``: the first three numbers of its addresses, and of the network it is in. ``alone``: no other host is
    reached through it."""

    name: str = "eth0"
    network: str = NETWORK
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Host:
    """``hosts``: the lines of /etc/hosts after that of localhost; by default every host of the bed at its first card's address. ``route``:
    the card of the default route, or None for no such route."""

    name: str
    cards: tuple[Card, ...] = (Card(),)
    route: str | None = "eth0"
    hosts: tuple[str, ...] | None = None


@dataclass(eq=False)
class _Running:
    process: subprocess.Popen[str]
    pid: int


@dataclass(eq=False)
class Bed:
    hosts: Sequence[Host]
    folder: Path
    _running: dict[int, _Running] = field(default_factory=dict)
    _switch: _Running | None = None

    def __enter__(self) -> Bed:
        self._switch = _start("--net", command=["sh", "-c", "echo up; exec cat"])
        for network in {card.network for host in self.hosts for card in host.cards}:
            _ip(self._switch, f"link add {_bridge(network)} type bridge", f"link set {_bridge(network)} up")
        for i in range(len(self.hosts)):
            self.start(i)
        return self

    def __exit__(self, *_: object) -> None:
        for running in [*self._running.values(), *([self._switch] if self._switch else [])]:
            _end(running)

    def address(self, host: int) -> str:
        """Of its first card."""
        return f"{self.hosts[host].cards[0].network}.{host + 1}"

    def pid(self, host: int) -> int:
        """Its process 1, as seen from outside."""
        return self._running[host].pid

    def limit(self, mbit: int) -> None:
        """So fast is each host's link from now on, in both directions."""
        assert self._switch is not None
        for i, host in enumerate(self.hosts):
            for card in host.cards:
                for end, device in ((self._running[i], card.name), (self._switch, _port(card, i))):
                    shape = f"tc qdisc replace dev {device} root tbf rate {mbit}mbit burst 256kb latency 400ms"
                    subprocess.run(["nsenter", "-t", str(end.pid), "-n", *shape.split()], check=True, capture_output=True, timeout=30)

    # ---- a host

    def start(self, i: int) -> None:
        """Switch a host on, at the beginning or after ``kill``."""
        host = self.hosts[i]
        lines = host.hosts if host.hosts is not None else tuple(f"{self.address(k)} {h.name}" for k, h in enumerate(self.hosts))
        hosts, boot = self.folder / f"hosts-{i}", self.folder / f"boot-{i}"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        boot.write_text(f"00000000-0000-4000-8000-{i:012}\n")
        running = self._running[i] = _start(*_NAMESPACES, command=["sh", str(_SCRIPT), host.name, str(hosts), str(boot)])
        assert self._switch is not None
        _ip(running, "link set lo up")
        for card in host.cards:
            port = _port(card, i)
            # an address of its own that stays: the others remember it when the host is started again
            mac = ":".join(f"{int(x):02x}" for x in ["2", *card.network.split("."), "0", str(i + 1)])
            _ip(running, f"link add {card.name} address {mac} type veth peer name {port} netns {self._switch.pid}")
            _ip(running, f"addr add {card.network}.{i + 1}/24 dev {card.name}", f"link set {card.name} up")
            _ip(self._switch, f"link set {port} up")
        if host.route is not None:
            network = next(card.network for card in host.cards if card.name == host.route)
            _ip(running, f"route add default via {network}.254 dev {host.route}")
        self.join(i)

    def join(self, i: int) -> None:
        """Put a host's cables in."""
        assert self._switch is not None
        for card in self.hosts[i].cards:
            if not card.alone:
                _ip(self._switch, f"link set {_port(card, i)} master {_bridge(card.network)}")

    def cut(self, i: int) -> None:
        """Pull a host's cables at the switch's end: nothing arrives any more, and nobody is told."""
        assert self._switch is not None
        _ip(self._switch, *(f"link set {_port(card, i)} nomaster" for card in self.hosts[i].cards))

    def kill(self, i: int) -> None:
        """Switch a host off: the others hear nothing, not even that connections are closed."""
        self.cut(i)
        _end(self._running[i])
        assert self._switch is not None
        _ip(self._switch, *(f"link del {_port(card, i)}" for card in self.hosts[i].cards))  # by itself it goes a little later

    def mend(self) -> None:
        """Switch on and join what was killed or cut."""
        for i, running in self._running.items():
            if running.process.poll() is None:
                self.join(i)
            else:
                self.start(i)


def _port(card: Card, host: int) -> str:
    return f"p-{card.name}-{host}"


def _bridge(network: str) -> str:
    return "b" + network.replace(".", "-")


def _start(*namespaces: str, command: list[str]) -> _Running:
    unshare = ["unshare", *namespaces, "--fork", "--kill-child", *command]
    process = subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "up\n":
        raise RuntimeError(f"{' '.join(unshare)} ended with {process.wait()}")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return _Running(process, int(children[0]))


def _end(running: _Running) -> None:
    running.process.kill()  # its child, process 1, dies with it
    with running.process:  # closes its pipes
        pass


def _ip(running: _Running, *lines: str) -> None:
    command = ["nsenter", "-t", str(running.pid), "-n", "ip", "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{lines}: {done.stderr.strip()}")


@cache
def why_not() -> str | None:
    """Why there can be no bed here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are namespaces, which need root on Linux"
    if missing := [command for command in ("ip", "unshare", "nsenter") if shutil.which(command) is None]:
        return f"{' and '.join(missing)} not installed (apt-get install iproute2 util-linux)"
    trial = "mount --make-rprivate / && mount -t proc proc /proc && ip link add v0 type veth peer name v1 && ip link add b0 type bridge"
    try:
        done = subprocess.run(["unshare", *_NAMESPACES, "--fork", "sh", "-c", trial], text=True, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "a trial of namespaces did not end"
    return None if done.returncode == 0 else f"namespaces are not permitted here: {done.stderr.strip()}"
