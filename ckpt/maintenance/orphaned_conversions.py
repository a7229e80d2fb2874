"""What killed conversions left below a run, and whether it may go. No torch.

A conversion can go on as long as its record is there, so the record says which files are its; it goes after them, and they after the marks
that say they are whole: wherever a removal is stopped, the directory cannot be opened, or the conversion begins again with what is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.conversion import CLAIM, MARK_PATH, RECORD_PATH, ConversionRecord, mark_name, record_path
from ckpt.formats.native.commit import RECORD_LIMIT
from ckpt.io_backends.protocol import Backend, ObjectMeta

Age = Callable[[Iterable[ObjectMeta], str | None], tuple[bool, str]]
"""Whether files, and those of a save of this id, were left alone for long enough, and how to say it."""

Saves = Callable[[str, str], Sequence[ObjectMeta]]
"""Takes the files of a save, by directory and id, out of what else would be orphans."""
Committed = Callable[[str], str | None]
"""The id of the checkpoint that is committed in a directory."""
_MAX_RECORD = 64 << 20


class Place(NamedTuple):
    """A destination: a directory relative to the root, or empty, and the name of the only file if it is one."""

    directory: str
    name: str | None

    def path(self, inner: str) -> str:
        """A path below the directory, from the root."""
        return f"{self.directory}/{inner}".lstrip("/")

    @property
    def record(self) -> str:
        return self.path(record_path(self.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What one conversion left: ``stages`` are removed one after another. ``ended``: its checkpoint is there, and stays."""

    place: Place
    id: str | None
    stages: tuple[tuple[ObjectMeta, ...], ...]
    removable: bool
    reason: str
    ended: bool = False

    @property
    def entries(self) -> tuple[ObjectMeta, ...]:
        return tuple(e for stage in self.stages for e in stage)


class Conversions:
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

    def left(self, backend: Backend, saves: Saves, committed: Committed, age: Age, busy: Set[str]) -> Iterator[Left]:
        """What there is of each conversion; ``busy`` are paths of files of which an upload may go on."""
        marks = dict(self._marks)
        for place, entry in self._records.items():
            try:
                data = backend.read(entry.path) if entry.size <= _MAX_RECORD else b""
            except NotFoundError:
                continue  # it has ended meanwhile
            if b"ckpt-convert" not in data:
                continue  # a file of somebody else
            begun = ConversionRecord.from_bytes(data)
            if begun is None:
                reason = "its record does not say which files are its: another version of ckpt began it"
                yield Left(place=place, id=None, stages=((entry,),), removable=False, reason=reason)
                continue
            own = tuple(marks.pop((place, begun.id), ()))
            try:
                ended = place.name is None and committed(place.directory) == begun.id
            except (CorruptError, FormatError) as err:
                reason = f"the commit record cannot be read, so nobody knows what it needs: {err.message}"
                yield Left(place=place, id=begun.id, stages=((entry,), own), removable=False, reason=reason)
                continue
            if ended:
                yield _judged(place, begun.id, ((entry,), own), age, ended=True)
            else:
                yield _unfinished(backend, place, begun, entry, own, saves(place.directory, begun.id), age, busy)
        for (place, id), orphans in marks.items():
            if place not in self._records:
                yield _judged(place, id, (tuple(orphans),), age, ended=True)


def _unfinished(
    backend: Backend,
    place: Place,
    begun: ConversionRecord,
    record: ObjectMeta,
    marks: tuple[ObjectMeta, ...],
    save: Sequence[ObjectMeta],
    age: Age,
    busy: Set[str],
) -> Left:
    own = {place.path(inner) for inner in begun.files}
    files = {e.path: e for e in (*save, *(e for e in backend.list_prefix(place.path(place.name or "")) if e.path in own))}
    claims = tuple(e for e in marks if e.path.endswith(f"/{CLAIM}"))  # first: whoever begins again has to be able to claim
    stages = (claims, tuple(e for e in marks if e not in claims), tuple(files.values()), (record,))
    other = _not_its_own(place, begun, {e.path: e.size for e in files.values()}, {e.path.rpartition("/")[2] for e in marks})
    if other is not None:
        reason = f"{other} is not as the conversion left it, so somebody else may have written it"
        return Left(place=place, id=begun.id, stages=stages, removable=False, reason=reason)
    if busy & own:
        return Left(place=place, id=begun.id, stages=stages, removable=False, reason="a file of it is being uploaded")
    return _judged(place, begun.id, stages, age)


def _not_its_own(place: Place, begun: ConversionRecord, sizes: Mapping[str, int], marks: Set[str]) -> str | None:
    """A file that is longer than it was to become, or that is durable and has another size."""
    for number, (inner, planned) in enumerate(begun.files.items()):
        size = sizes.get(place.path(inner))
        if size is not None and planned is not None and (size > planned or (size < planned and mark_name(number) in marks)):
            return inner
    return None


def _judged(place: Place, id: str, stages: tuple[tuple[ObjectMeta, ...], ...], age: Age, *, ended: bool = False) -> Left:
    removable, reason = age([e for stage in stages for e in stage], id)
    told = f"it has ended, and only its marks are left; {reason}" if ended else reason
    return Left(place=place, id=id, stages=stages, removable=removable, reason=told, ended=ended)


def is_still(backend: Backend, left: Left, committed: Committed) -> bool:
    """Whether it is now as it was when it was looked at: no other conversion was begun there, and it has not ended meanwhile."""
    recorded = any(e.path == left.place.record for e in left.entries)
    try:
        begun = ConversionRecord.from_bytes(backend.read_whole(left.place.record, RECORD_LIMIT))
    except NotFoundError:
        return not recorded
    if not recorded or begun is None or begun.id != left.id:
        return False
    return left.ended or committed(left.place.directory) != left.id
