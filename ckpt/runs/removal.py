"""Removing checkpoints of a run, and who uses the bytes of which: what others need stays. No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType

from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError, NotCommittedError, UsageError
from ckpt.formats.native.clearing import clear, referred_files
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, moment_of, read_record
from ckpt.formats.native.paths import id_of, split_url
from ckpt.formats.native.virtual import MARKS
from ckpt.formats.native.writer import committed_id
from ckpt.formats.registry import find_format
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend, real_url
from ckpt.policies import StepInfo

from .members import joint_uses
from .step_listing import Step, directory_name, list_steps, look, none_here

# Removing checkpoints: a checkpoint exists as long as its commit record does, so that goes first, and its files after it.

_TOGETHER = 32
"""Checkpoints that are looked at, or hidden, at once."""

# How many go together, and why nothing is lost
#
#   look     the record of each, and all of its files; who refers to them? Who is referred to stays, and so does what was replaced
#   hide     the record of each goes, if it still is the same: from here on it does not exist
#   look     who refers to their files now? A save that refers to one publishes its own record first, and looks then whether the record of
#            what it refers to is there (``clearing``): so at least one of the two sees the other. Who is referred to gets its record back,
#            and so does whatever that one refers to
#   files    all of them, many at once
#
# The two looks at the others cost a listing of the run each. They are of all that go together, so that a removal of many steps costs what
# the steps cost, and not their square. Stopped anywhere, a removal leaves whole checkpoints or orphans, and files that others refer to are
# no orphans: so it does not matter in which order records go.


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What is in the directory ``within`` (empty, or ending in a slash), which is no link. With ``id`` and ``tags``, those that it had when
    somebody decided: it stays if it has others now. ``users``: directories of those among the same removals that use its files, which come
    before it: it stays if one of them does."""

    within: str = ""
    id: str | None = None
    tags: Collection[str] = ()
    users: Collection[str] = ()


Referrers = Callable[[], Mapping[str, Collection[str]]]
"""Gives, by directory, the names of those that refer to files there, or may do so, at this moment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Going:
    """What is there. ``data``: the record; ``last``: the save that it commits."""

    removal: Removal
    data: bytes | None
    last: str | None
    may_be_referred_to: bool
    saves: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.removal.within.rstrip("/")


def remove_checkpoints(backend: Backend, removals: Sequence[Removal], referrers: Referrers = dict) -> set[str]:
    """Remove checkpoints, or what saves left there: first the commit records, then the files, of older saves too. Gives their directories.

    Stopped anywhere, it leaves whole checkpoints or orphans. Files that are not of this format stay, and so do those of a save that began
    later. An absent checkpoint is no error. What others refer to stays.
    """
    going = _without_used(removals, filter(None, map_tasks(partial(_look, backend), removals, _TOGETHER, "ckpt-remove")))
    ask = any(seen.may_be_referred_to for seen in going)
    if ask:
        with suppress(CkptError):  # what cannot be read may be its own index, which nobody reads without the record
            names = {seen.name for seen in going}
            going = _without_referred(backend, removals, going, referrers(), but=names)
    hidden: list[_Going] = []
    try:
        map_tasks(partial(_hide, backend, hidden), going, _TOGETHER, "ckpt-remove")
        referred = referrers() if ask else {}
    except BaseException:
        _restore(backend, hidden)
        raise
    gone = _without_referred(backend, removals, _without_used(removals, hidden), referred)
    _restore(backend, set(hidden).difference(gone))
    backend.delete_many([path for seen in gone for path in seen.saves.get(seen.last or "", ())])
    for seen in gone:
        for save, paths in seen.saves.items():
            if save != seen.last:
                clear(backend, save, seen.removal.within, paths, partial(committed_id, backend, seen.removal.within))
    return {seen.removal.within for seen in gone}


def remove_checkpoint(
    backend: Backend,
    within: str = "",
    *,
    id: str | None = None,
    tags: Collection[str] = (),
    referrers: Callable[[], Collection[str]] = tuple,
) -> bool:
    """``remove_checkpoints``, of one; ``referrers`` gives the names of those that refer to it. Whether it was removed."""
    return bool(remove_checkpoints(backend, [Removal(within=within, id=id, tags=tags)], lambda: {within: referrers()}))


def _look(backend: Backend, removal: Removal) -> _Going | None:
    """What is there; None if it is not what somebody decided about."""
    within = removal.within
    data = read_record(backend, within)
    last, may_be_referred_to = None, True  # files without a record that can be read may be what others refer to all the same
    if data is None and removal.id is not None:
        return None  # somebody else removes it
    if data is not None:
        with suppress(CorruptError, FormatError):  # then whoever removes it knows
            record = CommitRecord.from_bytes(data, _where(backend, within))
            last, may_be_referred_to = record.id, record.reusable
            if removal.id is not None and (record.id != removal.id or set(record.tags) != set(removal.tags)):
                return None
    saves: dict[str, list[str]] = {}
    for entry in backend.list_prefix(within):
        save = id_of(entry.path.removeprefix(within))
        if save is not None and (last is None or save <= last):
            saves.setdefault(save, []).append(entry.path)
    # Of a save that was replaced, those files stay that others refer to.
    may_be_referred_to = may_be_referred_to or any(save != last for save in saves)
    return _Going(removal=removal, data=data, last=last, may_be_referred_to=may_be_referred_to, saves=saves)


def _hide(backend: Backend, hidden: list[_Going], seen: _Going) -> None:
    """Take the record away, unless another save has replaced it while this one was looked at."""
    within = seen.removal.within
    if read_record(backend, within) == seen.data:
        hidden.append(seen)  # first: an error may come after the effect
        if seen.data is not None:
            backend.delete(within + COMMIT_PATH)


def _restore(backend: Backend, hidden: Iterable[_Going]) -> None:
    """Put their records back, each of them whatever becomes of the others."""
    failed: CkptError | None = None
    for seen in hidden:
        try:
            if seen.data is not None:
                backend.put_if(seen.removal.within + COMMIT_PATH, seen.data, expected=None)
        except ConflictError:
            continue  # another save is committed there by now, or the record never went
        except CkptError as err:
            failed = failed or err
    if failed is not None:
        raise failed


def _without_used(removals: Sequence[Removal], going: Iterable[_Going]) -> list[_Going]:
    """Those that go, in their order, without what is used by one that stays."""
    by_place = {seen.removal.within: seen for seen in going}
    stays: set[str] = set()
    for removal in removals:
        if removal.within not in by_place or not stays.isdisjoint(removal.users):
            stays.add(removal.within)
    return [by_place[r.within] for r in removals if r.within not in stays]


def _without_referred(
    backend: Backend,
    removals: Sequence[Removal],
    going: Iterable[_Going],
    referred: Mapping[str, Collection[str]],
    but: Collection[str] = (),
) -> list[_Going]:
    """The same without those that others refer to; ``but`` are no others, as long as they go themselves."""
    left: dict[str, _Going] = {}
    stays: set[str] = set()
    for seen in going:
        names = {name for name in referred.get(seen.removal.within, ()) if name not in but or name in stays}
        if names and seen.may_be_referred_to:
            log.warning("%s stays, since %s refers to its data files", _where(backend, seen.removal.within), ", ".join(sorted(names)))
            stays.add(seen.name)
        else:
            left[seen.removal.within] = seen
    return _without_used(removals, left.values())


def _where(backend: Backend, within: str) -> str:
    return f"{backend.url.rstrip('/')}/{within}{COMMIT_PATH}"


log = logging.getLogger("ckpt")

_BATCH = 100_000
"""Files of the steps that are removed together, about: their paths are in memory at once, and the run is listed twice for each batch."""
_BESIDE = 8
"""Files of a checkpoint beside those of its ranks."""
_NAMED = 5
_warned = set[str]()
"""Runs of which was said that steps stay which somebody else changed: two jobs that remove checkpoints of one run meet at each step."""
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
        for step in batch:
            if step.url in gone and (step.members or step.prepared):
                _remove_members(root, step)
        stayed |= {step.number for step in batch if step.url not in gone}
    return removed


def _remove_members(root: Backend, step: Step) -> None:
    """What a step of several jobs has beside its record: the marks of its members, and the checkpoint of each."""
    name = directory_name(step)
    marks = [entry.path for entry in root.list_prefix(f"{name}/{MARKS}/")]
    root.delete_many(marks)
    # A member that saw the marks and no record may have put that once more. Who puts it from here on sees that there are none.
    late = None if (data := read_record(root, f"{name}/")) is None else CommitRecord.from_bytes(data, _where(root, f"{name}/"))
    if late is not None and any(path.startswith(f"{name}/{MARKS}/{late.generation}/") for path in marks):
        root.delete(f"{name}/{COMMIT_PATH}")
    root.delete_many([f"{name}/{MARKS}/{_NOTHING}", f"{name}/{_NOTHING}"])
    for path, id in step.members.values():
        run = join_url(root.url, path.rpartition("/")[0])
        remove_steps(run, [s for s in list_steps(run) if s.id == id], {})


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
    stay = [directory_name(step) for step in batch if f"{directory_name(step)}/" not in gone]
    if stay:
        named = ", ".join(stay[:_NAMED]) + (f" and {len(stay) - _NAMED} more" if len(stay) > _NAMED else "")
        message = "%s: %s: replaced, removed, tagged or referred to meanwhile, perhaps by another job; what is there stays"
        log.log(logging.INFO if root.url in _warned else logging.WARNING, message, root.url, named)
        _warned.add(root.url)
    return {step.url for step in batch if f"{directory_name(step)}/" in gone}


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
    # The checkpoint behind it stays, but references go by the name: somebody may have moved a base away and left a link in its place.
    needed_by = referred_files(open_backend(join_url(root.url, name)))
    if needed_by.names():
        log.warning("the link %s/%s stays: %s", root.url, name, needed_by.text())
        return False
    root.delete(name)
    log.info("the link %s/%s is removed; %s, where it led, stays", root.url, name, target)
    return True


def infos(steps: Sequence[Step], *, bases: bool = True, joint: Mapping[str, str] = MappingProxyType({})) -> list[StepInfo]:
    """What keeping policies know of the checkpoints of a run; those without a step number are left out. ``bases``: whether what lies below
    parts of a state is here, so that it has to stay. ``joint``: what ``joint_uses`` gives.

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
                    *(f"used by {directory_name(v)}" for v in (*using.get(s.url, ()), *over.get(s.url, ())) if v.number is None),
                    *(f"{directory_name(u)} may use it: its record or index cannot be read" for u in unsure if u is not s and s.reusable),
                    *([f"used by {joint[s.id]}"] if s.id is not None and s.id in joint else ()),
                ]
            ),
            referred_by=tuple(v.number for v in using.get(s.url, ()) if v.number is not None),
            base_of=tuple(v.number for v in over.get(s.url, ()) if v.number is not None),
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
        has = "may have" if any(s.number is None for s in (step, *parts)) else "has"
        names = (directory_name(s) if s.number is None else f"step {s.number}" for s in parts)
        reasons.append(f"it {has} the rest of the state of {', '.join(names)}, saved in part")
    return reasons


def _parts(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The URL of a whole checkpoint → the steps after it, up to the next whole one, that are parts: with it a restart has all of the
    state. A part that so has no base may need any whole one without a number; without a number itself, also the one saved last before."""
    over: dict[str, dict[str, Step]] = {}
    numbered = sorted(((s.number, s) for s in steps if s.committed and s.number is not None), key=lambda item: item[0])
    live = [item for item in numbered if item[1].abandoned is None]
    for branch in (numbered, live) if len(live) < len(numbered) else (live,):
        base: Step | None = None
        for _, s in branch:
            if s.part is None:
                base = s
            elif base is not None:
                over.setdefault(base.url, {})[s.url] = s
    based = set().union(*over.values())
    for s in steps:
        if s.committed and s.part is not None and s.url not in based:
            whole = [w for w in steps if w.committed and w.part is None]
            before = [w for w in whole if s.number is None and (w.id or "") < (s.id or "")]
            for w in [w for w in whole if w.number is None] + sorted(before, key=lambda w: w.id or "")[-1:]:
                over.setdefault(w.url, {})[s.url] = s
    return {url: [*parts.values()] for url, parts in over.items()}


def _users(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The URL of a step → the checkpoints among ``steps`` that use its files: virtual ones, and those with references; under whatever
    name."""
    # Each step has few places (its directory, or where links lead), so these are looked up, and what grows is steps + sources.
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


# Removing one checkpoint that somebody names, by the rules of a run's retention: what is tagged, or used by others, stays. No torch.


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRemoval:
    """A checkpoint that may go. ``run``: the URL of the directory that it lies in; None if it lies in none, or is a symbolic link, of which
    only the link goes."""

    step: Step
    run: str | None

    def remove(self) -> None:
        """Remove it, and its directory if nothing else is in it."""
        if self.run is None:
            remove_at(self.step.url)
        elif not remove_steps(self.run, [self.step], {}):
            message = "it was replaced, removed, tagged or referred to meanwhile; what is there stays"
            raise ConflictError(message, where=self.step.url, hint="look at it with `ckpt ls`, and decide anew")


def named_removal(url: str) -> NamedRemoval:
    """The checkpoint at ``url``. Only looks."""
    backend = open_backend(url)
    step, names = look(backend, url)
    if step is None:
        raise _no_checkpoint(url, has_directories=bool(names))
    try:
        run, _ = split_url(backend)
    except UsageError:
        run = None
    if not step.committed and not step.damaged:
        hint = f"if it was killed: `ckpt gc {run or 'ROOT'} --yes` removes its files after a day, with --older-than 0 at once"
        raise NotCommittedError("no checkpoint is committed here: a save did not finish, or is in progress", where=url, hint=hint)
    if step.link is not None:
        return NamedRemoval(step=step, run=None)
    if step.tags:
        hint = f"take the tags away first: ckpt tag -d {url} {' '.join(step.tags)}"
        raise ConflictError(f"it is tagged: {', '.join(step.tags)}", where=url, hint=hint)
    steps = list_steps(run) if run is not None else []
    here = next((s for s in steps if directory_name(s) == directory_name(step)), None)
    if here is None:  # the directory above is a checkpoint itself, or nothing
        used = [text] if (text := referred_files(backend).text()) else []
    else:
        used = uses(here, steps)
        if run is not None and here.id is not None and (user := joint_uses(run, steps).get(here.id)) is not None:
            used.append(f"it is a part of {user}")
    if used:
        hint = "remove these first, or make copies of them that need no other: `ckpt cp`"
        raise ConflictError(f"it has to stay: {'; '.join(used)}", where=url, hint=hint)
    return NamedRemoval(step=here or step, run=run if here is not None else None)


def _no_checkpoint(url: str, *, has_directories: bool) -> Exception:
    format = find_format(url)
    if format is not None:
        hint = "remove its files yourself"
        return FormatError(f"only checkpoints of ckpt's own format are removed; this is {format}", where=url, hint=hint)
    if has_directories and any(s.committed or s.damaged for s in list_steps(url)):
        return UsageError("this is a run, not a checkpoint", where=url, hint=f"name one of its checkpoints, or use `ckpt gc {url}`")
    return none_here(url)
