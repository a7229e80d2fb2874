"""Whoever reaches the ports of a job, and is no rank of it, ends no save and no load: idle connections, more than a process may have files,
garbage, halves of greetings, and connections that are reset, all while ranks exchange bytes."""

from __future__ import annotations

import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.net.peers import Peers
from ckpt.net.wire import _CLIENT, _MAGIC, _PROOF, PROTOCOL
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.alone

FILES = 256
IDLE = 400
SECONDS = 2.0
"""How long each rank waits before it takes part in an exchange, while the others are in it."""
FLAT = (301, 257)
GREETING = _CLIENT.pack(_MAGIC, PROTOCOL, bytes(32))


class Outsider:
    """Attacks the ports of all ranks until it is told to stop. Everything that it does is counted."""

    def __init__(self, folder: Path, kinds: list[str]) -> None:
        self.folder = folder
        self.counts = dict.fromkeys(kinds, 0)
        self.refused = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._attack, args=(kind,)) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _attack(self, kind: str) -> None:
        open_ones: list[socket.socket] = []
        while not self._over.is_set():
            for port in self._ports():
                with suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", port), timeout=1)
                    self._do(kind, sock)
                    self.counts[kind] += 1
                    open_ones.append(sock)
            while len(open_ones) > IDLE * 3:
                open_ones.pop(0).close()
            time.sleep(0.0005)
        for sock in open_ones:
            sock.close()

    def _ports(self) -> list[int]:
        return [int(path.name) for path in self.folder.glob("ports/*")]

    def _do(self, kind: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        if kind == "garbage":
            sock.sendall(random.randbytes(random.randrange(1, 4000)))
        elif kind == "half":
            sock.sendall(GREETING[: random.randrange(1, len(GREETING))])
        elif kind == "wrong":
            sock.sendall(GREETING + _PROOF.pack(random.randbytes(32), b"exchange"))
        elif kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


def merged(url: str, folder: str) -> tuple[int, int, float]:
    """Save flat shards, which ranks merge, and load them by exchange, with few files and ports that an outsider knows. Bytes that
    were sent and received, and how many seconds the exchanges took."""
    rank, world = dist.get_rank(), dist.get_world_size()
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    publish, run = Peers._publish, Peers._run
    seconds = [0.0]

    def shown(self: Peers, where: Mapping[str, Any]) -> None:
        for _, port in where["addresses"]:
            Path(folder, "ports", str(port)).touch()
        publish(self, where)

    def late(self: Peers, *args: object) -> None:
        """One rank comes later than the others, so that they are in the exchange for some time."""
        if rank == self._number % world:
            time.sleep(SECONDS)
        began = time.monotonic()
        run(self, *args)  # type: ignore[arg-type]
        seconds[0] += time.monotonic() - began
        for port in Path(folder, "ports").iterdir():
            if port.name in {str(p) for _, p in (self._port.listener.addresses if self._port.listener else [])}:
                port.unlink(missing_ok=True)

    Peers._publish, Peers._run = shown, late  # type: ignore[method-assign]
    full = torch.arange(FLAT[0] * FLAT[1], dtype=torch.float32)
    each = -(-len(full) // world)
    mine = full[rank * each : (rank + 1) * each]
    layout = ckpt.Layout({"dp": world}, [("flat", ckpt.Flat("dp"), ckpt.GlobalShape(FLAT)), ("*", ckpt.Replicate())])
    same = torch.arange(300_000, dtype=torch.float32)
    report = ckpt.save(url, {"flat": mine.clone(), "same": same.clone()}, layout=layout, job=ckpt.Job(timeout=20))
    loaded = {"flat": torch.zeros_like(mine), "same": torch.zeros_like(same)}
    received = ckpt.load(url, loaded, layout=layout, read=ckpt.ReadOptions(exchange=True), job=ckpt.Job(timeout=20)).bytes_received
    assert torch.equal(loaded["flat"], mine) and torch.equal(loaded["same"], same)
    return report.sent_bytes, received, seconds[0]


@pytest.mark.parametrize("kinds", [["idle"], ["garbage", "half", "wrong", "reset", "idle"]], ids=["idle", "everything"])
def test_a_job_goes_on_under_attack(ranks: Ranks, tmp_path: Path, kinds: list[str]) -> None:
    """The counts of what was done to the ports while they were open show that there was an attack."""
    (tmp_path / "ports").mkdir()
    outsider = Outsider(tmp_path, kinds)
    try:
        results = ranks.run(3, merged, str(tmp_path / "a"), str(tmp_path))
    finally:
        outsider.stop()
    print(outsider.counts, results)
    assert min(outsider.counts.values()) >= (IDLE if kinds == ["idle"] else 50), outsider.counts
    assert sum(sent for sent, _, _ in results) > 0 and sum(received for _, received, _ in results) > 0
    assert max(seconds for *_, seconds in results) >= SECONDS
