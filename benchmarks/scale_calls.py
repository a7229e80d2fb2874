"""Collective calls as a whole, by the public API, with two real ranks of a job of thousands (``played``).

Each rank has a row of some tensors. What is counted is what a rank and the leader ask of the job's store and of the storage, the bytes that
they put into the store and get from it, and the CPU seconds of both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import ckpt
from ckpt.live import Sink, Source, reshard
from ckpt.net.channel import Row
from ckpt.net.endpoints import network
from ckpt.net.group import current_group
from ckpt.plan.copies import missing_copies
from ckpt.plan.tables import Table
from ckpt.policies import EverySteps, Latest
from ckpt.runs.node_tier import SpreadTier

from .measure import cpu_seconds
from .played import Played, PlayedJob, Share

TENSORS = 8
TIMEOUT = 600.0
MACHINE = 8
"""Ranks of one machine."""


class Calls:
    """The calls of one job, each as often as it is asked for. ``folder`` is on a file system. ``experts``: each rank has a tensor that no
    other rank has, besides those of which all have a row; so no two ranks tell the same of theirs."""

    def __init__(self, ranks: int, folder: str, *, experts: bool = False, tensors: int = TENSORS) -> None:
        self.job, self.ranks, self.folder, self.experts = PlayedJob(ranks), ranks, f"{folder}/{ranks}-{experts}", experts
        self.tensors = tensors
        rules = [(_expert(rank), ckpt.Stage("dp", rank)) for rank in range(2)] if experts else []
        self.layout = ckpt.Layout({"dp": ranks}, [*rules, ("*", ckpt.Shard(0, "dp"))])
        self.states = [self._state(rank, float(rank)) for rank in range(2)]
        self._urls = 0
        self.base: str | None = None
        self.tiers: dict[int, SpreadTier] = {}
        self.checkpointers: dict[int, ckpt.Checkpointer] = {}
        self.made: set[object] = set()
        """The calls that were made already, for who wants to know."""

    def close(self) -> None:
        if self.checkpointers:
            self.job.play(lambda rank: self.checkpointers[rank].close())
        for tier in self.tiers.values():
            tier.close()
        self.job.close()

    def _state(self, rank: int, value: float = -1.0) -> dict[str, Any]:
        model = {f"layers.{i}.weight": torch.full((1, 8), value) for i in range(self.tensors)}
        if self.experts:
            model[_expert(rank).removeprefix("model.")] = torch.full((8,), value)
        return {"model": model, "step": 1}

    def _fresh(self, run: str | None = None) -> str:
        self._urls += 1
        return f"{self.folder}/{run or f'run-{self._urls}'}/step-{self._urls}"

    def _vary(self, position: int, row: Row, share: Share) -> Row:
        """What another rank says: of tensors of its own, and of its data files, which are not there but look so."""
        row = {**row}
        if self.experts and "table" in row:
            row["table"] = " ".join(share(_table_of(self.job.blobs[digest], position)) for digest in row["table"].split())
        if self.experts and "used" in row:
            row["used"] = share(self.job.blobs[row["used"]].replace(_expert(1).encode(), _expert(position).encode()))
        if "files" in row:
            files = [[path.replace("-00001.", f"-{position:05}."), size, header, digest] for path, size, header, digest in row["files"]]
            for path, size, *_ in files:
                self.job.pretend(path, size)
            row["files"] = files
        if "references" in row:
            row["references"] = share(_references_of(self.job.blobs[row["references"]], position))
        return row

    def save(self, **options: Any) -> Played:
        url = self.saved = self._fresh("run")
        return self.job.play(
            lambda rank: ckpt.save(url, self.states[rank], layout=self.layout, job=ckpt.Job(threads=1), **options), self._vary
        )

    def save_async(self) -> Played:
        url = self._fresh()

        def work(rank: int) -> None:
            ckpt.save_async(url, self.states[rank], layout=self.layout, job=ckpt.Job(threads=1)).wait()

        return self.job.play(work, self._vary)

    def load(self) -> Played:
        """Of what was saved last."""
        into = [self._state(rank) for rank in range(2)]
        played = self.job.play(lambda rank: ckpt.load(self.saved, into[rank], layout=self.layout, job=ckpt.Job(threads=1)), self._vary)
        self._check(into)
        return played

    def _check(self, into: list[dict[str, Any]]) -> None:
        for rank, state in enumerate(into):
            if any(not (tensor == float(rank)).all() for tensor in state["model"].values()):
                raise ValueError(f"rank {rank} has other bytes than it saved")

    def references(self) -> Played:
        """A save that refers to the one before it for all tensors."""
        if self.base is None:
            self.save(reuse=True)
            self.base = self.saved
        url, base = self._fresh("run"), self.base
        self.base = url
        return self.job.play(
            lambda rank: ckpt.save(url, self.states[rank], layout=self.layout, job=ckpt.Job(threads=1), reuse=base), self._vary
        )

    def reshard(self) -> Played:
        into = [self._state(rank) for rank in range(2)]
        options: dict[str, Any] = {"layout": self.layout, "new_layout": self.layout, "job": ckpt.Job(threads=1)}
        played = self.job.play(lambda rank: reshard(self.states[rank], into[rank], **options), self._vary)
        self._check(into)
        return played

    # ---- a source and a sink, both of all ranks

    def publish(self) -> Played:
        return self.job.play(lambda rank: self.sources[rank].publish(1, capture="eager", again=True).result(TIMEOUT), self._vary)

    @contextmanager
    def source(self) -> Iterator[None]:
        def make(rank: int) -> None:
            self.sources[rank] = Source(
                "tcp://127.0.0.1:0/state", self.states[rank], layout=self.layout, secret="x" * 32, job=ckpt.Job(timeout=TIMEOUT)
            )

        self.sources: dict[int, Source] = {}
        self.sinks: list[Sink] = []
        self.job.play(make)
        try:
            yield
        finally:
            for sink in self.sinks:
                sink.close()
            self.job.play(lambda rank: self.sources[rank].close())

    def sink(self) -> Callable[[], Played]:
        into = [self._state(rank) for rank in range(2)]
        sinks: dict[int, Sink] = {}

        def make(rank: int) -> None:
            sinks[rank] = Sink(self.sources[0].address, into[rank], layout=self.layout, secret="x" * 32, job=ckpt.Job(timeout=TIMEOUT))

        self.job.play(make)
        self.sinks += sinks.values()

        def take() -> Played:
            played = self.job.play(lambda rank: sinks[rank].take(), self._vary)
            self._check(into)
            return played

        return take

    # ---- a run

    def checkpointer(self, **options: Any) -> None:
        root = self._fresh()

        def make(rank: int) -> None:
            self.checkpointers[rank] = ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(2), **options)

        self.job.play(make)
        self.number = 0
        self.root = root

    def step(self) -> Played:
        """A save of a run, with retention."""
        self.number += 1
        number = self.number

        def work(rank: int) -> None:
            self.checkpointers[rank].step(number, self.states[rank])
            self.checkpointers[rank].wait()

        return self.job.play(work, self._vary)

    def restore(self) -> Played:
        into = [self._state(rank) for rank in range(2)]
        played = self.job.play(lambda rank: self.checkpointers[rank].restore(into[rank]), self._vary)
        self._check(into)
        return played

    # ---- copies in the memory of other machines

    def meet(self) -> Played:
        """The machines of the job, each of ``MACHINE`` ranks, find each other."""
        for tier in self.tiers.values():
            tier.close()
        directory, root = self._fresh(), self._fresh()
        os.makedirs(directory)

        def connect(rank: int) -> None:
            tier = self.tiers[rank] = SpreadTier(ckpt.NodeLocal(directory, copies=1), root, current_group(), TIMEOUT)
            tier.connect()

        return self.job.play(connect, _on_machines)


def missing_copies_seconds(ranks: int) -> float:
    """CPU seconds in which a machine finds what it has to copy, if each rank wrote a file and a machine in 16 has the copies already."""
    domains = [f"machine-{n:05}" for n in range(ranks // MACHINE)]
    holders = {f"data/{rank:05}": {rank // MACHINE} for rank in range(ranks)}
    for rank in range(0, ranks, 16 * MACHINE):
        holders[f"data/{rank:05}"].add((rank // MACHINE + 1) % len(domains))
    began = cpu_seconds()
    copies = missing_copies(holders, domains, 1)
    if len(copies) < ranks // 2:
        raise ValueError("files without a copy are not found")
    return cpu_seconds() - began


def _on_machines(position: int, row: Row, share: Share) -> Row:
    """The machine of another rank; its first rank serves."""
    if "node" in row and position >= MACHINE:
        return {
            **row,
            "node": f"machine {position // MACHINE}",
            "domain": f"domain {position // MACHINE}",
            "host": f"h{position // MACHINE}",
        }
    if not row and position % MACHINE == 0:
        return {"addresses": [["127.0.0.1", 9]], "network": network(), "secret": "00" * 32, "token": f".prepare-{position:016x}.tmp"}
    return row


def _expert(rank: int) -> str:
    return f"model.experts.{rank:06}"


def _table_of(data: bytes, position: int) -> bytes:
    """The table of another rank, in place of that of the first follower."""
    table = Table.from_bytes(data)
    if not any(".experts." in t.name for t in table.tensors):
        return data
    tensors = []
    for t in table.tensors:
        if ".experts." in t.name:
            t = replace(t, name=_expert(position), layout=replace(t.layout, at=(("dp", (position,)),)))
        tensors.append(t)
    return Table(tensors=tuple(tensors), aliases={}).to_bytes()


def _references_of(data: bytes, position: int) -> bytes:
    """The same of references: each rank to its own file."""
    row = json.loads(data)
    row["files"] = [[path.replace("-00001.", f"-{position:05}."), *others, position] for path, *others, _ in row["files"]]
    row["chunks"] = {name: [[position, file] for _, file in chunks] for name, chunks in row["chunks"].items()}
    return json.dumps(row).encode()
