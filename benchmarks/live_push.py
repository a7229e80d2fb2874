"""What live state costs to move, in copies of its bytes: ``python -m benchmarks.live_push``.

Ranks publish a bfloat16 state, and other processes take it, through the memory of one machine or over loopback TCP; or ranks reshard it,
rows into columns. CPU seconds of all ranks and threads, over those of copying what comes into warm memory in the same run.
"""

from __future__ import annotations

import argparse
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt import Job
from ckpt.live import Sink, Source, reshard

from .measure import cpu_seconds
from .pool import Pool, Rank
from .states import pattern

TENSORS, WIDTH, MIB = 16, 4096, 2**20
FIRST = 3
"""Versions that fill fresh memory: those that a source keeps, and the one that is captured."""
SHAPES = {"1to1": (range(1), range(1, 2)), "4to2": (range(4), range(4, 6)), "reshard": (range(2), range(2))}
"""Ranks that have the state in rows, and those that get it in columns."""


def sharded(mesh: DeviceMesh, dimension: int, megabytes: int) -> dict[str, DTensor]:
    """This rank's part of the same state."""
    whole = (pattern((megabytes * MIB // 4 // TENSORS // WIDTH, WIDTH), n).view(torch.int16).view(torch.bfloat16) for n in range(TENSORS))
    return {f"t{n}": distribute_tensor(t, mesh, [Shard(dimension)], src_data_rank=None) for n, t in enumerate(whole)}


def move(rank: Rank, *, shape: str, local: str, capture: Literal["lazy", "eager"], megabytes: int, versions: int) -> list[list[float]]:
    """For each version the CPU seconds of this rank: of copying what it gets, until ``publish`` returns, until it is published, of all."""
    os.environ["CKPT_LIVE_LOCAL"] = local
    givers, takers = SHAPES[shape]
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in (givers, takers)]
    old = sharded(meshes[0], 0, megabytes) if rank.number in givers else {}
    new, warm = (sharded(meshes[1], 1, megabytes) if rank.number in takers else {} for _ in range(2))
    rows: list[list[float]] = []

    with ExitStack() as stack:
        jobs = [Job(process_group=mesh.get_group()) if part else None for mesh, part in zip(meshes, (old, new), strict=True)]
        source = sink = None
        if old and shape != "reshard":
            source = stack.enter_context(Source("tcp://127.0.0.1:0/weights", old, secret="benchmark", job=jobs[0]))
        dist.broadcast_object_list(address := [source and source.address])
        if address[0] and new:
            sink = stack.enter_context(Sink(address[0], new, secret="benchmark", job=jobs[1]))
        for step in range(versions):
            if old:
                old["t0"].to_local().view(torch.int16).fill_(step)
            dist.barrier()
            seconds = [cpu_seconds()]
            for name, tensor in warm.items():
                tensor.to_local().copy_(new[name].to_local())
            seconds.append(cpu_seconds())
            dist.barrier()
            seconds.append(cpu_seconds())
            publication = source.publish(step, capture=capture) if source is not None else None
            seconds.append(cpu_seconds())
            if publication is not None:
                publication.result()
            seconds.append(cpu_seconds())
            dist.barrier()
            if sink is not None:
                sink.take()
            elif source is None:
                reshard(old, new)
            dist.barrier()
            rows.append([seconds[1] - seconds[0], *(second - seconds[2] for second in (*seconds[3:], cpu_seconds()))])
    for name, tensor in sharded(meshes[1], 1, megabytes).items() if new else ():
        part = tensor.to_local().view(torch.int16)
        assert torch.equal(new[name].to_local().view(torch.int16), torch.full_like(part, versions - 1) if name == "t0" else part)
    return rows


def passes(megabytes: int) -> dict[str, float]:
    """What each pass over the bytes takes alone, in copies: what the floors are made of."""
    source = torch.randint(0, 100, (megabytes * MIB,), dtype=torch.uint8)
    target, view = source.clone(), memoryview(source.numpy())

    def through_a_socket() -> None:
        with socket.create_server(("127.0.0.1", 0)) as port, socket.create_connection(port.getsockname()) as sender:
            receiver, _ = port.accept()
            with receiver, ThreadPoolExecutor(1) as pool:
                sent = pool.submit(sender.sendall, view)
                left = memoryview(target.numpy())
                while left:
                    left = left[receiver.recv_into(left[:MIB]) :]
                sent.result()

    seconds, blocks = [], [slice(at, at + MIB) for at in range(0, len(view), MIB)]
    for work in [lambda: target.copy_(source), lambda: [xxhash.xxh3_64_intdigest(view[block]) for block in blocks], through_a_socket] * 3:
        began = cpu_seconds()
        work()
        seconds.append(cpu_seconds() - began)
    return {name: median(seconds[n::3]) / median(seconds[::3]) for n, name in ((1, "digest"), (2, "send and receive"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="MB of the state")
    parser.add_argument("--versions", type=int, default=9)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="what to move; may be given more than once")
    arguments = parser.parse_args()
    for name, copies in passes(arguments.size).items():
        print(f"{name}: {copies:.2f} copies")
    print(f"{'':29} blocked  publish    all")
    for shape in arguments.shape or SHAPES:
        count = 1 + max(map(max, SHAPES[shape]))
        with Pool(count) as pool:
            for local, capture in product(("on", "off"), ("lazy", "eager")) if shape != "reshard" else [("on", "lazy")]:
                given = {"local": local, "capture": capture, "megabytes": arguments.size, "versions": arguments.versions}
                of_ranks = pool.run(move, on=count, shape=shape, **given)
                rows = [[sum(column) for column in zip(*version, strict=True)] for version in zip(*of_ranks, strict=True)]
                for name, some in (("first", rows[:FIRST]), ("steady", rows[FIRST:])):
                    way = f"{shape:8} {'memory' if local == 'on' else 'TCP':6} {capture:6} {name:7}"
                    print(way, *(f"{median(row[i] / row[0] for row in some):7.2f}" for i in (1, 2, 3)), flush=True)


if __name__ == "__main__":
    main()
