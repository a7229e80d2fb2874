"""Removing checkpoints of a run, and who uses the bytes of which: what others need stays. No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial

from ckpt.errors import ConflictError
from ckpt.formats.native.commit import moment_of
from ckpt.formats.native.datafiles.referrers import referred_files
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend, real_url
from ckpt.policies import StepInfo

from .checkpoint_removal import Referrers, Removal, remove_checkpoint, remove_checkpoints
from .step_listing import Step, directory_name, list_steps

log = logging.getLogger("ckpt")

_BATCH = 100_000
"""Files of the steps that are removed together, about: their paths are in memory at once, and the run is listed twice for each batch."""
_BESIDE = 8
"""Files of a checkpoint beside those of its ranks."""
_NOTHING = ".removed"
"""No file has this name: to delete it removes directories that are empty."""
_LONG_AGO = datetime.fromtimestamp(0, timezone.utc)


def remove_steps(
    root_url: str,
    steps: Iterable[Step],
    referrers: Mapping[int, Collection[int]],
    busy: str | None = None,
    relist: Callable[[], Sequence[Step]] | None = None,
) -> list[Step]:
    """Remove checkpoints of a run, or what saves left there, each after those that use its bytes, and give those that are gone; and the
    directory if nothing else is in it. Of a link only the link goes. Stopped anywhere, it leaves whole checkpoints or orphans.

    ``referrers``: which steps use the bytes of a step. One that was replaced or tagged since it was listed stays, like that of the id or
    URL ``busy``, and one whose data files another one refers to; and so does what they use. ``relist`` lists the run once more, for what
    refers to a step since; ``list_steps`` by default.
    """
    relist = partial(list_steps, root_url) if relist is None else relist
    root = open_backend(root_url)
    left, removed, stayed = deque(steps), list[Step](), set[int | None]()
    while left:
        batch: list[Step] = []
        files = 0
        while left and files < _BATCH:
            step = left.popleft()
            files += _BESIDE + (step.world_size or 0)
            if not stayed.isdisjoint(referrers.get(step.number, ()) if step.number is not None else ()):
                log.warning("%s stays, since a checkpoint that uses it does", step.url)
                stayed.add(step.number)
            elif busy is not None and busy in (step.id, step.url):
                stayed.add(step.number)
            elif step.link is not None and batch:
                left.appendleft(step)
                break
            else:
                batch.append(step)
                if step.link is not None:  # by itself, in its turn
                    break
        gone = _remove_batch(root, batch, referrers, relist)
        removed += [step for step in batch if step.url in gone]
        stayed |= {step.number for step in batch if step.url not in gone}
    return removed


def _remove_batch(
    root: Backend, batch: Sequence[Step], referrers: Mapping[int, Collection[int]], relist: Callable[[], Sequence[Step]]
) -> set[str]:
    """Remove these together; the URLs of those that are gone."""
    directories = {step.number: f"{directory_name(step)}/" for step in batch}
    removals = [
        Removal(
            within=f"{directory_name(step)}/",
            id=step.id,
            tags=step.tags,
            users=[directories[n] for n in referrers.get(step.number, ()) if n in directories] if step.number is not None else (),
        )
        for step in batch
    ]
    gone = _remove_named(root, removals, partial(_referrers, batch, relist))
    for step in batch:
        if f"{directory_name(step)}/" not in gone:
            log.warning("%s was replaced, removed, tagged or referred to meanwhile: what is there stays", step.url)
    return {step.url for step in batch if f"{directory_name(step)}/" in gone}


def remove_step(root_url: str, step: Step, relist: Callable[[], Sequence[Step]] | None = None) -> bool:
    """``remove_steps``, of one. Whether it was removed."""
    return bool(remove_steps(root_url, [step], {}, relist=relist))


def _referrers(batch: Sequence[Step], relist: Callable[[], Sequence[Step]]) -> dict[str, list[str]]:
    """By directory, the names of the checkpoints of the run that use bytes of these steps now, or may do so."""
    steps = relist()
    now, using = {s.url: s for s in steps}, _users(steps)
    unsure = [s for s in steps if s.references_unknown]
    names = {}
    for step in batch:
        here = now.get(step.url, step)
        doubtful = [s for s in unsure if s.url != step.url] if here.reusable or not here.committed else []
        names[f"{directory_name(step)}/"] = [directory_name(user) for user in (*using.get(step.url, ()), *doubtful)]
    return names


def remove_at(url: str) -> None:
    """Remove the checkpoint at ``url``, and the directory if nothing else is in it. If it is a symbolic link, only the link goes."""
    here = open_backend(url)
    parent, _, name = here.url.rstrip("/").rpartition("/")
    if here.link() is None and not (parent and here.url.startswith("/")):
        # No link can come there, and what was said of this URL need not hold for the one above.
        removed = remove_checkpoint(here, referrers=lambda: referred_files(here).names())
    else:
        within = f"{name}/"
        removed = bool(_remove_named(open_backend(parent or "/"), [Removal(within=within)], lambda: {within: referred_files(here).names()}))
    if not removed:
        message = f"its data files have to stay: {referred_files(here).text()}"
        raise ConflictError(message, where=url, hint="remove these first, or make copies of them that need no other: `ckpt cp`")


def _remove_named(root: Backend, removals: Sequence[Removal], referrers: Referrers) -> set[str]:
    """Remove what is in these directories of a root, whose backend follows no link on the way to them. Gives those that are gone."""
    links = {r.within: target for r in removals if (target := root.link(r.within.rstrip("/"))) is not None}
    gone = remove_checkpoints(root, [r for r in removals if r.within not in links], referrers)
    root.delete_many([f"{within}{_NOTHING}" for within in gone])
    return gone | {within for within, target in links.items() if _remove_link(root, within.rstrip("/"), target)}


def _remove_link(root: Backend, name: str, target: str) -> bool:
    # The checkpoint behind it stays, but references go by the name: somebody may have moved a base away and left a
    # link in its place.
    needed_by = referred_files(open_backend(join_url(root.url, name)))
    if needed_by.names():
        log.warning("the link %s/%s stays: %s", root.url, name, needed_by.text())
        return False
    root.delete(name)
    log.info("the link %s/%s is removed; %s, where it led, stays", root.url, name, target)
    return True


def infos(steps: Sequence[Step], *, bases: bool = True) -> list[StepInfo]:
    """What keeping policies know of the checkpoints of a run; those without a step number are left out. ``bases``: whether what lies below
    parts of a state is here, so that it has to stay.

    What a virtual checkpoint of the run points into is referred to by it; if that has no step number, it counts as a tag. So does one
    of which nobody can say what it refers to: it keeps all that others may refer to.
    """
    using = _users(steps)
    over = _parts(steps) if bases else {}
    unsure = [s for s in steps if s.references_unknown]
    return [
        StepInfo(
            step=s.number,
            created=(moment_of(s.created) if s.created else None) or _LONG_AGO,
            metrics=dict(s.metrics),
            tags=frozenset(
                [
                    *s.tags,
                    *(f"used by {directory_name(v)}" for v in using.get(s.url, ()) if v.number is None),
                    *(f"{directory_name(u)} may use it: its record or index cannot be read" for u in unsure if u is not s and s.reusable),
                ]
            ),
            referred_by=tuple(v.number for v in using.get(s.url, ()) if v.number is not None),
            base_of=tuple(over.get(s.url, ())),
            committed=s.committed,
            abandoned=s.abandoned is not None,
        )
        for s in steps
        if s.number is not None
    ]


def uses(step: Step, steps: Sequence[Step]) -> list[str]:
    """Why a checkpoint of the run has to stay because of others of ``steps``, in words; empty if nobody needs it."""
    users = [directory_name(user) for user in _users(steps).get(step.url, ())]
    reasons = [f"{', '.join(users)} {'refers' if len(users) == 1 else 'refer'} to it"] if users else []
    reasons += [
        f"{directory_name(s)} may use it: its record or index cannot be read"
        for s in steps
        if s.references_unknown and s.url != step.url and (step.reusable or not step.committed)
    ]
    parts = _parts(steps).get(step.url, ())
    if parts:
        reasons.append(f"it has the rest of the state of {', '.join(f'step {n}' for n in parts)}, saved in part")
    return reasons


def _parts(steps: Sequence[Step]) -> dict[str, list[int]]:
    """The URL of a whole checkpoint → the steps after it, up to the next whole one, that are parts: with it a restart has all of the
    state."""
    over: dict[str, list[int]] = {}
    numbered = sorted(((s.number, s) for s in steps if s.committed and s.number is not None), key=lambda item: item[0])
    live = [item for item in numbered if item[1].abandoned is None]
    for branch in (numbered, live) if len(live) < len(numbered) else (live,):
        base: Step | None = None
        for number, s in branch:
            if s.part is None:
                base = s
            elif base is not None and number not in over.setdefault(base.url, []):
                over[base.url].append(number)
    return over


def _users(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The URL of a step → the checkpoints among ``steps`` that use its files: virtual ones, and those with references; under whatever
    name."""
    # Each step has few places (its directory, or where links lead), so these are looked up, and what grows is steps +
    # sources.
    with_sources = [v for v in steps if v.sources]
    if not with_sources or len(steps) < 2:
        return {}
    owners: dict[str, list[Step]] = {}
    real: dict[str, str] = {}
    for s in steps:
        root, _, name = s.url.rstrip("/").rpartition("/")
        if s.link is not None or s.also:
            places = {real_url(url) for url in (s.url, *(join_url(root, other) for other in s.also))}
        else:
            if root not in real:
                real[root] = real_url(root) if root else ""
            places = {f"{real[root].rstrip('/')}/{name}"}
        for place in places:
            owners.setdefault(place, []).append(s)
    using: dict[str, list[Step]] = {}
    for v in with_sources:
        sources = {real_url(url) for url in v.sources}
        pointed = {s.url: None for source in sources for place in _upwards(source) for s in owners.get(place, ()) if s is not v}
        for url in pointed:
            using.setdefault(url, []).append(v)
    return using


def _upwards(url: str) -> Iterator[str]:
    """A place and all above it."""
    while url:
        yield url
        url = url.rpartition("/")[0]
