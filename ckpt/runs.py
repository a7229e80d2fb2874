"""Which steps a run holds: a listing of checkpoints by their commit records. No torch, and no index is opened.

A checkpoint counts as committed only if its commit record is there and can be believed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone

from ckpt.formats.conversion import CONVERTING
from ckpt.formats.native.catalog import read_index_file
from ckpt.formats.native.commit import COMMIT_PATH, VIRTUAL, CommitRecord
from ckpt.formats.native.extents import decode_sources
from ckpt.formats.native.paths import SOURCES, has_debris
from ckpt.formats.native.writer import remove_checkpoint
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import absolute_url, join_url, open_backend

from .errors import CorruptError, FormatError, NotFoundError
from .policies import StepInfo

log = logging.getLogger("ckpt")

UNFINISHED = "no commit record: the save did not finish, or is still going on"
UNCONVERTED = "a conversion did not finish: the same `ckpt convert` goes on"

_NUMBER = re.compile(r"(?:(?:^|.*[-_=.])(?:step|iter|checkpoint|ckpt)[-_=]?)?(\d+)")
_LISTING_THREADS = 8
_LOOKED_INTO, _NAMED = 32, 4
_LONG_AGO = datetime.fromtimestamp(0, timezone.utc)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One checkpoint of a run, or what is left of a save that did not finish."""

    number: int | None
    """From the directory's name; None if that does not end in a step number."""
    url: str
    committed: bool
    damaged: bool = False
    """There is a commit record, but it is damaged or of a version that this software does not know. Not debris: never collect it."""
    created: str | None = None
    """UTC, ISO 8601; like ``tensor_bytes`` and ``world_size`` it is None unless committed."""
    tensor_bytes: int | None = None
    world_size: int | None = None
    reason: str | None = None
    """Why it is not committed; None if it is."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    id: str | None = None
    """Of the save: a copy has the same. Ids of later saves sort after it. None unless committed."""
    sources: tuple[str, ...] = ()
    """Of a virtual checkpoint: where the files are that it points into, as absolute URLs or paths."""


def step_number(name: str) -> int | None:
    """The step in a directory name such as ``step-00001000``, ``step_100``, ``global_step100`` or ``100``; None if there is none."""
    found = _NUMBER.fullmatch(name.strip("/"))
    return int(found[1]) if found else None


def list_steps(root_url: str) -> list[Step]:
    """The checkpoint at ``root_url`` itself, else those in the directories right below it; the highest step last, unnumbered ones first.

    Directories that hold neither a commit record nor the files of a save are left out. An absent root gives an empty list.

    Raises:
        StorageError: the storage cannot be read. A damaged commit record is not raised: its step says so.
    """
    backend = open_backend(root_url)
    here = backend.children("")
    itself = _step(backend, "", root_url) if _is_of_checkpoint(here) else None
    if itself is not None:
        return [itself]
    names = [name.rstrip("/") for name in here if name.endswith("/")]
    with ThreadPoolExecutor(max(_LISTING_THREADS, backend.grain.calls)) as pool:
        found = pool.map(lambda name: _step(backend, f"{name}/", join_url(root_url, name)), names)
        steps = [step for step in found if step is not None]
    return sorted(steps, key=lambda s: (s.number is not None, s.number or 0, s.url))


def _is_of_checkpoint(names: Sequence[str]) -> bool:
    """Whether one of these names is of a checkpoint, or of what is left of a save: else there is nothing to read beside them."""
    return any(name in (COMMIT_PATH, "data/") or name.startswith("index-") for name in names)


def runs_below(url: str) -> list[str]:
    """URLs of directories right below ``url`` that hold checkpoints themselves: where somebody meant who named the directory above. Of
    many directories only the first are looked at.

    Raises:
        StorageError: the storage cannot be read.
    """
    names = [name.rstrip("/") for name in open_backend(url).children("") if name.endswith("/")]
    below = [join_url(url, name) for name in names[:_LOOKED_INTO]]
    return [run for run in below if any(s.committed or s.damaged for s in list_steps(run))]


def none_here(url: str) -> NotFoundError:
    """That there is no checkpoint at ``url`` nor right below, with the runs further below."""
    runs = runs_below(url)
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    hint = f"below it are runs: {', '.join(runs[:_NAMED])}{more}" if runs else "name the directory that holds the steps"
    return NotFoundError("no checkpoint here, and none in a directory below", where=url, hint=hint)


def remove_step(root_url: str, step: Step) -> None:
    """Remove a checkpoint of a run, or what a save left there, and the directory if nothing else is in it.

    Stopped anywhere, it leaves a whole checkpoint or debris. A checkpoint that was replaced or tagged since it was listed stays.

    Raises:
        StorageError: the storage refuses.
    """
    if not remove_checkpoint(open_backend(step.url), id=step.id, tags=step.tags):
        log.warning("%s was replaced or tagged meanwhile, and stays", step.url)
        return
    if step.url != root_url:  # there is nothing to delete any more, but the root's backend removes directories below it that are empty
        open_backend(root_url).delete(f"{step.url.rstrip('/').rpartition('/')[2]}/{COMMIT_PATH}")


def infos(steps: Sequence[Step]) -> list[StepInfo]:
    """What keeping policies know of the checkpoints of a run; those without a step number are left out.

    What a virtual checkpoint of the run points into is referred to by it; if that has no step number, it counts as a tag.
    """
    found = []
    for s in steps:
        if s.number is None:
            continue
        users = [v for v in steps if v is not s and any(_lies_in(source, s.url) for source in v.sources)]
        nameless = {f"used by {v.url.rstrip('/').rpartition('/')[2]}" for v in users if v.number is None}
        found.append(
            StepInfo(
                step=s.number,
                created=datetime.fromisoformat(s.created.replace("Z", "+00:00")) if s.created else _LONG_AGO,
                metrics=dict(s.metrics),
                tags=frozenset(s.tags) | nameless,
                referred_by=tuple(v.number for v in users if v.number is not None),
                committed=s.committed,
            )
        )
    return found


def _lies_in(source: str, url: str) -> bool:
    place = absolute_url(url).rstrip("/")
    return source.rstrip("/") == place or source.startswith(f"{place}/")


def _step(backend: Backend, prefix: str, url: str) -> Step | None:
    """What lies below ``prefix`` (empty, or ending in a slash); None if it is no checkpoint and no part of one."""
    number = step_number(url.rstrip("/").rpartition("/")[2])
    try:
        record = CommitRecord.from_bytes(backend.read(prefix + COMMIT_PATH), url)
        sources = _sources(record, url)
    except NotFoundError:
        if not has_debris(backend, prefix):
            return None
        reason = UNCONVERTED if CONVERTING in backend.children(prefix) else UNFINISHED
        return Step(number=number, url=url, committed=False, reason=reason)
    except (CorruptError, FormatError) as err:
        return Step(number=number, url=url, committed=False, damaged=True, reason=err.message)
    return Step(
        number=number,
        url=url,
        committed=True,
        created=record.created,
        tensor_bytes=record.tensor_bytes,
        world_size=record.world_size,
        metrics=record.metrics,
        tags=record.tags,
        id=record.id,
        sources=sources,
    )


def _sources(record: CommitRecord, url: str) -> tuple[str, ...]:
    if VIRTUAL not in record.features:
        return ()
    data = read_index_file(open_backend(url), record, SOURCES)
    return tuple({source.root: None for source in decode_sources(data, url)})
