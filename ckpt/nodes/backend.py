"""The files of all nodes as one storage, so that saves, loads, listings and copies need not know that there are several. No torch.

    what                                   written                        read
    data files                             on the node of the writer      ``NodeReader``: own node, others, parity, the root
    index files                            on every node                  the same
    commit record (checkpoint.json)        on every node, in their order  the one with the highest id
    anything else                          on the node of the writer      the same as data files

Nothing notes who has what: nodes are asked (*inventories*). So a node that is gone, a disk that was replaced and half of a copy need no
care. A checkpoint exists if a node that answers has its record: before the first record is put, all of its files are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord
from ckpt.io_backends.checks import byte_view, check_path, check_prefix, check_read, check_size, name_taken, put_conflict
from ckpt.io_backends.protocol import Backend, IOHints, LentMemory, ObjectMeta, Writer
from ckpt.io_backends.writer_base import GatheringWriter

from .nodes import FilePlace, NodeReader, NodeSet


def is_on_every_node(path: str) -> bool:
    """Whether a file is small and needed by all: index files and the commit record."""
    *folders, name = path.split("/")
    return name == COMMIT_PATH or bool(folders and folders[-1].startswith("index-"))


class SpreadBackend(Backend):
    """What the nodes have below ``prefix`` (empty, or ending in a slash)."""

    def __init__(self, nodes: NodeSet, prefix: str = "") -> None:
        self._nodes = nodes
        self.reader = NodeReader(nodes, prefix)
        self.node = self.reader.node
        self.root = self.reader.root
        self.holders = self.reader.holders

    @property
    def url(self) -> str:
        return self.reader.url

    @property
    def io_hints(self) -> IOHints:
        return self.node(self._nodes.own).io_hints

    # ---- reading

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_path(path)
        check_read(offset, length)
        if path.rpartition("/")[2] == COMMIT_PATH:
            return self._record(path)[offset : None if length is None else offset + length]
        return self.reader.read(path, offset, length, lambda place: place.read(path, offset, length), len)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        check_path(path)
        check_read(offset, None)
        view = byte_view(buffer, writable=True)
        self.reader.read(path, offset, view.nbytes, lambda place: place.read_into(path, offset, view), lambda _: view.nbytes)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        view, hashed = byte_view(buffer, writable=True), 0

        def count(part: memoryview) -> None:
            nonlocal hashed
            hashed += len(part)
            update(part)

        def read(place: FilePlace) -> int:
            # What was hashed before a place failed cannot be taken back: the next one goes on where it stopped. If the
            # first part was wrong, whoever compares the digest evicts all of it and begins anew.
            before = hashed
            place.read_hashed(path, offset + before, view[before:], count)
            return hashed - before

        check_path(path)
        self.reader.read(path, offset, view.nbytes, read, int, lambda: hashed > 0)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """See ``Backend.evict``: the node that would be read now gave wrong bytes, and is not read for this range any more."""
        with suppress(CkptError):
            if check_path(path).rpartition("/")[2] == COMMIT_PATH:  # read from all nodes each time
                self.node(self._nodes.own).evict(path)
            else:
                self.reader.evict(path, offset, offset + length if length is not None else 1 << 63)

    def nearby(self, paths: Collection[str]) -> Collection[str]:
        return self.reader.nearby(paths)

    def size(self, path: str) -> int:
        return self.reader.read(check_path(path), 0, None, lambda place: place.size(path), lambda _: 0)

    def _record(self, path: str) -> bytes:
        """The newest commit record that a node has."""
        records = {node: data for node, data in self._contents(path).items() if data is not None}
        if not records:
            raise NotFoundError("no such file on any node", where=f"{self.url}/{path}", hint="`ckpt ls` lists the checkpoints there")
        return max(records.values(), key=lambda data: (_id(data), data))

    def _contents(self, path: str, *, reachable: bool = True) -> dict[int, bytes | None]:
        """What each node has of a small file."""
        return self._nodes.ask_all(partial(self._content, path), reachable=reachable)

    def _content(self, path: str, node: int) -> bytes | None:
        try:
            return self.node(node).read(path)
        except NotFoundError:
            return None

    # ---- listing

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. Where nodes have one file in several sizes, the largest counts: a disk may have cut one off."""
        check_prefix(prefix)
        return iter(sorted(ObjectMeta(path, max(sizes.values())) for path, sizes in self.holders(prefix).items()))

    def list_dir(self, prefix: str = "") -> list[str]:
        check_prefix(prefix)
        listed = self._nodes.ask_all(lambda node: self.node(node).list_dir(prefix), reachable=True)
        return sorted({name for names in listed.values() for name in names})

    # ---- writing

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Index files are made on every node; those of data on this one."""
        check_path(path)
        check_size(size, f"{self.url}/{path}")
        if not is_on_every_node(path):
            return self.node(self._nodes.own).create(path, size)
        where = f"{self.url}/{path}"
        with suppress(NotFoundError):
            self.size(path)
            raise name_taken(where)
        made: list[Backend] = []

        def send(content: bytes | Path) -> None:
            assert isinstance(content, bytes)
            for node in [self.node(n) for n in range(len(self._nodes.nodes))]:
                with node.create(path, size) as writer:
                    writer.write(0, [content])
                    writer.commit()
                made.append(node)

        def remove() -> None:
            for node in made:
                with suppress(CkptError):
                    node.delete(path)

        return GatheringWriter(where=where, size=size, send=send, remove=remove)

    def lend(self, size: int) -> LentMemory | None:
        """See ``Backend.lend``: this node's."""
        return self.node(self._nodes.own).lend(size)

    def create_in(self, path: str, memory: LentMemory) -> Writer:
        """See ``Backend.create_in``: on this node."""
        return self.node(self._nodes.own).create_in(path, memory)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        """See ``Backend.put_if``. A commit record is put on one node after another, in the order that all processes have: of two that
        commit at once, one loses on the first node. If a node fails on the way, the record is on those before it, and so exists. Where all
        nodes have to answer, what was removed is put back, on those that do."""
        check_path(path)
        every = is_on_every_node(path)
        errors: dict[int, StorageError] = {}
        if every and self._nodes.strict:
            contents, errors = self._nodes.ask_each(partial(self._content, path), range(len(self._nodes.nodes)))
        else:
            contents = self._contents(path, reachable=not every)
        # What machines without a rank have counts, too: a record that comes later has to have the higher id.
        further = {n: c for n, c in self._contents(path).items() if n not in contents} if every and self._nodes.further else {}
        there = {node: content for node, content in {**contents, **further}.items() if content is not None}
        current = max(there.values(), key=lambda content: (_id(content), content)) if there else None
        if current != expected:
            raise put_conflict(f"{self.url}/{path}", expected)
        written = sorted(n for n in there if n < len(self._nodes.nodes))
        targets = sorted(contents) if every else written or [self._nodes.own]
        for node in targets:
            try:
                self.node(node).put_if(path, data, expected=contents[node])
            except ConflictError as err:
                if node == targets[0]:
                    raise
                raise StorageError(
                    f"node {self.reader.name(node)} has another commit record than a moment ago", where=f"{self.url}/{path}", hint=err.hint
                ) from err
            except StorageError as err:
                if not self._nodes.strict:
                    raise
                errors[node] = err
        for error in errors.values():
            raise error

    def delete(self, path: str) -> None:
        """See ``Backend.delete``: on every node."""
        check_path(path)
        self._nodes.ask_all(lambda node: self.node(node).delete(path))

    def delete_many(self, paths: Collection[str]) -> None:
        """See ``Backend.delete_many``: on every node, each of which is asked once for many."""
        for path in paths:
            check_path(path)
        self._nodes.ask_all(lambda node: self.node(node).delete_many(paths))

    def prepare(self) -> None:
        """See ``Backend.prepare``: on every node."""
        self._nodes.ask_all(lambda node: self.node(node).prepare())

    def link(self, path: str = "") -> str | None:
        """See ``Backend.link``: on this node."""
        return self.node(self._nodes.own).link(path)

    def now(self) -> float | None:
        """See ``Backend.now``: by this node's clock."""
        return self.node(self._nodes.own).now()

    def modified(self, path: str) -> float | None:
        """See ``Backend.modified``; None for what is on other nodes alone, whose clocks may differ."""
        with suppress(NotFoundError):
            return self.node(self._nodes.own).modified(path)
        self.size(path)
        return None


def _id(data: bytes) -> str:
    """The id of a commit record; empty for what is none, so that any record is newer."""
    try:
        return CommitRecord.from_bytes(data, "").id
    except (CorruptError, FormatError):
        return ""


# The spread runs that this process knows, by name: ``spread://name/step-00000100`` is opened through them.

SCHEME = "spread"
_runs: dict[str, NodeSet] = {}


def run_url(name: str) -> str:
    """The URL of the run that is called ``name``."""
    return f"{SCHEME}://{name}"


def is_spread(url: str) -> bool:
    """Whether only this job can open a URL."""
    return url.startswith(f"{SCHEME}://")


def register_run(nodes: NodeSet) -> None:
    """From now on URLs below that of ``nodes`` lead to them."""
    _runs[nodes.url] = nodes


def unregister_run(nodes: NodeSet) -> None:
    """The job has ended, unless another one of the same name has begun."""
    if _runs.get(nodes.url) is nodes:
        del _runs[nodes.url]


def open_spread(url: str) -> Backend:
    """The files below ``url``."""
    name, _, path = url.removeprefix(f"{SCHEME}://").rstrip("/").partition("/")
    nodes = _runs.get(run_url(name))
    if nodes is None:
        hint = "it exists while a Checkpointer with local=NodeLocal(...) does; on each node its directory has the files of that node"
        raise UsageError("no job of this process has its checkpoints there", where=url, hint=hint)
    return SpreadBackend(nodes, f"{path}/" if path else "")
