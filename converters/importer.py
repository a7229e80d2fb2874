"""Import without copying: a virtual checkpoint whose chunks are ranges of somebody else's files; and the same in memory, in other names. No
torch; no tensor is read.

Invariant: what is committed tiles every tensor exactly, and every range lies inside a file that is there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from ckpt.catalog import Catalog, Contents, Extent, SourceFile, TensorEntry
from ckpt.converters.mapping.convention import Translation, check_translation, numbers_of_files
from ckpt.engine.digest_reader import ChunkDigest, ChunkName, DigestReader
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError, CorruptError, NotFoundError, UsageError
from ckpt.formats.deltas import ChainBackend
from ckpt.formats.external import open_single
from ckpt.formats.native.clearing import check_free, check_no_link
from ckpt.formats.native.commit import VIRTUAL, id_replaced, new_id, read_record
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import absolute_url, join_url, open_backend, real_url
from ckpt.plan import tree
from ckpt.plan.views import LogicalTensor
from ckpt.telemetry.progress import ProgressCallback, check_progress
from ckpt.text import url_text

from .references import References
from .selected_state import RenamedState, lost, pruned, renamed_state, selected, value_paths
from .selection import SelectOptions, Views, not_skipped, wanted_views

log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What an import made: ``tensors`` and ``tensor_bytes`` that it points at in ``sources`` files. ``seconds`` is wall time."""

    url: str
    id: str
    format: str
    """Of what was imported."""
    tensors: int
    tensor_bytes: int
    chunks: int
    sources: int
    digested: bool
    values: bool
    """Whether everything that is not a tensor is there too."""
    left_out: tuple[str, ...]
    """Stored tensors of which nothing is there, and paths of values that are not there."""
    seconds: float


def import_checkpoint(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    views: Views | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    digest: bool = False,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Write a virtual checkpoint at ``url`` of the checkpoint at ``source``, which is left as it is and has to stay where it is.

    Args:
        views: from the shapes of the stored tensors to what the virtual checkpoint shall have; by default the same tensors.
        only: globs of (new) names and paths of values; others are left out.
        skip: globs of stored names: these tensors are left out, and ``views`` does not see them.
        digest: read all bytes once, so that loads can verify them; digests that the source has are compared. Without it a changed file is
            noticed by its size and time alone.
        overwrite: replace a checkpoint that is at ``url``.
        progress: called with the bytes that were read so far and all bytes, with ``digest``.
    """
    source, url, began = url_text(source), url_text(url), time.monotonic()
    check_progress(progress)
    backend = open_backend(url)
    check_no_link(backend)
    previous = read_record(backend)
    if previous is not None and not overwrite:
        raise ConflictError("there is a checkpoint already", where=url, hint="import to another URL, or replace it: --overwrite")
    stamps = SourceStamps(source)
    catalog = _opened(source)
    selection = SelectOptions(views=views, only=only, skip=skip)
    references = _point(catalog, selection)
    contents = references.contents()
    journal = CheckpointJournal(backend, id=new_id(id_replaced(previous, backend.url)), previous=previous)
    _check_apart(journal, catalog.backend, contents)
    if previous is None:
        check_free(backend, "import")
    if digest:
        if references.parted:
            _check_whole(source)
        contents = replace(contents, extents=_digested(catalog.backend, references.paths, contents, progress))
    if not stamps.are_as_they_were(contents.sources):
        _check_same(source, selection, references)
    backend.prepare()
    write_index(journal, contents, world_size=catalog.world_size, features=(VIRTUAL,), lost=_lost(catalog))
    journal.remove_replaced()
    return ImportReport(
        url=url,
        id=journal.id,
        format=catalog.format,
        tensors=len(contents.tensors),
        tensor_bytes=sum(t.nbytes for t in contents.tensors if t.alias is None),
        chunks=sum(map(len, contents.extents.values())),
        sources=len(contents.sources),
        digested=digest,
        values=not references.state.left_out,
        left_out=references.left_out,
        seconds=time.monotonic() - began,
    )


def _check_same(source: str, selection: SelectOptions, references: References) -> None:
    """Raise CorruptError unless the files still say what ``references`` were made of."""
    contents, again = references.contents(), _point(open_catalog(source), selection).contents()
    if (again.sources, again.extents) != (contents.sources, references.extents):
        raise CorruptError("the files changed while they were imported", where=source, hint="import again when the files no longer change")


def _check_apart(journal: CheckpointJournal, source: Backend, contents: Contents) -> None:
    """Raise UsageError if the checkpoint would point into itself, or at files of the one that it replaces, which will be removed; whatever
    the two URLs look like: a link, or another name of the same bucket, leads to the same files."""
    target, previous = journal.backend, journal.previous
    same = real_url(target.url) == real_url(source.url) or (previous is not None and read_record(source) == previous)
    gone = {real_url(join_url(target.url, path)) for path in journal.replaced_files()}
    if same or (gone and any(real_url(join_url(s.root, s.path)) in gone for s in contents.sources)):
        raise UsageError("a checkpoint cannot point into itself", where=target.url, hint="import to another URL")


def _lost(catalog: Catalog) -> tuple[str, ...]:
    return () if catalog.record is None else catalog.record.lost


def _opened(source: str) -> Catalog:
    catalog = open_catalog(source)
    if isinstance(catalog, VirtualCatalog):
        raise UsageError("this is a virtual checkpoint already", where=source, hint="import what it was made of")
    if isinstance(catalog.backend, ChainBackend):
        message = "the elements of a delta lie in several files, so nothing can point at them"
        raise UsageError(message, where=source, hint="make a full export of it first: `ckpt convert --to hf`")
    return catalog


def _point(catalog: Catalog, choice: SelectOptions) -> References:
    entries = not_skipped(catalog, choice.skip)
    wanted = wanted_views(catalog, entries, choice.views, choice.only, also=value_paths(catalog.state))
    pointed = References(catalog, _state(catalog, entries, wanted, choice))
    pointed.add(wanted)
    return pointed


def _state(
    catalog: Catalog, entries: Mapping[str, TensorEntry], wanted: Mapping[str, LogicalTensor], choice: SelectOptions
) -> RenamedState:
    """The state for these tensors."""
    renamed = RenamedState(pruned(catalog.state, sorted(wanted), optimizers=choice.views is None))
    if choice.views is not None:
        renamed = renamed_state(catalog, entries, wanted, renamed.state)
    if not choice.only:
        return renamed
    chosen = selected(renamed.state, choice.only)
    return renamed._replace(state=chosen, left_out=(*renamed.left_out, *lost(renamed.state, chosen)))


def _check_whole(source: str) -> None:
    """Parts of chunks get digests of their own: those of the whole chunks have to be right first, else damage would have a digest."""
    report = verify(source)
    if not report.ok:
        raise CorruptError(str(report.problems[0]), where=source, hint="`ckpt verify` lists all that is damaged")


def _digested(backend: Backend, paths: Sequence[str], contents: Contents, progress: ProgressCallback | None) -> dict[str, list[Extent]]:
    """The extents with the digest of their bytes, read in parallel. ``paths``: of the sources."""
    rows = [
        (t.name, i, paths[t.grid.file(i)], extent)
        for t in contents.tensors
        if t.alias is None
        for i, extent in enumerate(contents.extents[t.name])
    ]
    grids = {t.name: t.grid for t in contents.tensors}
    total, done = sum(e.length for *_, e in rows), 0
    extents_of = {name: list(extents) for name, extents in contents.extents.items()}

    reader = DigestReader(backend, crc32=True)

    def digest(row: tuple[str, int, str, Extent]) -> str:
        """The digest of a chunk, which is compared with the one, or the checksum, that the source has of it."""
        name, i, path, extent = row
        chunk = ChunkName(name, grids[name].box(i), extent._replace(path=path))

        def read() -> str:
            state = ChunkDigest(reader, chunk, always=True)
            reader.pass_over(chunk, state)
            state.end()
            return state.hexdigest()

        return reader.reread(chunk.extent, read)

    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1)), thread_name_prefix="ckpt-import") as pool:
        for (name, i, _, extent), hexdigest in zip(rows, pool.map(digest, rows), strict=True):
            extents_of[name][i] = extent._replace(digest=hexdigest)
            done += extent.length
            if progress is not None:
                progress(done, total)
    return extents_of


# ------------------------------------------------------------------------------- whether files stayed as they were meanwhile
#
# "Yes" is only said where any change would show: a file that was written so lately that another write could bear the same time, or
# one that was not seen beforehand, makes it "perhaps not".

LATELY = 2.0
"""Seconds: the times of no file system are coarser."""
MOST = 4096
"""Files beyond which looking at each of them is not cheap any more."""


class _FileStamp(NamedTuple):
    size: int
    stamp: str
    modified: float


class SourceStamps:
    """The files right below ``url``, or the one there, as they were when this was made. Of storages where a look costs a request, none."""

    def __init__(self, url: str) -> None:
        backend: Backend = open_backend(url)
        names = [] if backend.io_hints.concurrency else [name for name in backend.list_dir() if not name.endswith("/")]
        if not names and not backend.io_hints.concurrency and (single := open_single(url)) is not None:
            backend, names = single.inner, [single.name]
        self._backend = backend
        self._before = {name: _look(backend, name) for name in names} if len(names) <= MOST else {}

    def are_as_they_were(self, sources: Iterable[SourceFile]) -> bool:
        """Whether it is certain that neither these files nor any others that were seen have changed since."""
        root = absolute_url(self._backend.url)
        if any(s.root != root or s.path not in self._before for s in sources):
            return False
        latest = time.time() - LATELY
        return all(
            seen is not None and seen.modified < latest and _look(self._backend, name) == seen for name, seen in self._before.items()
        )


def _look(backend: Backend, name: str) -> _FileStamp | None:
    """None if the storage does not say enough of a file, or it has gone."""
    try:
        size, stamp, modified = backend.size(name), backend.version_token(name), backend.modified(name)
    except NotFoundError:
        return None
    return None if stamp is None or modified is None else _FileStamp(size, stamp, modified)


def translated(url: str | os.PathLike[str], translation: Translation, *, skip: Sequence[str] = (), only: Sequence[str] = ()) -> str:
    """A checkpoint in other names, without a step in between: ``ckpt.load(translated("megatron/", translation), state)``; likewise
    ``ckpt.open``.

    What it gives is the URL of a virtual checkpoint in the memory of this process. Every rank makes its own.

    Args:
        url: a checkpoint of any format, but no virtual one.
        translation: into the convention that the state has.
        skip: globs of stored names: these tensors are left out, and no rule of the translation has to take them.
        only: globs of new names and of paths of values: others are left out.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no whole checkpoint of a known format at ``url``.
        NamesError: tensors that no rule takes, or missing ones; or a glob fits nothing.
        UsageError: there is no such translation, or the tensors, steps or options do not fit it.
        CoverageError: a tensor would have elements that no file has.
    """
    url = url_text(url)
    check_translation(translation, needed=True)
    # The id follows from what the checkpoint is, so that each rank of a job can make its own and load from it.
    views = translation.views(numbers_of_files(url))
    catalog = _opened(url)
    contents = _point(catalog, SelectOptions(views=views, only=only, skip=skip)).contents()
    tensors = [(t.name, t.dtype.name, t.shape, t.logical, t.alias, t.rank, contents.extents.get(t.name)) for t in contents.tensors]
    values = tree.text([contents.state, {str(rank): dict(values) for rank, values in contents.ranks.items()}])
    id = xxhash.xxh3_64(repr((tensors, contents.sources, values)).encode()).hexdigest()
    backend = open_backend(f"inprocess://imported/{id}")
    if read_record(backend) is None:
        write_index(
            CheckpointJournal(backend, id=id, previous=None),
            contents,
            world_size=catalog.world_size,
            features=(VIRTUAL,),
            lost=_lost(catalog),
        )
    return backend.url
