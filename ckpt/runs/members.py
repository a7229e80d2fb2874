"""What the members of a joint run (``joint``) write for each other: the generation, their marks, a joint record. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from ckpt.errors import AccessError, CorruptError, FormatError, NotFoundError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH, WRITER, Branches, CommitRecord, MemberCheckpoint, read_record
from ckpt.formats.native.paths import is_there, split_url, step_number
from ckpt.formats.native.virtual import GENERATION_LIMIT, GENERATION_PATH, MARKS
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.net.wire import check, decoded, encoded, kind_of
from ckpt.text import parse_object

from .step_listing import Step, directory_name, in_order, read_steps, step_name

_FORMAT, _VERSION = "ckpt-joint", 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,63}")

T = TypeVar("T")
State = Literal["joined", "loaded", "ready"]


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """How far one member is with a restore. ``life`` tells its processes apart."""

    life: str
    state: State = "joined"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """``joint.json``: what the members of a run go on from. Until it is ``decided``, ``step`` says nothing."""

    id: str
    members: tuple[str, ...]
    joined: Mapping[str, Attendance] = field(default_factory=dict)
    decided: bool = False
    step: int | None = None
    checkpoints: Mapping[str, MemberCheckpoint] = field(default_factory=dict)
    """Of each member; one that is new has none."""
    branches: Branches = ()
    """Of what is saved from here on."""
    left: tuple[int, ...] = ()
    """Joint steps above ``step``: a save of one of them takes its place."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Id of a joint record → why a member could not load its part."""

    def to_bytes(self) -> bytes:
        values = {"format": _FORMAT, "version": _VERSION, "writer": WRITER, **encoded(self)}
        return json.dumps(values, indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Generation:
        try:
            values = parse_object(data)
            if values.get("format") != _FORMAT or values.get("version") != _VERSION:
                raise FormatError(
                    f"it is {values.get('format')!r} of version {values.get('version')!r}, not {_FORMAT} of version {_VERSION}",
                    where=where,
                    hint=f"read it with the release that wrote it: {values.get('writer')}",
                )
            check(values, kind_of(cls))
            generation: Generation = decoded(cls, values)
        except ValueError as err:
            hint = "delete it while no member runs: a restore writes it anew"
            raise CorruptError(f"the file is damaged: {err}", where=where, hint=hint) from err
        return generation


@dataclass(frozen=True, kw_only=True)
class MemberChanges:
    """How the members of a run differ from those that have saved the step from which it continues. ``added`` ones have no checkpoint there,
    ``dropped`` ones are left out, and ``renamed`` maps the name of a member to the one that it had."""

    added: Sequence[str] = field(default=(), hash=False)
    dropped: Sequence[str] = field(default=(), hash=False)
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class JointOutcome:
    """What became of a joint step. ``given_up`` says why it does not exist."""

    step: int
    url: str
    given_up: str | None = None


_MARK = re.compile(rf"({_NAME.pattern})-([0-9a-z]+)-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")


class Mark(NamedTuple):
    """That a member has committed its checkpoint ``id``, of so many ranks and bytes of tensors: the name of an empty object."""

    member: str
    id: str
    ranks: int
    nbytes: int

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def all_of(cls, names: Iterable[str]) -> list[Mark]:
        """Those that are among these names; another program's file is none."""
        matches = [_MARK.fullmatch(name) for name in names]
        return [cls(m[1], m[2], int(m[3]), int(m[4])) for m in matches if m is not None]


@dataclass(frozen=True, slots=True)
class Member:
    """One of several jobs that make up a run, for ``Checkpointer(member=...)``: ``ckpt.Member("trainer", of=("trainer", "buffer"))``.

    Args:
        name: of this job.
        of: the names of all members, the same everywhere. The first of them leads.

    Raises:
        UsageError: a name cannot be one, ``of`` names one twice, or lacks this one.
    """

    name: str
    of: Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", check_members(self.name, self.of))


def check_members(member: object, members: object) -> tuple[str, ...]:
    """The names of all members, if they can be names."""
    if isinstance(members, str) or not isinstance(members, Iterable):
        raise UsageError(f"Member(of=) is a list of names, not {members!r}", hint='ckpt.Member("trainer", of=("trainer", "buffer"))')
    names = tuple(members)
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == MARKS:
            raise UsageError(f"{name!r} cannot be the name of a member", hint="take letters, digits, dots and underscores")
    texts = tuple(str(name) for name in names)
    if len(set(texts)) < len(texts):
        raise UsageError(f"a member is there twice in {', '.join(texts)}")
    if member not in texts:
        raise UsageError(f"{member!r} is not among the members {', '.join(texts) or 'none'}", hint="of= names all of them, also this one")
    return texts


def member_path(member: str, n: int) -> str:
    """Where a member has its checkpoint of step ``n``, relative to the root of the run."""
    return f"{member}/{step_name(n)}"


def joint_steps(backend: Backend, root: str) -> list[Step]:
    """As ``list_steps`` gives them, without a look into the directories of the members."""
    names = [name.rstrip("/") for name in backend.list_dir("") if name.endswith("/")]
    return in_order(read_steps(backend, root, [name for name in names if step_number(name) is not None]).values())


def members_problem(backend: Backend, members: Mapping[str, MemberCheckpoint]) -> str | None:
    """Why a joint step of the run of ``backend`` cannot be loaded, as far as the records of its members say. What another release wrote is
    a FormatError."""
    for name, checkpoint in members.items():
        try:
            id = committed_id(backend, f"{checkpoint.path}/")
        except CorruptError as err:
            return f"the checkpoint of {name} is damaged: {err.message}"
        if id != checkpoint.id:
            return f"the checkpoint of {name} is {'gone' if id is None else 'another one'}: {checkpoint.path}"
    return None


def check_no_member(run: str) -> None:
    """Raise UsageError if a job that saves by itself would save to the directory of a member, whose steps are those of all members."""
    try:  # one request, and no listing of what may be thousands of other runs
        above, name = split_url(open_backend(run))
        backend = open_backend(above)
        values = parse_object(backend.read_whole(GENERATION_PATH, GENERATION_LIMIT))
        is_member = values["format"] == _FORMAT and name in values["members"]
    except (AccessError, NotFoundError, FormatError, CorruptError, ValueError, KeyError, TypeError):
        # Nothing lies above, or nobody may look there, such as a run at the top of a bucket; or what lies there is another program's file,
        # which keeps no job from saving. If it is damaged, whoever restores the run of several jobs says it.
        return
    if is_member:
        hint = f"Checkpointer({backend.url!r}, member=ckpt.Member({name!r}, of=...)), or another directory for a job of its own"
        raise UsageError("only a member of the run of several jobs saves to its directory", where=run, hint=hint)


def joint_uses(run: str, steps: Sequence[Step]) -> dict[str, str]:
    """Which of ``steps`` have to stay because ``run`` is that of a member: by id, what needs them. Empty for any other run."""
    try:
        above, member = split_url(open_backend(run))
        backend = open_backend(above)
        joint = joint_steps(backend, above)
        if not any(s.members for s in joint) and not is_there(backend, GENERATION_PATH):
            return {}
    except (UsageError, AccessError, NotFoundError):  # nothing lies above, or nobody may look there: such as a run at the top of a bucket
        return {}
    damaged = next((directory_name(s) for s in joint if s.damaged), None)
    uses = {} if damaged is None else {s.id: f"../{damaged}, whose record is damaged" for s in steps if s.id is not None}
    for s in joint:
        awaited = backend.list_prefix(f"{directory_name(s)}/{MARKS}/") if s.prepared else ()
        marks = Mark.all_of(entry.path.rpartition("/")[2] for entry in awaited)
        ids = [c.id for c in s.members.values() if c.path.startswith(f"{member}/")] + [m.id for m in marks if m.member == member]
        uses |= dict.fromkeys(ids, f"../{directory_name(s)}")
    return uses


def member_urls(url: str) -> dict[str, str]:
    """Member → its checkpoint, if ``url`` is a joint step; else empty."""
    record = _joint_record(url)
    run = url.rstrip("/").rpartition("/")[0]
    return {} if record is None else {name: join_url(run, checkpoint.path) for name, checkpoint in record.members.items()}


def member_url(url: str, member: str) -> str:
    """The checkpoint of one member of the joint step at ``url``."""
    urls = member_urls(url)
    if member not in urls:
        there = f"of {', '.join(urls)}" if urls else "of one job, or none"
        raise NotFoundError(f"member {member!r} has no part in this step: it is {there}", where=url, hint="`ckpt ls` shows the members")
    return urls[member]


def copy_joint(source: str, target: str, copy: Callable[[str, str], T], *, commit: bool) -> list[T]:
    """Copy a joint step to ``target``: the checkpoints of its members to the same places in the run there, and then its record, which is
    left to another process unless ``commit``. Gives what ``copy`` does; nothing if ``source`` is no joint step."""
    record = _joint_record(source)
    if record is None:
        return []
    run, _, name = target.rstrip("/").rpartition("/")
    if not run or name != source.rstrip("/").rpartition("/")[2]:
        raise UsageError("a step of several jobs keeps its name", where=target, hint="end the target in /: the directory of the other run")
    reports = [copy(part, join_url(run, record.members[member].path)) for member, part in member_urls(source).items()]
    data = read_record(open_backend(source))
    there = read_record(open_backend(target))
    if commit and data is not None and there != data:
        open_backend(target).put_if(COMMIT_PATH, data, expected=None)
    return reports


def _joint_record(url: str) -> CommitRecord | None:
    backend = open_backend(url)
    data = read_record(backend)
    record = None if data is None else CommitRecord.from_bytes(data, join_url(url, COMMIT_PATH))
    return record if record is not None and record.generation is not None and record.given_up is None else None
