"""What a push of weights costs, in copies of its bytes: ``python -m benchmarks.live_push``.

A source publishes a bfloat16 state, and a sink of the same layout takes it, through the memory of one machine and over loopback TCP. CPU
seconds of all threads, over those of copying the same bytes into warm memory in the same run; one process, so nothing else counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Literal

import torch
import xxhash

from ckpt.live import Publication, Sink, Source

TENSORS = 16
FIRST = 3
"""Versions that fill fresh memory: those that a source keeps, and the one that is captured."""


def cost(work: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds and page faults."""
    began, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def publish(source: Source, step: int, capture: Literal["lazy", "eager"], into: list[Publication]) -> None:
    into.append(source.publish(step, capture=capture))


def push(megabytes: int, versions: int, capture: Literal["lazy", "eager"]) -> list[list[float]]:
    """For each version the copies that ``publish`` takes until it returns, in all, and the sink's; and the page faults."""
    shape = megabytes * 2**20 // 2 // TENSORS // 1024, 1024
    state = {f"t{n}": torch.randint(0, 1000, shape, dtype=torch.int16).view(torch.bfloat16) for n in range(TENSORS)}
    into, warm = ({name: tensor.clone() for name, tensor in state.items()} for _ in range(2))
    rows = []

    def copy() -> None:
        for name, tensor in state.items():
            warm[name].copy_(tensor)

    with Source("tcp://127.0.0.1:0/weights", state, secret="benchmark") as source, Sink(source.address, into, secret="benchmark") as sink:
        copy()
        for step in range(versions):
            state["t0"].view(torch.int16).fill_(step)
            one, _ = cost(copy)
            published: list[Publication] = []
            blocked, faults = cost(partial(publish, source, step, capture, published))
            rest, more = cost(published[0].result)
            taken, last = cost(sink.take)
            rows.append([blocked / one, (blocked + rest) / one, taken / one, float(faults + more + last)])
    assert all(torch.equal(tensor, into[name]) for name, tensor in state.items())
    return rows


def passes(megabytes: int) -> dict[str, float]:
    """What each pass over the bytes takes alone, in copies: what the floors are made of."""
    source = torch.randint(0, 100, (megabytes * 2**20,), dtype=torch.uint8)
    target, view = source.clone(), memoryview(source.numpy())
    one = median(cost(lambda: target.copy_(source))[0] for _ in range(3))
    starts = range(0, len(view), 2**20)

    def digest() -> None:
        for at in starts:
            xxhash.xxh3_64_intdigest(view[at : at + 2**20])

    def copy_and_digest() -> None:
        for at in starts:
            target[at : at + 2**20].copy_(source[at : at + 2**20])
            xxhash.xxh3_64_intdigest(memoryview(target.numpy())[at : at + 2**20])

    def through_a_socket() -> None:
        with socket.create_server(("127.0.0.1", 0)) as port, socket.create_connection(port.getsockname()) as sender:
            receiver, _ = port.accept()
            with receiver, ThreadPoolExecutor(1) as pool:
                sent = pool.submit(sender.sendall, view)
                left = memoryview(target.numpy())
                while left:
                    left = left[receiver.recv_into(left[: 2**20]) :]
                sent.result()

    works = {"digest": digest, "copy and digest, MiB by MiB": copy_and_digest, "send and receive": through_a_socket}
    return {name: median(cost(work)[0] for _ in range(3)) / one for name, work in works.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="MB of the state")
    parser.add_argument("--versions", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, copies in passes(arguments.size).items():
        print(f"{name}: {copies:.2f} copies")
    print(f"{'':24} blocked  publish     sink   all   page faults")
    for local in ("on", "off"):
        os.environ["CKPT_LIVE_LOCAL"] = local
        captures: tuple[Literal["lazy", "eager"], ...] = ("lazy", "eager")
        for capture in captures:
            rows = push(arguments.size, arguments.versions, capture)
            for name, some in (("first", rows[:FIRST]), ("steady", rows[FIRST:])):
                blocked, publish, sink, faults = (median(column) for column in zip(*some, strict=True))
                way = f"{'memory' if local == 'on' else 'TCP':6} {capture:6} {name:10}"
                print(f"{way} {blocked:7.2f} {publish:8.2f} {sink:8.2f} {publish + sink:5.2f} {faults:13,.0f}", flush=True)


if __name__ == "__main__":
    main()
