"""Conversions: what is chosen of a checkpoint, written in another format; in bounded memory, resumable, by one process or several.

Invariants: nothing can be opened at the destination before all of it is durable. A file is written by one process, number ``i`` by process
``i mod`` the number of processes, so nobody has to divide the work; whoever finds all files there finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt.errors import ConflictError, UsageError
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.writer import read_record
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.settings import threads as default_threads

from .choosing import Choice, Chosen, Views
from .parallel import Parallel
from .record import Record, begin, digest_of, find
from .target import Layout, Planned, Target, target

MEMORY = 1 << 30
"""Bytes for tensors in memory, unless the caller says."""
SMALLEST = 32 << 20
Progress = Callable[[int, int], None]
"""Called with the bytes that this process has written so far, and all that it has to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did, or with ``dry_run`` would do. Bytes are those of tensors at the destination, or of whole files."""

    source: str
    target: str
    source_format: str
    to: str
    tensors: int
    tensor_bytes: int
    files: tuple[str, ...]
    """Of tensors, at the destination; all processes' together."""
    file_bytes: int
    """Of these files together."""
    id: str
    """Of the save, for ``native``; for others of the conversion."""
    written_files: int
    """By this process, now: the others were there, or are other processes'."""
    written_bytes: int
    read_bytes: int
    left_out: tuple[str, ...]
    """Stored tensors of which nothing is converted."""
    finished: bool
    """Whether the checkpoint exists at the destination; False if other processes are not ready, and with ``dry_run``."""
    seconds: float


def convert_checkpoint(
    source: str,
    url: str,
    *,
    to: str,
    views: Views | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool = True,
    dtype: str | None = None,
    root: str | None = None,
    shard_size: int | None = None,
    parallel: Parallel | None = None,
    memory: int = MEMORY,
    threads: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    part: tuple[int, int] = (0, 1),
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the checkpoint at ``source``, of any known format, at ``url`` in the format ``to``: ``native``, ``hf``, ``torch``, ``dcp`` or
    ``megatron``.

    A conversion that was killed goes on when the same call is made again; files that are whole stay.

    Args:
        views: from the shapes of stored tensors to what shall be made of them (``converters.spelling.translated``); filling becomes zeros.
        only, exclude: globs of new names.
        optimizer: take optimizers too. ``hf`` never does.
        dtype: of floating-point tensors that are no optimizer's: ``"bfloat16"`` and the like. By default as they are.
        root: for ``hf`` and ``megatron``, the key of the state that has the model; by default the only one with tensors.
        shard_size: bytes of a file, about. By default 5 GB for ``hf`` and 4 GiB for others; ``torch`` has one file.
        parallel: the ranks to write for, with ``megatron``; by default one.
        memory: bytes for tensors in memory.
        overwrite: replace a checkpoint of ours at ``url``; only ``native`` can.
        verify: read every file again, and compare it with what was written. What is read of a source with digests is always compared.
        part: number of this process, and how many there are that make the same call, at once or one after another.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no whole checkpoint of a known format at ``source``.
        ConflictError: something is at ``url``: a checkpoint, or another conversion.
        NamesError: a glob fits nothing, or views do not fit.
        UsageError: the options do not fit each other or the checkpoint.
        StorageError: the storage failed. What is whole at ``url`` stays there for the next attempt.
    """
    began = time.monotonic()
    if memory < SMALLEST:
        raise UsageError(f"{memory} bytes of memory are too few", hint=f"at least {SMALLEST}")
    format = target(to)
    choice = Choice(views=views, only=only, exclude=exclude, optimizer=optimizer, dtype=dtype, root=root)
    catalog = open_catalog(source)
    chosen = format.choose(catalog, choice)
    run = _Run(format, chosen, url, shard_size=shard_size, parallel=parallel, overwrite=overwrite)
    planned = run.look() if dry_run else run.begin(part)
    missing = run.missing(planned)
    read = 0
    if not dry_run:
        read = run.write(planned, missing, memory=memory, threads=threads, verify=verify, progress=progress)
    written = [planned.files[i] for i in missing]
    taken = {p.source for w in chosen.tensors.values() for p in w.view.pieces}
    return ConvertReport(
        source=source,
        target=url,
        source_format=catalog.format,
        to=to,
        tensors=len(chosen.tensors),
        tensor_bytes=sum(i.length for f in planned.files for i in f.items),
        files=tuple(f.path for f in planned.files),
        file_bytes=sum(f.size for f in planned.files),
        id=run.id,
        written_files=len(written),
        written_bytes=sum(f.size for f in written),
        read_bytes=read,
        left_out=tuple(sorted(n for n in catalog.tensors if n not in taken)),
        finished=not dry_run and run.finish(planned, again=not missing),
        seconds=time.monotonic() - began,
    )


class _Run:
    """One process of one conversion."""

    def __init__(
        self, format: Target, chosen: Chosen, url: str, *, shard_size: int | None, parallel: Parallel | None, overwrite: bool
    ) -> None:
        if parallel is not None and not format.parallel:
            hint = "leave out --tp, --pp, --vpp, --ep and --arg"
            raise UsageError(f"the format {format.name} does not depend on ranks", where=url, hint=hint)
        if overwrite and not format.replaces:
            raise UsageError(f"a checkpoint cannot be replaced by one in the format {format.name}", where=url, hint="remove it first")
        self.format = format
        self.chosen = chosen
        self.url = url
        self.shard_size = shard_size
        self.parallel = parallel
        self.overwrite = overwrite
        self.root, self.name = _apart(url, file=format.one_file(url))
        self.backend: Backend = open_backend(self.root)
        self.digest = digest_of(chosen, format.name, shard_size, parallel)
        self.record: Record | None = None
        self.part = (0, 1)
        self._previous = read_record(self.backend) if self.name is None else None

    @property
    def id(self) -> str:
        return "" if self.record is None else self.record.id

    def look(self) -> Planned:
        """The plan of this conversion, or of the one that was begun; nothing is written."""
        self.record = find(self.backend, self.name, self.digest)
        if self.record is None:
            self._check_empty()
        return self._plan("0" * 16 if self.record is None else self.record.id)

    def begin(self, part: tuple[int, int]) -> Planned:
        """The plan, said at the destination."""
        self.part = part
        self.record = find(self.backend, self.name, self.digest)
        if self.record is None:
            planned = self._plan("0" * 16)  # what cannot be planned leaves nothing behind
            if part[0] and len(planned.files) <= part[0]:
                return planned  # nothing to do for this process: the others may even have finished
            self.record = self._begun()
        self._check_previous(self.record)
        return self._plan(self.record.id)

    def _begun(self) -> Record:
        try:
            self._check_empty()
        except ConflictError:
            found = find(self.backend, self.name, self.digest)  # another process may have begun just now
            if found is None:
                raise
            return found
        self.backend.prepare()
        return begin(self.backend, self.name, self.digest)

    def _check_previous(self, record: Record) -> None:
        """Raise ConflictError if somebody else has saved here since the conversion was begun."""
        if self._previous is None or self.overwrite:
            return
        if CommitRecord.from_bytes(self._previous, self.url).id != record.id:
            raise ConflictError("there is a checkpoint by now", where=self.url, hint="convert to another URL, or replace it: --overwrite")

    def _plan(self, id: str) -> Planned:
        layout = Layout(id=id, shard_size=self.shard_size, name=self.name, previous=self._previous, parallel=self.parallel)
        return self.format.plan(self.chosen, layout)

    def _check_empty(self) -> None:
        if self.name is not None:
            taken = [n for n in self.backend.children() if n.rstrip("/") == self.name]
        elif self._previous is not None and self.overwrite:
            taken = []
        else:
            taken = [n for n in self.backend.children() if not n.startswith((".", "convert"))]
        if taken:
            raise ConflictError(
                f"something is there already: {', '.join(taken[:5])}",
                where=self.url,
                hint="convert to another URL" + (", or replace the checkpoint: --overwrite" if self._previous is not None else ""),
            )

    def missing(self, planned: Planned) -> list[int]:
        """Files of this process that are not there yet."""
        mine = range(self.part[0], len(planned.files), self.part[1])
        if self.record is None:
            return [] if self.part[0] else list(mine)
        marks = self.record.marks()
        return [i for i in mine if self.record.mark(i) not in marks]

    def write(
        self, planned: Planned, missing: Sequence[int], *, memory: int, threads: int | None, verify: bool, progress: Progress | None
    ) -> int:
        """Write them; gives the bytes that were read."""
        if not missing or self.record is None:
            return 0
        from .streaming import Stream  # imports torch

        for number in missing:
            self.backend.delete(planned.files[number].path)  # begun and never finished
        stream = Stream(
            self.chosen,
            planned,
            self.backend,
            memory=memory,
            threads=default_threads(threads),
            verify=verify,
            done=self.record.done,
        )
        stream.write(missing, progress)
        return stream.reader.bytes_read

    def finish(self, planned: Planned, *, again: bool) -> bool:
        """Make the checkpoint exist, if all files of all processes are there, and no other process does.

        Who was to do it may have died: then the first process of a later attempt, which finds all of its files there, does it.
        """
        if self.record is None:
            return False
        whole = {self.record.mark(i) for i in range(len(planned.files))} <= self.record.marks()
        if not whole or not (self.record.claim() or (again and self.part[0] == 0)):
            return find(self.backend, self.name, self.digest) is None  # then another process has finished it
        planned.finish(self.backend)
        self.record.remove()
        return True


def _apart(url: str, *, file: bool) -> tuple[str, str | None]:
    """The directory that is written to, and the name of the file there if it is one file."""
    if not file:
        return url, None
    head, slash, name = url.rpartition("/")
    if not name or url.endswith("://" + name):
        raise UsageError("this is no file to write to", where=url, hint="name a file")
    return ((head or "/") if slash else "."), name
