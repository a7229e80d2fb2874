"""Files that killed and failed saves, copies and conversions left below a run: which are orphans, and which of them may go. No torch.

Invariant: nothing is removed beyond a symbolic link. The root may be a link, if it is that of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.native.catalog import read_record
from ckpt.formats.native.clearing import BATCH, clear, is_there
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, began
from ckpt.formats.native.datafiles.referrers import FileReferrers, RunReferrers, referrers_in
from ckpt.formats.native.paths import id_of
from ckpt.io_backends.protocol import Backend, ObjectMeta, PendingUpload

from .orphan import Orphan, Place
from .orphaned_intents import Intents, is_still

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
    for entry in backend.list_prefix():
        directory, inner = _split(entry.path)
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
    uploads = [_upload(upload, older_than, now) for upload in backend.pending_uploads()]
    busy = {d.path for d in uploads if not d.removable}

    def taken(directory: str, id: str) -> list[ObjectMeta]:
        return directories[directory].saves.pop(id, []) if directory in directories else []

    orphans += intents.orphans(backend, taken, partial(_committed, backend), age, busy)
    referrers = cache(partial(referrers_in, backend))  # all records of the run are read for it: only if there are any saves left
    for name, directory_left in directories.items():
        orphans += _kept_for_others(_saves(backend, name, directory_left, age, settled), referrers)
    return _on_this_side(backend, orphans + uploads)


def _on_this_side(backend: Backend, orphans: list[Orphan]) -> list[Orphan]:
    """What is beyond a link stays: a root that is one and has a checkpoint's files itself is no run."""
    target = backend.link()
    if target is None or all(o.place.directory or o.what in ("temporary", "upload") for o in orphans):
        return orphans
    reason = f"the root is a symbolic link to {target}, beyond which nothing is removed: name {target} itself"
    return [replace(o, removable=False, reason=reason) if not o.place.directory else o for o in orphans]


def _split(path: str) -> tuple[str, str]:
    """The directory right below the root, if the path of a checkpoint's file follows it, and that path."""
    first, _, rest = path.partition("/")
    return ("", path) if path == COMMIT_PATH or id_of(path) is not None else (first, rest)


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


def _kept_for_others(orphans: Iterable[Orphan], run: Callable[[], RunReferrers]) -> Iterator[Orphan]:
    """The same, but for files of a save that was replaced which checkpoints of the run refer to, or may refer to: these stay."""
    for orphan in orphans:
        directory = orphan.place.directory
        referrers = run().to(directory) if directory else FileReferrers()
        named = {e: names for e in orphan.entries if (names := referrers.of(e.path.removeprefix(f"{directory}/")))}
        go = [e for e in orphan.entries if e not in named]
        if named:
            reason = referrers.text(name for names in named.values() for name in names)
            yield replace(orphan, stages=(tuple(named),), removable=False, reason=reason)
        if go:
            yield replace(orphan, stages=(tuple(go),)) if named else orphan


def _committed(backend: Backend, directory: str) -> str | None:
    data = read_record(backend, f"{directory}/".lstrip("/"))
    path = f"{directory}/{COMMIT_PATH}".lstrip("/")
    return None if data is None else CommitRecord.from_bytes(data, f"{backend.url}/{path}").id


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


def _upload(upload: PendingUpload, older_than: float, now: float) -> Orphan:
    removable = older_than == 0 or now - upload.started >= older_than
    reason = f"an upload that began {_ago(now - upload.started)} ago" + ("" if removable else " and may go on")
    directory, inner = _split(upload.path)
    return Orphan(what="upload", place=Place(directory), id=id_of(inner), upload=upload, removable=removable, reason=reason)


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
        if orphan.id is not None and any(id_of(_split(e.path)[1]) == orphan.id for e in stage):
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
