"""``python -m benchmarks.machine_lost``: a machine of four is lost, and the three that are left go on in another layout, from memory.

Each machine is a set of namespaces (tests/machines/bed.py) with a rank and a memory daemon, and a link of ``--rate`` Mbit/s each way; so
*seconds* of the restore are compared with those that plain sockets need on the same links, all at once, to bring each machine the bytes of
its new part that it does not have (*must cross*) from the machines that have them. *crossed* is what the network cards of the three
received during the restore, more than they must by the ratio. Then two machines are lost that have each other's only copies: the boxes that
are missing come from storage, and *storage* is what was read there, beside the bytes that are in no memory any more (*missing*).

*Each alone*: the ranks read without an exchange, each all of the chunks that it needs a part of (``exchange=False``).

    one lost      mark: 1.4 × the plain sockets, no byte from storage
    both holders  mark: 1.02 × the missing bytes from storage

Every tensor is compared with what was saved. Needs root on Linux, and ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.distributed.ranks import Ranks
from tests.machines.bed import Bed, Host, why_not
from tests.machines.jobs import Job

MACHINES, TENSORS, COLUMNS = 4, 8, 1020
NAMES = ("rows", "columns")
"""New layouts: each machine gets rows of each tensor, as before but others, or columns."""
FLOOR_PORT = 27000


def whole_of(n: int, rows: int) -> Any:
    import torch

    return torch.randint(-(1 << 30), 1 << 30, (rows, COLUMNS), dtype=torch.int32, generator=torch.Generator().manual_seed(n))


def state_of(rows: int, dim: int, *, empty: bool = False) -> dict[str, Any]:
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parts = {f"w{n}": whole_of(n, rows).chunk(world, dim)[rank].clone() for n in range(TENSORS)}
    return {name: torch.zeros_like(part) if empty else part for name, part in parts.items()}


def checkpointer(folder: str, dim: int) -> Any:
    import ckpt
    from ckpt import Layout, Shard
    from ckpt.policies import EverySteps

    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/{os.uname().nodename}"
    layout = Layout({"dp": int(os.environ["WORLD_SIZE"])}, [("*", Shard(dim, "dp"))])
    return ckpt.Checkpointer(f"{folder}/root", memory=ckpt.Memory(copies=1), save=EverySteps(1), timeout=60, layout=layout)


def save(folder: str, rows: int) -> None:
    """A step in memory with all copies, and at the root."""
    with checkpointer(folder, 0) as c:
        c.step(1, state_of(rows, 0))
        c.wait()
        assert c._spread.finish() == ()


def received() -> int:
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.split()[1])


def restore(folder: str, rows: int, dim: int, *, exchange: bool | None) -> dict[str, Any]:
    """Seconds, bytes by where they were read, and bytes that the network card received."""
    import torch
    import torch.distributed as dist

    wanted = state_of(rows, dim)
    state = {name: torch.zeros_like(part) for name, part in wanted.items()}
    c = checkpointer(folder, dim)
    dist.barrier()
    before, began = received(), time.perf_counter()
    assert c.restore(state, exchange=exchange) == 1
    seconds, crossed = time.perf_counter() - began, received() - before
    assert all(torch.equal(state[name], part) for name, part in wanted.items()), "not what was saved"
    dist.barrier()
    return {"seconds": seconds, "crossed": crossed, "sources": dict(c.restored_from.sources)}


def plain_sockets(addresses: Sequence[str], crossing: Sequence[Sequence[int]]) -> float:
    """Machine i gets ``crossing[i][j]`` bytes from machine j, all at once. Seconds of the slowest."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    with socket.create_server(("0.0.0.0", FLOOR_PORT), backlog=8) as listening:
        dist.barrier()
        began = time.perf_counter()
        threads = [threading.Thread(target=_give, args=(listening,)) for row in crossing if row[rank]]
        threads += [threading.Thread(target=_take, args=(addresses[r], n)) for r, n in enumerate(crossing[rank]) if n]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _give(listening: socket.socket) -> None:
    taker, _ = listening.accept()
    with taker:
        taker.sendall(bytes(int.from_bytes(taker.recv(8, socket.MSG_WAITALL), "big")))


def _take(address: str, nbytes: int) -> None:
    buffer = bytearray(1 << 20)
    with socket.create_connection((address, FLOOR_PORT)) as giver:
        giver.sendall(nbytes.to_bytes(8, "big"))
        while nbytes > 0:
            count = giver.recv_into(buffer)
            if not count:
                return
            nbytes -= count


def must_cross(rows: int, dim: int, left: Sequence[int], held: Sequence[set[int]]) -> list[list[int]]:
    """For each machine that is left, the bytes of its new part that it does not have, by the machine of ``left`` that gives them: of
    those that have them, each gives as much. ``held``: whose rows each has in memory."""
    crossing = [[0] * len(left) for _ in left]
    cut, old = rows // len(left), rows // MACHINES
    for place, m in enumerate(left):
        for whose in set[int]().union(*(held[other] for other in left)) - held[m]:
            first, last = max(place * cut, whose * old), min((place + 1) * cut, (whose + 1) * old)
            elements = max(0, last - first) * COLUMNS if dim == 0 else old * (COLUMNS // len(left))
            givers = [i for i, other in enumerate(left) if whose in held[other]]
            for giver in givers:
                crossing[place][giver] += TENSORS * 4 * elements // len(givers)
    return crossing


def holders(folder: str) -> list[set[int]]:
    """Whose files each machine has, by its memory."""
    from ckpt.memory import client

    rows = []
    for m in range(MACHINES):
        daemon = client.connect(start=False, folder=f"{folder}/m{m}")
        rows.append({int(known.path[-17:-12]) for known in daemon.list() if "/data/" in known.path})
    return rows


def one_round(folder: str, rows: int, mbit: int, dim: int, *, both: bool, exchange: bool | None) -> dict[str, Any]:
    """Save on four machines, lose one or two, and restore on those that are left."""
    with Bed([Host(name=f"m{i}") for i in range(MACHINES)], Path(folder)) as bed:
        bed.limit(mbit)
        with Job(bed, save, folder, rows, hosts=range(MACHINES)) as job:
            job.results(300)
        held = holders(folder)
        second = next(m for m in range(1, MACHINES) if 0 in held[m])
        gone = {0, second} if both else {0}
        for m in gone:
            bed.kill(m)
        if not both:  # not a byte can come from there
            Path(f"{folder}/root").rename(f"{folder}/elsewhere")
        left = [m for m in range(MACHINES) if m not in gone]
        crossing = must_cross(rows, dim, left, held)
        with Job(bed, partial(restore, exchange=exchange), folder, rows, dim, hosts=left) as job:
            ended = job.results(300)
        with Job(bed, plain_sockets, [bed.address(m) for m in left], crossing, hosts=left) as job:
            floor = max(job.results(300))
    whose = {k for m in left for k in held[m]}
    size = rows * COLUMNS * 4 * TENSORS
    return {
        "seconds": max(row["seconds"] for row in ended),
        "floor": floor,
        "must": sum(map(sum, crossing)),
        "crossed": sum(row["crossed"] for row in ended),
        "storage": sum(row["sources"]["root"] for row in ended),
        "missing": size * (MACHINES - len(whose)) // MACHINES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=384, help="MiB of the state")
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s of each machine's link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    reason = why_not() or (None if shutil.which("tc") else "tc is not installed (apt-get install iproute2)")
    if reason is not None:
        parser.error(f"no machines: {reason}")
    Ranks(MACHINES)  # the server that ranks are forked from
    rows = (given.size << 20) // 4 // COLUMNS // TENSORS // 12 * 12
    head = f"{'':28}{'seconds':>9}{'plain':>8}{'x':>7}{'crossed':>9}{'must':>8}{'storage':>9}{'missing':>9}"
    print(f"{head}   in MiB; the load of the machine is {os.getloadavg()[0]:.0f}")
    for both, exchange in ((False, None), (False, False), (True, None)):
        for dim, name in enumerate(NAMES):
            with ExitStack() as stack:
                found = [
                    one_round(stack.enter_context(tempfile.TemporaryDirectory()), rows, given.rate, dim, both=both, exchange=exchange)
                    for _ in range(given.rounds)
                ]
            title = f"{'both holders' if both else 'one lost'}, {name}{', each alone' if exchange is False else ''}"
            _print(title, found, as_json=given.json)


def _print(name: str, found: list[dict[str, Any]], *, as_json: bool) -> None:
    row = {key: statistics.median(one[key] for one in found) for key in found[0]}
    if as_json:
        print(json.dumps({"name": name, **row, "rounds": found}))
        return
    mib = {key: row[key] / 2**20 for key in ("crossed", "must", "storage", "missing")}
    print(
        f"{name:28}{row['seconds']:9.2f}{row['floor']:8.2f}{row['seconds'] / row['floor'] if row['must'] else 0:7.2f}"
        f"{mib['crossed']:9.1f}{mib['must']:8.1f}"
        f"{mib['storage']:9.1f}{mib['missing']:9.1f}"
    )


if __name__ == "__main__":
    main()
