"""What a conversion leaves at its destination while it goes on, so that it can be gone on with, also by several processes at once.

``convert.json`` says what is converted, by a digest of everything that the result depends on, and into which files. A mark for each file
says that the file is durable: one that was only begun has none. Both go when all is done. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import xxhash

from ckpt.catalog import Catalog
from ckpt.converters.select.selection import OutputSet
from ckpt.errors import ConflictError, CorruptError, NotFoundError
from ckpt.formats.conversion import CLAIM, ConversionRecord, mark_name, marks_prefix, record_path
from ckpt.formats.external.base import ExternalCatalog
from ckpt.formats.journal import IntentJournal
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import RECORD_LIMIT
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.settings import __version__
from ckpt.text import parse_json

# A conversion in the storage, from its begin to its end
#
#   convert.json put             the record: which files, and a digest of everything that they depend on. Other options: another digest,
#                                which is refused; the same command finds its own record and resumes
#   convert-<id>/00000, 00001 …  one mark for each file, put when it is durable. A file without mark may be cut off, so it is written anew
#   convert-<id>/finish          the claim: of all processes that see all marks, the one that puts it writes what comes last
#   convert.json deleted         the commit: readers refuse the directory as long as it is there
#   marks deleted, claim last    whoever comes late finds no record but the claim, and knows that all has ended (``ended``)
#
# Killed between two lines, the same command continues at the line where it was.


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
                for name in chosen.taken_of(number):
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


class ConversionJournal(IntentJournal):
    """The conversion at ``backend``; ``name`` is that of the only file, if the destination is one. ``id`` is for names of files.

    Several processes may take part, and a later attempt may resume it. So besides the record there is a mark for each file that is durable,
    and one for the process that finishes.
    """

    def __init__(self, backend: Backend, name: str | None, id: str, digest: str) -> None:
        super().__init__(backend, record_path(name))
        self.id = id
        self.digest = digest
        self._marks = marks_prefix(name, id)

    def mark(self, number: int) -> str:
        """That of a file that is durable."""
        return self._marks + mark_name(number)

    def marks(self) -> set[str]:
        """Those that are there."""
        return {e.path for e in self.backend.list_prefix(self._marks)}

    def done(self, number: int) -> None:
        """Say that file ``number`` is durable."""
        try:
            self.backend.put_if(self.mark(number), b"{}\n", expected=None)
        except ConflictError:
            if self.mark(number) not in self.marks():
                raise

    def forget(self, number: int) -> None:
        """Take back that file ``number`` is durable."""
        self.backend.delete(self.mark(number))

    def claim(self) -> bool:
        """Whether it is for this process to finish: of all that ask, the first one."""
        try:
            self.backend.put_if(self._marks + CLAIM, json.dumps({"digest": self.digest}).encode() + b"\n", expected=None)
        except ConflictError:
            return False
        return True

    def remove(self, *, but_claim: bool = False) -> None:
        """Take it away: the conversion is over. The marks go last, for who looks for them finds no record then. A claim that stays says to
        ``ended`` which conversion this was."""
        self.commit()
        for path in sorted(self.marks()):
            if not (but_claim and path.endswith(f"/{CLAIM}")):
                self.backend.delete(path)


def ended(backend: Backend, name: str | None, digest: str) -> str | None:
    """The id of the conversion of this digest, if it took its record away and not its claim: see ``remove``, or it was killed."""
    for folder, id in _folders(backend, name):
        try:
            claim = parse_json(backend.read_whole(folder + CLAIM, RECORD_LIMIT))
        except (NotFoundError, CorruptError, ValueError):  # another one's, or of an older version
            continue
        if isinstance(claim, dict) and claim.get("digest") == digest:
            return id
    return None


def forget_ended(backend: Backend, name: str | None) -> None:
    """Remove the claims of conversions that have ended: what they wrote is not there any more."""
    for folder, _ in _folders(backend, name):
        backend.delete(folder + CLAIM)


def _folders(backend: Backend, name: str | None) -> Iterator[tuple[str, str]]:
    """Those with the marks of conversions, and their ids."""
    starts = marks_prefix(name, "").removesuffix("/")
    return ((f, f.removeprefix(starts).removesuffix("/")) for f in backend.list_dir() if f.startswith(starts) and f.endswith("/"))


def find(backend: Backend, name: str | None, digest: str) -> ConversionJournal | None:
    """The conversion that was begun here; None if there is none."""
    try:
        data = backend.read_whole(record_path(name), RECORD_LIMIT)
    except NotFoundError:
        return None
    begun = ConversionRecord.from_bytes(data)
    if begun is None or begun.digest != digest:
        raise ConflictError(
            f"another conversion was begun here and did not finish ({record_path(name)}): of another source, with other options, "
            "or by another version",
            where=backend.url,
            hint="convert to another URL, or remove what is there",
        )
    return ConversionJournal(backend, name, begun.id, digest)


def begin(backend: Backend, name: str | None, begun: ConversionRecord) -> ConversionJournal:
    """Begin a conversion, or join the same one that another process has begun meanwhile."""
    record = ConversionJournal(backend, name, begun.id, begun.digest)
    try:
        record.begin(begun.to_bytes())
    except ConflictError:
        other = find(backend, name, begun.digest)
        if other is None:
            raise
        return other
    return record
