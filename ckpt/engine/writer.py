"""Writes one rank's chunks: hashed and written block by block from the tensors' own memory, by a few threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import xxhash

from ckpt.adapters.memory import as_bytes
from ckpt.adapters.tensors import LocalTensor
from ckpt.catalog import DataFile
from ckpt.errors import CkptError, ConflictError
from ckpt.formats.native.datafile import ChunkSpec, DataFilePlan, plan_data_files
from ckpt.geometry import Box
from ckpt.io_backends.protocol import Backend, Writer
from ckpt.plan.ownership import Global, Owned

BLOCK = 1 << 20
"""Bytes that are hashed and then written while they are still in the cache."""
SLOWEST = 10e6
"""Bytes a second: storage that makes a file durable more slowly than this counts as hanging."""
BATCH = 8 << 20
"""Small chunks are written together up to this many bytes."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a rank wrote: ``files``, and for each set of replicas the digests of the replicated tensors that it holds.

    A set of replicas goes by the digest of its ranks: the ranks themselves would be as many as the job's, on each of them.
    """

    files: tuple[DataFile, ...]
    replicas: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class _Chunk:
    name: str
    number: int
    box: Box


@dataclass(eq=False)
class RankWriter:
    """Writes the chunks of one rank of one save."""

    backend: Backend
    tensors: Mapping[str, LocalTensor]
    owned: Mapping[str, Owned]
    rank: int
    position: int
    """Place of the rank among those that take part: what the checkpoint knows it by."""
    id: str
    threads: int
    beat: Callable[[], None]
    alive_while: Callable[[Callable[[], None], float], None]
    check_replicas: bool = True
    _digests: dict[tuple[str, int], int] = field(default_factory=dict)
    _made: list[str] = field(default_factory=list)

    def run(self) -> Written:
        """Write and make durable. On failure every file that was made is removed.

        Raises:
            StorageError: the storage failed.
        """
        chunks = chunks_of(self.owned, self.rank)
        plans = plan_data_files(specs_of(chunks, {n: t.info for n, t in self.tensors.items()}), id=self.id, rank=self.position)
        try:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="ckpt-write") as pool:
                files = tuple(self._file(plan, chunks, pool) for plan in plans)
                replicas = self._replicas(pool) if self.check_replicas else {}
        except BaseException:
            self.discard()
            raise
        return Written(files=files, replicas=replicas)

    def discard(self) -> None:
        """Remove what was written; what cannot be removed stays as debris that nothing refers to."""
        for path in self._made:
            with suppress(CkptError):
                self.backend.delete(path)

    def _file(self, plan: DataFilePlan, chunks: Sequence[_Chunk], pool: ThreadPoolExecutor) -> DataFile:
        mine = chunks[plan.first : plan.first + len(plan)]
        with self._create(plan) as writer:
            run_all(pool, [partial(self._batch, writer, plan, mine, b) for b in _batches(plan)])
            header = plan.encode_header([self._digests[c.name, c.number] for c in mine])
            writer.write(0, [header])
            self.alive_while(writer.commit, plan.size / SLOWEST)
        return plan.row(header)

    def _create(self, plan: DataFilePlan) -> Writer:
        self._made.append(plan.path)  # before it is made: an error may come after the effect
        try:
            return self.backend.create(plan.path, plan.size)
        except ConflictError:
            self._made.remove(plan.path)  # somebody else's
            raise

    def _batch(self, writer: Writer, plan: DataFilePlan, chunks: Sequence[_Chunk], batch: Sequence[int]) -> None:
        if len(batch) == 1:
            self._large(writer, int(plan.offsets[batch[0]]), chunks[batch[0]])
        else:
            parts = []
            for i in batch:
                data = self._bytes(chunks[i])
                self._digests[chunks[i].name, chunks[i].number] = xxhash.xxh3_64_intdigest(data)
                parts.append(data)
            writer.write(int(plan.offsets[batch[0]]), parts)
            self.beat()

    def _large(self, writer: Writer, offset: int, chunk: _Chunk) -> None:
        data = self._bytes(chunk)
        digest = xxhash.xxh3_64()
        for at in range(0, len(data), BLOCK):
            block = data[at : at + BLOCK]
            digest.update(block)
            writer.write(offset + at, [block])
            self.beat()
        self._digests[chunk.name, chunk.number] = digest.intdigest()

    def _bytes(self, chunk: _Chunk) -> memoryview:
        return as_bytes(self.tensors[chunk.name].gather(chunk.box)) if chunk.box.numel else memoryview(b"")

    def _replicas(self, pool: ThreadPoolExecutor) -> dict[str, dict[str, str]]:
        """Hash the replicated chunks that other ranks write, so that replicas can be compared."""
        found: dict[str, dict[str, str]] = {}
        todo: list[tuple[str, list[int]]] = []
        for name, owned in self.owned.items():
            if owned.replicas > 1:
                held = owned.held_by(self.rank)
                if held:
                    todo.append((name, held))
        run_all(pool, [partial(self._hash_replicas, todo[i : i + 64]) for i in range(0, len(todo), 64)])
        for name, held in todo:
            digests = b"".join(self._digests[name, i].to_bytes(8, "big") for i in held)
            owned = self.owned[name]
            ranks = owned.cell_holders[owned.cell[held[0]]]
            found.setdefault(xxhash.xxh3_64_hexdigest(ranks.tobytes()), {})[name] = xxhash.xxh3_64_hexdigest(digests)
        return found

    def _hash_replicas(self, group: Sequence[tuple[str, list[int]]]) -> None:
        for name, held in group:
            owned = self.owned[name]
            for i in held:
                if (name, i) not in self._digests:
                    self._digests[name, i] = xxhash.xxh3_64_intdigest(self._bytes(_Chunk(name, i, owned.box(i))))
                    self.beat()


def chunks_of(owned: Mapping[str, Owned], rank: int) -> list[_Chunk]:
    """The chunks that a rank writes, in the order in which every rank lists them."""
    return [_Chunk(name, i, owned[name].box(i)) for name in sorted(owned) for i in owned[name].written_by(rank)]


def specs_of(chunks: Sequence[_Chunk], tensors: Mapping[str, Global]) -> list[ChunkSpec]:
    return [ChunkSpec(name=c.name, box=c.box, shape=tensors[c.name].shape, dtype=tensors[c.name].dtype) for c in chunks]


def _batches(plan: DataFilePlan) -> list[list[int]]:
    """Chunks in the order of the file, small neighbours together."""
    batches: list[list[int]] = []
    size = 0
    for i in plan.offsets.argsort(kind="stable").tolist():
        length = int(plan.lengths[i])
        if not batches or size + length > BATCH:
            batches.append([])
            size = 0
        batches[-1].append(i)
        size += length
    return batches


def run_all(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], None]]) -> None:
    """Run all tasks; the first error is raised when none runs any more."""
    futures = [pool.submit(task) for task in tasks]
    error: BaseException | None = None
    for future in futures:
        if error is not None:
            future.cancel()
        if not future.cancelled() and (raised := future.exception()) is not None:
            error = error or raised
    if error is not None:
        raise error
