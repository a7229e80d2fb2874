"""Files that killed and failed saves, copies and conversions left below a run: which are orphans, and which of them may go. No torch.

Invariant: nothing is removed beyond a symbolic link. The root may be a link, if it is that of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal, NamedTuple

from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.native.clearing import BATCH, FileReferrers, RunReferrers, clear, referrers_in
from ckpt.formats.native.commit import COMMIT_PATH, RECORD_LIMIT, began
from ckpt.formats.native.paths import id_of, is_there, step_number
from ckpt.formats.native.virtual import GENERATION_PATH
from ckpt.formats.native.writer import committed_id
from ckpt.formats.registry import CLAIM, MARK_PATH, RECORD_PATH, ConversionRecord, ExportRecord, mark_name, record_path
from ckpt.io_backends.protocol import Backend, ObjectMeta, PendingUpload
from ckpt.io_backends.registry import join_url, open_backend

# One thing that a killed process left behind, as ``orphans`` finds and removes it.

Age = Callable[[Iterable[ObjectMeta], str | None], tuple[bool, str]]
"""Whether files, and those of a save of this id, were left alone for long enough, and how to say it."""

Kind = Literal["save", "temporary", "upload", "conversion", "export"]


class Place(NamedTuple):
    """A destination: a directory relative to the root, or empty, and the name of the only file if it is one."""

    directory: str
    name: str | None = None

    def path(self, inner: str) -> str:
        """A path below the directory, from the root."""
        return f"{self.directory}/{inner}".lstrip("/")

    @property
    def record(self) -> str:
        """Where a conversion or an export says what it writes here."""
        return self.path(record_path(self.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphan:
    """What one killed save, copy, conversion or export left at ``place``; or a ``temporary`` file, or a pending ``upload``.

    ``stages`` are removed one after another, so that nobody can open what is left wherever a removal is stopped. ``id`` is that of the
    save or conversion. ``ended``: a conversion whose checkpoint is there, and stays; only its record and marks are left.
    """

    what: Kind
    place: Place
    id: str | None = None
    stages: tuple[tuple[ObjectMeta, ...], ...] = ()
    upload: PendingUpload | None = None
    removable: bool
    reason: str
    ended: bool = False

    @property
    def entries(self) -> tuple[ObjectMeta, ...]:
        return tuple(e for stage in self.stages for e in stage)

    @property
    def path(self) -> str:
        """The directory of a save, the file or the object; empty for the root itself."""
        if self.place.name is not None:
            return self.place.path(self.place.name)
        return self.upload.path if self.upload else self.entries[0].path if self.what == "temporary" else self.place.directory

    @property
    def bytes(self) -> int:
        return sum(e.size for e in self.entries)


# What killed conversions and exports left below a run, by the records of their ``IntentJournal``, and whether it may go.
#
# A conversion can be resumed as long as its record is there, so the record says which files are its; it goes after them, and they after
# the marks that say they are durable: wherever a removal is stopped, the directory cannot be opened, or the conversion begins again with
# what is gone. An export is never resumed. One that replaces another is left alone: files under its names may still be the other's.

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


__all__ = ["Orphan", "find_orphans", "remove_orphans"]

SETTLED = 600.0
"""Seconds after which a commit is not taken back any more. One that lost its files to somebody is, as soon as the save has looked."""

# What makes a file an orphan, and when it may go
#
#   no commit record reaches it         An orphan: of a save in progress, or of one that was killed. Both look the same, so time decides.
#     a file was touched lately           stays: the save may be in progress
#     none was for ``older_than``         goes
#     a later save is committed there     goes once that commit is SETTLED: a save can commit only over the record that it began with.
#                                         Not before: a commit may be taken back, and then this is the checkpoint again
#   convert.json is there               A conversion or an export, unfinished. The files that it names go by the same rule, then the
#                                       record: a removal that is stopped never leaves a directory that opens with half of its files.
#   an upload is pending, or a file     The same rule, for it alone.
#   has a temporary name
#
# "Touched" is what the storage says of the files, and so is the present time: no clock of this machine counts. Where a storage keeps no
# times, the begin of the save counts, which its id tells by the clock of the machine that saved. Time can be wrong, so removing a save
# is safe even if it is in progress after all: see ``clearing``.

_TEMPORARY = re.compile(r"(?:.*/)?\.(?:(?:publish|prepare)-[0-9a-f]{16}\.tmp|[^/]+\.[0-9a-f]{16}\.shared)")
"""Names that a file has before it gets its own: of small files, of a trial, and of files that several processes write."""


@dataclass(kw_only=True, slots=True)
class _Directory:
    """What one listing shows of a place that may hold a checkpoint."""

    record: ObjectMeta | None = None
    saves: dict[str, list[ObjectMeta]] = field(default_factory=dict)


def find_orphans(backend: Backend, *, older_than: float, now: float) -> list[Orphan]:
    """All orphans below the root of ``backend``, a run or one checkpoint, also what is too young to go.

    Args:
        older_than: seconds for which nobody touched a file that may go. 0: nobody saves or copies there now.
        now: seconds since 1970, as the storage says: ``Backend.now``.
    """
    directories: dict[str, _Directory] = {}
    orphans: list[Orphan] = []
    intents = Intents()
    age = partial(_judge, backend, older_than=older_than, now=now)
    settled = partial(_judge, backend, older_than=min(older_than, SETTLED), now=now)
    split = partial(_split, joint=is_there(backend, GENERATION_PATH))
    for entry in backend.list_prefix():
        directory, inner = split(entry.path)
        save = id_of(inner)
        if _TEMPORARY.fullmatch(entry.path):
            removable, reason = age([entry], None)
            orphans.append(Orphan(what="temporary", place=Place(directory), stages=((entry,),), removable=removable, reason=reason))
        elif inner == COMMIT_PATH:
            directories.setdefault(directory, _Directory()).record = entry
        elif save is not None:
            directories.setdefault(directory, _Directory()).saves.setdefault(save, []).append(entry)
        else:
            intents.look(entry)
    uploads = []
    for upload in backend.pending_uploads():
        removable = older_than == 0 or now - upload.started >= older_than
        reason = f"an upload that began {_ago(now - upload.started)} ago" + ("" if removable else " and may go on")
        directory, inner = split(upload.path)
        place = Place(directory)
        uploads.append(Orphan(what="upload", place=place, id=id_of(inner), upload=upload, removable=removable, reason=reason))
    busy = {d.path for d in uploads if not d.removable}

    def taken(directory: str, id: str) -> list[ObjectMeta]:
        return directories[directory].saves.pop(id, []) if directory in directories else []

    orphans += intents.orphans(backend, taken, partial(_committed, backend), age, busy)
    # All records of the run are read for it: only if there are any saves left.
    referrers = cache(lambda run: referrers_in(open_backend(join_url(backend.url, run)) if run else backend))
    for name, directory_left in directories.items():
        orphans += _kept_for_others(_saves(backend, name, directory_left, age, settled), referrers)
    orphans += uploads
    # What is beyond a link stays: a root that is one and has a checkpoint's files itself is no run.
    target = backend.link()
    if target is None or all(o.place.directory or o.what in ("temporary", "upload") for o in orphans):
        return orphans
    reason = f"the root is a symbolic link to {target}, beyond which nothing is removed: name {target} itself"
    return [replace(o, removable=False, reason=reason) if not o.place.directory else o for o in orphans]


def _split(path: str, *, joint: bool = False) -> tuple[str, str]:
    """The directory right below the root, if the path of a checkpoint's file follows it, and that path. ``joint``: the root is that of
    several jobs, whose checkpoints lie right below the directories of the members."""
    if path == COMMIT_PATH or id_of(path) is not None:
        return "", path
    first, _, rest = path.partition("/")
    second, _, inner = rest.partition("/")
    return (f"{first}/{second}", inner) if joint and inner and step_number(first) is None else (first, rest)


def _saves(
    backend: Backend, directory: str, left: _Directory, age: partial[tuple[bool, str]], settled: partial[tuple[bool, str]]
) -> Iterator[Orphan]:
    place = Place(directory)
    if left.record is not None and len(left.saves) < 2:
        return  # one checkpoint and nothing else: no need to read its record
    try:
        committed = _committed(backend, directory) if left.record is not None else None
    except (CorruptError, FormatError) as err:
        for id, entries in left.saves.items():
            reason = f"the commit record cannot be read, so nobody knows what it needs: {err.message}"
            yield Orphan(what="save", place=place, id=id, stages=(tuple(entries),), removable=False, reason=reason)
        return
    for id, entries in left.saves.items():
        if id == committed:
            continue
        if left.record is not None and committed is not None and id < committed:
            removable, reason = settled([left.record], committed)
            reason = (
                "it began before the save that is committed there, and cannot commit any more"
                if removable
                else f"it may be what the save that is committed there replaces, and that may be taken back: {reason}"
            )
        else:
            removable, reason = age(entries, id)
        yield Orphan(what="save", place=place, id=id, stages=(tuple(entries),), removable=removable, reason=reason)


def _kept_for_others(orphans: Iterable[Orphan], referrers_below: Callable[[str], RunReferrers]) -> Iterator[Orphan]:
    """The same, but for files of a save that was replaced which checkpoints of the run refer to, or may refer to: these stay."""
    for orphan in orphans:
        directory = orphan.place.directory
        run, _, name = directory.rpartition("/")
        referrers = referrers_below(run).to(name) if name else FileReferrers()
        named = {e: names for e in orphan.entries if (names := referrers.of(e.path.removeprefix(f"{directory}/")))}
        go = [e for e in orphan.entries if e not in named]
        if named:
            reason = referrers.text(name for names in named.values() for name in names)
            yield replace(orphan, stages=(tuple(named),), removable=False, reason=reason)
        if go:
            yield replace(orphan, stages=(tuple(go),)) if named else orphan


def _committed(backend: Backend, directory: str) -> str | None:
    return committed_id(backend, f"{directory}/".lstrip("/"))


def _judge(backend: Backend, entries: Iterable[ObjectMeta], id: str | None, *, older_than: float, now: float) -> tuple[bool, str]:
    """Whether files were left alone for ``older_than`` seconds, and how to say it."""
    # The first young file decides.
    #
    # ``now`` comes from the storage, as the times of files do: with a local clock that is an hour ahead, a save in
    # progress would look an hour old.
    if older_than == 0:
        return True, "with an age of 0, nobody saves there now"
    touched: float | None = None
    for entry in entries:
        try:
            modified = backend.modified(entry.path)
        except NotFoundError:
            return False, "its files are being removed, by somebody else"
        if modified is not None and now - modified < older_than:
            return False, f"it was touched {_ago(now - modified)} ago and may go on"
        touched = max((t for t in (touched, modified) if t is not None), default=None)
    if touched is None:
        touched = began(id) if id is not None else None
        if touched is not None and now - touched < older_than:
            return False, f"it began {_ago(now - touched)} ago and may go on"
    if touched is None:
        return False, "nobody can say how old it is: only an age of 0 removes it"
    return True, f"nobody touched it for {_ago(now - touched)}"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def remove_orphans(backend: Backend, orphans: Iterable[Orphan]) -> None:
    """Remove those that are ``removable``. What was committed since ``find_orphans`` looked stays, and so does what is being committed."""
    going = [o for o in orphans if o.removable]
    for upload in (o.upload for o in going if o.upload is not None):
        backend.abort_upload(upload)
    _delete(backend, (e for o in going if o.what == "temporary" for e in o.entries))
    for orphan in going:
        if orphan.what == "save" and orphan.id is not None:
            paths = [e.path for e in orphan.entries]
            clear(backend, orphan.id, orphan.place.path(""), paths, partial(_committed, backend, orphan.place.directory))
        elif orphan.what in ("conversion", "export"):
            _remove_stages(backend, orphan)


def _remove_stages(backend: Backend, orphan: Orphan) -> None:
    committed, place = partial(_committed, backend), orphan.place
    for number, stage in enumerate(orphan.stages):
        # It may go on, or have ended, since the stage before; of one that has ended the record went in the first stage.
        if not is_still(backend, orphan, committed) and not (orphan.ended and number):
            return
        if orphan.id is not None and any(id_of(e.path.removeprefix(place.path(""))) == orphan.id for e in stage):
            clear(backend, orphan.id, place.path(""), [e.path for e in stage], partial(committed, place.directory))
        else:
            to_the_end = orphan.ended or number + 1 == len(orphan.stages)
            _delete(backend, stage, None if to_the_end else place.record)


def _delete(backend: Backend, entries: Iterable[ObjectMeta], record: str | None = None) -> None:
    """Delete these, as long as ``record`` is there, if given: it goes when the conversion or export has ended after all."""
    paths = [e.path for e in entries]
    for at in range(0, len(paths), BATCH):
        if record is not None and not is_there(backend, record):
            return
        backend.delete_many(paths[at : at + BATCH])
