"""Clearing away a save that was never committed, while it may be committed after all; and the links that nothing reaches through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import CkptError, ConflictError, CorruptError, NoSpaceError, NotFoundError, StorageError
from ckpt.formats.native.datafiles.references import UP, owner_of, split_url
from ckpt.io_backends.registry import open_backend

from .catalog import read_record
from .commit import COMMIT_PATH, CommitRecord
from .paths import CLEARING, data_prefix, index_path, others_files

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

log = logging.getLogger("ckpt")

# Why clearing and committing cannot both go wrong
#
# A clean-up cannot know whether a save is dead, and looking and removing are two steps. So are looking and committing. Each side first
# writes what the other will look for, and looks then:
#
#        who clears                                     who commits
#     1  put the mark index-<id>/clearing               put checkpoint.json
#     2  read checkpoint.json: committed? then stop     list files and marks: all there, no mark? then it is committed
#     3  remove files, the mark as long as it is there  else take the record back, and raise
#
# Whatever the order in time, the later of the two puts comes before its own look, so at least one side sees the other. Both may: then
# the commit is taken back though the clearing stops, and the save raises; nobody has relied on it yet. A copy or a conversion that is
# resumed under the same id takes the mark away first (``resume``), and a clearing that still runs stops before its next files.

_TRIES = 4
BATCH = 256
"""Files that go at once."""
_HINT = "the URL must be on storage that all ranks share; if it is, `ckpt gc` or somebody else removes files there: try again"


class BaseFiles(NamedTuple):
    """The checkpoint that has all files which a save refers to, itself or by references: its name in the run and its id; and the sizes of
    these files, by path."""

    name: str
    id: str
    sizes: Mapping[str, int]


def check_no_link(backend: Backend) -> None:
    """That the root of ``backend`` is where a checkpoint may be written, replaced or tagged."""
    target = backend.link()
    if target is not None:
        raise ConflictError(
            f"this is a symbolic link to {target}; nothing is written or replaced through a link",
            where=backend.url,
            hint=f"name {target} itself, or remove the link first",
        )


def check_free(backend: Backend, what: str) -> None:
    """That nothing but what is left of saves and copies is at the root of ``backend``, where no checkpoint is; ``what`` comes there."""
    others = others_files(backend)
    if others:
        hint = f"{what} to another URL, such as a new directory in this one"
        raise ConflictError(f"something is there already: {', '.join(others[:5])}", where=backend.url, hint=hint)


def check_there(backend: Backend, id: str, sizes: Mapping[str, int], base: BaseFiles | None = None) -> None:
    """That a save has all of its files, by path and size in bytes, and that nobody is clearing it away; and that the checkpoint is there
    whose files it refers to, with these files."""
    problem = _problem(backend, id, sizes, _listed(backend, id, sizes)[0], base)
    if problem is None and base is not None:
        problem = _reference_problem(backend, base)
    if problem is not None:
        raise problem


def confirm(backend: Backend, id: str, sizes: Mapping[str, int], previous: bytes | None, base: BaseFiles | None = None) -> list[str] | None:
    """That what was just committed has all of its files, or was replaced by another save since. If it has not, ``previous`` is committed
    again, or nothing is. Gives the paths of everything that is there, if it took a look at everything."""
    try:
        there, everything = _listed(backend, id, sizes)
        problem = _problem(backend, id, sizes, there, base)
        if problem is None:
            return list(there) if everything else None
        record = read_record(backend)
    except (StorageError, CorruptError) as err:  # no sign that anything is missing
        log.warning("%s is committed, but nobody could look whether its files are all there: %s", backend.url, err)
        return None
    while record is not None:
        if CommitRecord.from_bytes(record, backend.url).id != id:
            return None
        try:
            _take_back(backend, record, previous)
            break
        except ConflictError:  # another save is committed by now, or this one was tagged
            record = read_record(backend)
        except CkptError as err:
            log.error("%s lacks files, and its commit record could not be taken back: %s", backend.url, err)
            break
    raise problem


def _listed(backend: Backend, id: str, sizes: Mapping[str, int]) -> tuple[dict[str, int], bool]:
    """Sizes by path of what is there of a save, and whether that is all that is there: where every listing is a request, one does."""
    starts = (data_prefix(id), index_path(id, ""))
    everything = bool(backend.io_hints.coalesce_gap) or not all(path.startswith(starts) for path in sizes)
    return {e.path: e.size for prefix in ([""] if everything else starts) for e in backend.list_prefix(prefix)}, everything


def _problem(backend: Backend, id: str, sizes: Mapping[str, int], there: Mapping[str, int], base: BaseFiles | None) -> StorageError | None:
    lost = sorted(path for path, size in sizes.items() if there.get(path) != size)
    if lost:
        message = (
            f"{len(lost)} of {len(sizes)} files are not there, or not whole, as the process that commits sees it; the first is {lost[0]}: "
            f"{there.get(lost[0], 'no')} of {sizes[lost[0]]} bytes"
        )
        return StorageError(message, where=backend.url, hint=_HINT)
    if index_path(id, CLEARING) in there:
        hint = "look for a `ckpt gc`, or another copy of it, that runs there, and try again"
        return StorageError("somebody is clearing this save away", where=backend.url, hint=hint)
    return None if base is None else _base_problem(backend, base.name, base.id)


def _base_problem(backend: Backend, name: str, id: str) -> StorageError | None:
    """Why the files of a base cannot be referred to."""
    # Who removes a checkpoint takes its record away first, and looks then who refers to its files. Who commits a
    # reference publishes the record first, and looks here then: so at least one of the two sees the other.
    run = open_backend(split_url(backend)[0])
    data = read_record(run, f"{name}/")
    if data is not None and CommitRecord.from_bytes(data, f"{run.url}/{name}").id == id:
        return None
    what = "removed" if data is None else "replaced by another save"
    return ConflictError(
        f"the base {name}, which has tensors of this save, was {what} meanwhile", where=backend.url, hint="save again, without a base"
    )


def _reference_problem(backend: Backend, base: BaseFiles) -> StorageError | None:
    """Which of these files are not there, whatever the record of the base says: somebody has deleted a directory by hand, or the base was
    copied away and back, and has files of its own by now. A process that remembers the base has read nothing of it."""
    run = open_backend(split_url(backend)[0])
    # ../step-1/data/<id>-00000.safetensors: one listing for each checkpoint that has some.
    prefixes = sorted({f"{owner_of(path)}/data/" for path in base.sizes})
    there = {f"{UP}{e.path}": e.size for prefix in prefixes for e in run.list_prefix(prefix)}
    lost = sorted(path for path, size in base.sizes.items() if there.get(path) != size)
    if not lost:
        return None
    message = (
        f"{len(lost)} of {len(base.sizes)} files that have tensors of this save, by way of the base {base.name}, are not there any more, "
        f"or not whole; the first is {lost[0]}: {there.get(lost[0], 'no')} of {base.sizes[lost[0]]} bytes"
    )
    hint = "save again, without a base; `ckpt verify` shows which other checkpoints lack files"
    return ConflictError(message, where=backend.url, hint=hint)


def _take_back(backend: Backend, record: bytes, previous: bytes | None) -> None:
    if previous is not None:
        backend.put_if(COMMIT_PATH, previous, expected=record)
    else:
        backend.delete(COMMIT_PATH)


def claim(backend: Backend, id: str) -> None:
    """Mark save ``id``, whose files are about to be removed and copied again: another copy of it cannot be committed before ``resume``."""
    mark = index_path(id, CLEARING)
    mine = True
    try:
        backend.put_if(mark, b"", expected=None)
    except ConflictError:
        mine = False
    data = read_record(backend)
    if data is None or CommitRecord.from_bytes(data, backend.url).id != id:
        return
    if mine:
        backend.delete(mark)
    message = "another copy of this checkpoint was committed here meanwhile"
    raise ConflictError(message, where=backend.url, hint="copy again: that compares the files that are there, and copies what is missing")


def resume(backend: Backend, id: str) -> None:
    """Take away the mark that a clearing of save ``id`` left when it was killed: a copy or a conversion of this id goes on now. A clearing
    that still goes on stops before its next files."""
    backend.delete(index_path(id, CLEARING))


def clear(backend: Backend, id: str, within: str, paths: Sequence[str], committed: Callable[[], str | None]) -> bool:
    """Remove files of save ``id`` below ``within`` (empty or ending in a slash), unless ``committed`` or going on; whether all went."""
    mark = f"{within}{index_path(id, CLEARING)}"
    # ``marked``: the mark is there, whoever put it. ``mine``: this process put it, and so removes it in any case.
    marked = mine = True
    for tries_left in reversed(range(_TRIES)):
        try:
            backend.put_if(mark, b"", expected=None)
        except ConflictError:
            mine = False  # somebody else's does as well
        except NoSpaceError:
            marked = False  # a save can hardly publish a record either; but others may have a quota of their own
        except StorageError:
            # Another clearing ends at this moment, and removes the directory in which the mark is put.
            if not any(is_there(backend, path) for path in paths):
                return True
            if not tries_left:
                raise
            continue
        break
    went = committed() != id
    going = [path for path in paths if path != mark]
    for at in range(0, len(going), BATCH):
        # The mark is looked for before each batch, since ``resume`` may have taken it away: then the save goes on, and
        # what is left of it is needed.
        went = went and (is_there(backend, mark) if marked else committed() != id)
        if not went:
            break
        backend.delete_many(going[at : at + BATCH])
    if mine or went:  # while the save is there, somebody else's mark says that they may be about to remove a file
        backend.delete(mark)
    return went


def is_there(backend: Backend, path: str) -> bool:
    """Whether there is such an object."""
    try:
        backend.size(path)
    except NotFoundError:
        return False
    return True
