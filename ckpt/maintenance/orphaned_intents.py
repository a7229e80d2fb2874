"""What killed conversions and exports left below a run, by the records of their ``IntentJournal``, and whether it may go. No torch.

A conversion can be resumed as long as its record is there, so the record says which files are its; it goes after them, and they after the
marks that say they are durable: wherever a removal is stopped, the directory cannot be opened, or the conversion begins again with what is
gone. An export is never resumed. One that replaces another is left alone: files under its names may still be the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.conversion import CLAIM, MARK_PATH, RECORD_PATH, ConversionRecord, ExportRecord, mark_name
from ckpt.formats.native.commit import RECORD_LIMIT
from ckpt.io_backends.protocol import Backend, ObjectMeta

from .orphan import Age, Orphan, Place

Saves = Callable[[str, str], Sequence[ObjectMeta]]
"""Takes the files of a save, by directory and id, out of what else would be orphans."""
Committed = Callable[[str], str | None]
"""The id of the checkpoint that is committed in a directory."""
_MAX_RECORD = 64 << 20


class Intents:
    """Collects records and marks from a listing."""

    def __init__(self) -> None:
        self._records: dict[Place, ObjectMeta] = {}
        self._marks: dict[tuple[Place, str], list[ObjectMeta]] = {}

    def look(self, entry: ObjectMeta) -> None:
        """Keep it if it is one of these."""
        record, mark = RECORD_PATH.fullmatch(entry.path), MARK_PATH.fullmatch(entry.path)
        if record is not None:
            self._records[Place(record["directory"] or "", record["name"])] = entry
        elif mark is not None:
            self._marks.setdefault((Place(mark["directory"] or "", mark["name"]), mark["id"]), []).append(entry)

    def orphans(self, backend: Backend, saves: Saves, committed: Committed, age: Age, busy: Set[str]) -> Iterator[Orphan]:
        """What there is of each; ``busy`` are paths of files of which an upload may go on."""
        marks = dict(self._marks)
        for place, entry in self._records.items():
            try:
                data = backend.read(entry.path) if entry.size <= _MAX_RECORD else b""
            except NotFoundError:
                continue  # it has ended meanwhile
            if b"ckpt-export" in data and (export := ExportRecord.from_bytes(data)) is not None:
                yield _export(backend, place, export, entry, age, busy)
            if b"ckpt-convert" not in data:
                continue  # a file of somebody else
            begun = ConversionRecord.from_bytes(data)
            if begun is None:
                reason = "its record does not say which files are its: another version of ckpt began it"
                yield Orphan(what="conversion", place=place, stages=((entry,),), removable=False, reason=reason)
                continue
            own = tuple(marks.pop((place, begun.id), ()))
            try:
                ended = place.name is None and committed(place.directory) == begun.id
            except (CorruptError, FormatError) as err:
                reason = f"the commit record cannot be read, so nobody knows what it needs: {err.message}"
                yield Orphan(what="conversion", place=place, id=begun.id, stages=((entry,), own), removable=False, reason=reason)
                continue
            if ended:
                yield _ended(place, begun.id, ((entry,), own), age)
            else:
                yield _unfinished(backend, place, begun, entry, own, saves(place.directory, begun.id), age, busy)
        for (place, id), left in marks.items():
            if place not in self._records:
                yield _ended(place, id, (tuple(left),), age)


def _export(backend: Backend, place: Place, begun: ExportRecord, record: ObjectMeta, age: Age, busy: Set[str]) -> Orphan:
    own = {place.path(inner) for inner in begun.files}
    stages = (tuple(e for e in backend.list_prefix(place.path(place.name or "")) if e.path in own), (record,))
    removable, reason = age([e for stage in stages for e in stage], None)
    if begun.replaces:
        removable, reason = False, "it was to replace another export, whose files may still be there: export again, or remove them yourself"
    elif busy & own:
        removable, reason = False, "a file of it is being uploaded"
    return Orphan(what="export", place=place, id=begun.id, stages=stages, removable=removable, reason=reason)


def _unfinished(
    backend: Backend,
    place: Place,
    begun: ConversionRecord,
    record: ObjectMeta,
    marks: tuple[ObjectMeta, ...],
    save: Sequence[ObjectMeta],
    age: Age,
    busy: Set[str],
) -> Orphan:
    own = {place.path(inner) for inner in begun.files}
    files = {e.path: e for e in (*save, *(e for e in backend.list_prefix(place.path(place.name or "")) if e.path in own))}
    claims = tuple(e for e in marks if e.path.endswith(f"/{CLAIM}"))  # first: whoever begins again has to be able to claim
    stages = (claims, tuple(e for e in marks if e not in claims), tuple(files.values()), (record,))
    other = _not_its_own(place, begun, {e.path: e.size for e in files.values()}, {e.path.rpartition("/")[2] for e in marks})
    if other is not None:
        removable, reason = False, f"{other} is not as the conversion left it, so somebody else may have written it"
    elif busy & own:
        removable, reason = False, "a file of it is being uploaded"
    else:
        removable, reason = age([e for stage in stages for e in stage], begun.id)
    return Orphan(what="conversion", place=place, id=begun.id, stages=stages, removable=removable, reason=reason)


def _not_its_own(place: Place, begun: ConversionRecord, sizes: Mapping[str, int], marks: Set[str]) -> str | None:
    """A file that is longer than it was to become, or that is durable and has another size."""
    for number, (inner, planned) in enumerate(begun.files.items()):
        size = sizes.get(place.path(inner))
        if size is not None and planned is not None and (size > planned or (size < planned and mark_name(number) in marks)):
            return inner
    return None


def _ended(place: Place, id: str, stages: tuple[tuple[ObjectMeta, ...], ...], age: Age) -> Orphan:
    removable, reason = age([e for stage in stages for e in stage], id)
    reason = f"it has ended, and only its marks are left; {reason}"
    return Orphan(what="conversion", place=place, id=id, stages=stages, removable=removable, reason=reason, ended=True)


def is_still(backend: Backend, orphan: Orphan, committed: Committed) -> bool:
    """Whether it is now as it was when it was looked at: nothing else was begun there, and it has not ended meanwhile."""
    recorded = any(e.path == orphan.place.record for e in orphan.entries)
    try:
        data = backend.read_whole(orphan.place.record, RECORD_LIMIT)
    except NotFoundError:
        return not recorded
    begun = (ExportRecord if orphan.what == "export" else ConversionRecord).from_bytes(data)
    if not recorded or begun is None or begun.id != orphan.id:
        return False
    return orphan.ended or orphan.what == "export" or committed(orphan.place.directory) != orphan.id
