"""One process of a conversion: what is planned, what of it is there already, writing the rest, and making the checkpoint exist. No torch,
until something is written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import xxhash

from ckpt.catalog import Catalog
from ckpt.errors import ConflictError, CorruptError, NotFoundError, UsageError
from ckpt.formats.external import ExternalCatalog
from ckpt.formats.journal import ConversionJournal, begin, ended, find
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.clearing import check_no_link, resume
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, has_random_digits, id_replaced, new_id, read_record
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.formats.native.writer import committed_id
from ckpt.formats.registry import CONVERTING, MARKS, ConversionRecord, open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import is_file_system, open_backend, real_url, scheme_of
from ckpt.plan.machines import balanced
from ckpt.settings import __version__
from ckpt.settings import threads as default_threads
from ckpt.telemetry.progress import ProgressCallback

from .selection import OutputSet
from .target import ConvertOptions, OutputFile, OutputOptions, OutputPlan, Target, parent_and_name


def digest_of(chosen: OutputSet, *options: object) -> str:
    """XXH3-128 of the identities of the sources, of all tensors that are wanted of them, and of what else was ``options``."""
    digest = xxhash.xxh3_128(repr((__version__, [_identity(catalog) for catalog in chosen.catalogs], options)).encode())
    for name in sorted(chosen.tensors):
        wanted = chosen.tensors[name]
        computed = () if wanted.computed is None else (wanted.computed,)
        digest.update(repr((name, wanted.dtype.name, wanted.view, wanted.logical, wanted.alias, wanted.rank, *computed)).encode())
    values = [chosen.state, {str(r): v for r, v in chosen.ranks.items()}, chosen.beside]
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()


def check_source(chosen: OutputSet, digest: str, *options: object) -> None:
    """That the source is still what it was when ``digest_of`` gave ``digest``: what has no digests of its own cannot say so by itself."""
    try:
        for number, catalog in enumerate(chosen.catalogs):
            if isinstance(catalog, VirtualCatalog):
                again = open_catalog(catalog.url)  # which looks at the sources anew
                for name in chosen.taken(number):
                    entry = again.tensors[name]
                    again.extents(entry, range(len(entry.grid)))
        same = digest_of(chosen, *options) == digest
    except NotFoundError:
        same = False
    if not same:
        hint = "convert again when nobody writes to the source"
        raise CorruptError("the files changed while they were converted", where=", ".join(c.url for c in chosen.catalogs), hint=hint)


def _identity(catalog: Catalog) -> object:
    if isinstance(catalog, NativeCatalog | VirtualCatalog):
        return catalog.record.id, sorted(f.digest for f in catalog.record.index.values())
    backend = catalog.backend
    files = catalog.files if isinstance(catalog, ExternalCatalog) else ()
    return catalog.format, [(f.path, f.size, backend.version_token(f.path)) for f in files]


class Conversion:
    """One process of one conversion."""

    def __init__(
        self,
        format: Target,
        chosen: OutputSet,
        url: str,
        options: ConvertOptions,
        *,
        repair: object = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        if options.parallel is not None and not format.parallel:
            hint = "leave out --tp, --pp, --vpp, --ep and --arg"
            raise UsageError(f"the format {format.name} does not depend on ranks", where=url, hint=hint)
        if options.overwrite and not format.replaces:
            raise UsageError(f"a checkpoint cannot be replaced by one in the format {format.name}", where=url, hint="remove it first")
        if chosen.computes and not format.computes:
            hint = "convert to native first, and that to this format"
            raise UsageError(f"the format {format.name} takes stored tensors only, none that are computed", where=url, hint=hint)
        self.format = format
        self.chosen = chosen
        self.url = url
        self.options = options
        self.beside = beside or {}
        scheme_of(url)
        self.root: str
        self.name: str | None
        self.root, self.name = parent_and_name(url) if format.one_file(url) else (url, None)
        self.backend: Backend = open_backend(self.root)
        if self.name is None:
            check_no_link(self.backend)
        self._options_digested = (
            format.name,
            options.shard_size,
            options.parallel,
            *([] if repair is None else [repair]),
            *([self.beside] if self.beside else []),
        )
        self.digest = digest_of(chosen, *self._options_digested)
        self.record: ConversionJournal | None = None
        self.part = (0, 1)
        self._repeats = False
        """Whether its processes know nothing of each other: each may be started again after the last has finished."""
        self._new = False
        self.has_ended = False
        """Whether this very conversion had ended before it was begun again."""
        self._made_root = False
        self._previous = read_record(self.backend) if self.name is None else None

    @property
    def id(self) -> str:
        return "" if self.record is None else self.record.id

    def look(self) -> OutputPlan:
        """The plan of this conversion, or of the one that was begun; nothing is written."""
        self.record = find(self.backend, self.name, self.digest)
        over = self._end()
        if over is not None:
            return over
        if self.record is None:
            self._check_empty()
            self._check_readable()
        return self._plan("0" * 16 if self.record is None else self.record.id)

    def begin(self, part: tuple[int, int] | None) -> OutputPlan:
        """The plan, said at the destination. ``part``: of processes that know nothing of each other; None: there is no other."""
        self.part, self._repeats = part or (0, 1), part is not None
        self.record = find(self.backend, self.name, self.digest)
        over = self._end()
        if over is not None:
            if part is None and self.record is not None:
                self.record.remove()
            return over
        # The random digits of the id are derived from the digest of what is converted. So an id tells later attempts
        # whether a checkpoint that is there is the result of this very conversion.
        id = new_id(id_replaced(self._previous, self.url), random=int(self.digest, 16)) if self.record is None else self.record.id
        planned = self._plan(id)  # what cannot be planned leaves nothing behind
        if self.record is None:
            if self.part[0] and len(planned.files) <= self.part[0]:
                return planned  # nothing to do for this process: the others may even have finished
            files = {**{f.path: f.size for f in planned.files}, **dict.fromkeys(planned.last)}
            self._new = True
            self._check_readable()
            try:
                self._check_empty()
            except ConflictError:
                self.record = find(self.backend, self.name, self.digest)  # another process may have begun just now
                if self.record is None:
                    raise
            else:
                self._made_root = is_file_system(self.root) and not os.path.exists(real_url(self.root))
                self.backend.prepare()
                self.record = begin(self.backend, self.name, ConversionRecord(id=id, digest=self.digest, files=files))
        elif self.name is None:
            resume(self.backend, id)
        previous = self._previous if not self.options.overwrite else None
        if previous is not None and CommitRecord.from_bytes(previous, self.url).id != self.record.id:  # somebody else has saved since
            raise ConflictError("there is a checkpoint by now", where=self.url, hint="convert to another URL, or replace it: --overwrite")
        return planned if self.record.id == id else self._plan(self.record.id)

    def join(self, id: str, *, ended: bool) -> OutputPlan:
        """The plan of what the first of several processes has begun, or finds to have ended."""
        self.record, self.has_ended = ConversionJournal(self.backend, self.name, id, self.digest), ended
        return self._plan(id)

    def _end(self) -> OutputPlan | None:
        """The plan, if this very conversion has ended: it is the commit at the destination, or has left its claim there."""
        if self.record is not None or self.options.overwrite:
            return None
        id = ended(self.backend, self.name, self.digest)
        if id is None and self._previous is not None and self.format.replaces:
            committed = CommitRecord.from_bytes(self._previous, self.url).id
            id = committed if has_random_digits(committed, int(self.digest, 16)) else None
        if id is None:
            return None
        planned = self._plan(id)
        if any(_size(self.backend, f.path) != f.size for f in planned.files):
            return None
        self.record, self.has_ended = ConversionJournal(self.backend, self.name, id, self.digest), True
        return planned

    def _plan(self, id: str) -> OutputPlan:
        layout = OutputOptions(
            id=id,
            url=self.url,
            shard_size=self.options.shard_size,
            name=self.name,
            previous=self._previous,
            parallel=self.options.parallel,
            beside=self.beside,
            require_config=self.options.require_config,
        )
        return self.format.plan(self.chosen, layout)

    def _check_empty(self) -> None:
        source = self.chosen.catalog
        if self.name is not None and isinstance(source, ExternalCatalog) and source.url.rstrip("/") == self.backend.url.rstrip("/"):
            hint = "convert to another directory, or give the URL of the source's file"
            raise UsageError("the file would be taken for one of the source, whose directory this is", where=self.url, hint=hint)
        if self.name is not None:
            taken = [n for n in self.backend.list_dir() if n.rstrip("/") == self.name]
        elif self._previous is not None and self.options.overwrite:
            taken = []
        else:
            ours = (".", CONVERTING, f"{MARKS}-")
            taken = [
                n
                for n in self.backend.list_dir()
                if not n.startswith(ours) and not (n.endswith("/") and next(iter(self.backend.list_prefix(n)), None) is None)
            ]
        if taken:
            raise ConflictError(
                f"something is there already: {', '.join(taken[:5])}",
                where=self.url,
                hint="write to another URL" + (", or replace the checkpoint: --overwrite" if self._previous is not None else ""),
            )

    def _check_readable(self) -> None:
        """Raise FormatError for a tensor of a class that is not read: all parts of a tensor are of one, and only its bytes may say so."""
        for number, catalog in enumerate(self.chosen.catalogs):
            if isinstance(catalog, ExternalCatalog):
                catalog.extents_of([(catalog.tensors[name], 0) for name in sorted(self.chosen.taken(number))])

    def missing(self, planned: OutputPlan) -> list[int]:
        """Files of this process that are not there yet."""
        if self.has_ended:
            return []
        number, count = self.part
        mine = list(range(len(planned.files))) if count == 1 else balanced([file.size for file in planned.files], count)[number]
        if self.record is None:
            return [] if self.part[0] else mine
        there = self._there(planned, self.record)
        return [i for i in mine if i not in there]

    def _there(self, planned: OutputPlan, record: ConversionJournal) -> set[int]:
        """Files that are durable."""
        # A mark alone is not enough: a save to the same URL, or a clean-up, may have removed the file.
        marked = record.durable(len(planned.files))
        if self.name is None:
            sizes: dict[str, int | None] = {e.path: e.size for e in self.backend.list_prefix()} if marked else {}
        else:
            sizes = {f.path: _size(self.backend, f.path) for f in planned.files}
        return {i for i in marked if sizes.get(planned.files[i].path) == planned.files[i].size}

    def write(self, planned: OutputPlan, missing: Sequence[int], *, progress: ProgressCallback | None) -> int:
        """Write them; gives the bytes that were read."""
        record = self.record
        if not missing or record is None:
            return 0
        from .file_stream import FileStream

        stream = FileStream(
            self.chosen,
            planned,
            self.backend,
            memory=self.options.memory,
            threads=default_threads(self.options.threads),
            verify=self.options.verify,
            # of a new conversion nothing was begun: what is there, a link that leads nowhere for example, is somebody's
            begin=None if self._new else lambda number: self._clear(record, planned.files[number], number),
            done=record.done,
        )
        stream.write(missing, progress)
        return stream.bytes_read

    def _clear(self, record: ConversionJournal, file: OutputFile, number: int) -> None:
        """Remove a file that was begun and never finished. Raise ConflictError if another process is at it now."""
        others = find(self.backend, self.name, self.digest) is None
        if number in record.durable(number + 1):
            others = others or _size(self.backend, file.path) == file.size
            if not others:
                record.forget(number)
        if not others:
            self.backend.delete(file.path)
            others = number in record.durable(number + 1)
            if others:
                record.forget(number)  # it was durable by then, and is gone now
        if others:
            hint = "let that one go on, or start this one again when it has ended"
            raise ConflictError("another run of this conversion writes here", where=self.url, hint=hint)

    def finish(self, planned: OutputPlan, *, again: bool) -> bool:
        """Make the checkpoint exist, if all files of all processes are there, and no other process does.

        Who was to do it may have died: then it or the first process of a later attempt, which finds all of its files there, does it.
        """
        if self.record is None or self.has_ended:
            return self.has_ended
        if not self._whole(planned, self.record):
            return self._is_over(planned, self.record, alone=self.part[1] == 1)
        if not self.record.claim(self.part[0], again=again):
            return self._is_over(planned, self.record, alone=self.part[1] == 1)
        # Raise CorruptError if the source changed meanwhile; a file of a mixture must not stay, for one alone can be opened
        try:
            check_source(self.chosen, self.digest, *self._options_digested)
        except CorruptError:
            self.discard(planned)
            raise
        planned.finish(self.backend)
        # Processes that do not communicate are started again one by one: a task of an array that is repeated has to see what this was.
        self.record.remove(but_claim=self._repeats and not self.format.replaces)
        return self._is_over(planned, self.record)

    def _is_over(self, planned: OutputPlan, record: ConversionJournal, *, alone: bool = False) -> bool:
        """Whether this process or another has finished it. ``alone``: there is no other."""
        over = find(self.backend, self.name, self.digest) is None
        if not over and not alone:
            return False
        lost = [f.path for f in planned.files if _size(self.backend, f.path) != f.size]
        if self.format.replaces and not lost and over and committed_id(self.backend) != record.id:
            lost = [COMMIT_PATH]
        if lost or not over:
            message = f"somebody removed what this conversion wrote: {lost[0]}" if lost else "another run of this conversion writes here"
            raise ConflictError(message, where=self.url, hint="look for another job or a clean-up there; the same command writes it again")
        return True

    def _whole(self, planned: OutputPlan, record: ConversionJournal) -> bool:
        """Whether all files are durable, those of other processes too."""
        # Any process may be the one that finds all files there. ``claim`` then lets exactly one finish; ``again`` is
        # the way back if that one died in the middle.
        if len(record.durable(len(planned.files))) < len(planned.files):
            return False
        lost = sorted(set(range(len(planned.files))) - self._there(planned, record))
        if lost and find(self.backend, self.name, self.digest) is not None:
            message = f"a file that was durable is gone: {planned.files[lost[0]].path}"
            raise ConflictError(message, where=self.url, hint="look for another job or a clean-up there; the same command writes it again")
        return not lost

    def discard(self, planned: OutputPlan) -> None:
        """Remove what this conversion has written, and its journal: what was written must not stay, and the same command begins anew."""
        if self.record is None or find(self.backend, self.name, self.digest) is None:
            return  # another process has finished or discarded it before that
        for file in planned.files:
            self.backend.delete(file.path)
        self.record.remove()
        if self._made_root:
            with suppress(OSError):  # somebody else has put something there
                os.rmdir(real_url(self.root))


def _size(backend: Backend, path: str) -> int | None:
    try:
        return backend.size(path)
    except NotFoundError:
        return None
