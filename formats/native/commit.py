"""The commit record (docs/format.md §2), and the branches in it. Nothing in it is believed before its digest is right."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import xxhash

from ckpt.errors import CorruptError, FormatError, NotFoundError, UsageError
from ckpt.io_backends.checks import path_problem, read_checked
from ckpt.io_backends.protocol import Backend
from ckpt.settings import __version__
from ckpt.text import parse_object

from .paths import INDEX_NAMES, RANK_NAMES, VIRTUAL_NAMES, is_digest

# What a checkpoint went on from (docs/format.md §2): a run that goes back to an earlier step begins a branch.
#
#     1 ── 2 ── 3 ── 4          branches of 1 to 4: none
#          └── 3' ── 5'         of 3' and 5': [(b, after 2)]
#               └── 4"          of 4": [(b, after 2), (c, after 3)], and c is later than b
#
# Invariants: every record names all branches that led to it, so it tells its own past whatever else was removed. The id of a branch sorts
# after every id that the run had when it began, so the branch written last is the one with the highest id, whatever clocks say.


class Branch(NamedTuple):
    """``id``: like that of a save. ``after``: the step that the run went back to."""

    id: str
    after: int


Branches: TypeAlias = tuple[Branch, ...]
"""Those that led to a checkpoint, the first one first; ``after`` never falls."""


def begun_last(several: Iterable[Branches]) -> Branches:
    """Of the branches of some checkpoints those of the branch that was begun last."""
    # a run that never went back comes before all others
    return max(several, key=lambda branches: branches[-1].id if branches else "", default=())


def left_at(branches: Branches, step: int, live: Branches, tip: int) -> int | None:
    """The last step that a checkpoint of ``step`` with these branches shares with the branch ``live``, which is at step ``tip``; None if
    that went on from it."""
    common = next((i for i, (one, other) in enumerate(zip(branches, live, strict=False)) if one != other), min(len(branches), len(live)))
    until = live[common].after if common < len(live) else tip
    if common < len(branches):
        return min(until, branches[common].after)
    return None if step <= until else until


WRITER = f"ckpt {__version__}"
"""Name and version of this software."""
COMMIT_PATH = "checkpoint.json"
FORMAT = "ckpt"
VERSION = 1
CODED = "codecs"
"""The extension of checkpoints that have coded chunks."""
VIRTUAL = "extents"
"""The extension of checkpoints whose chunks lie in files of others."""
APART = "ranks"
"""The extension of checkpoints whose values and tensors of single ranks have index files of their own."""
REFERENCED = "references"
"""The extension of checkpoints some of whose data files lie in others of the run."""
ANCHORS = "anchors"
"""The extension of checkpoints some of whose chunks are stored as differences from chunks of another one, their anchors."""
JOINT = "members"
"""The extension of joint records: the step of a run of several jobs, whose tensors lie in a checkpoint of each."""
FEATURES = frozenset({CODED, VIRTUAL, APART, REFERENCED, ANCHORS, JOINT})
"""Extensions that this reader knows."""
DROPPED = {"mixed-steps": "some of its tensors are of earlier steps than the others, so it is not what the job had at any moment"}
"""Extensions of earlier writers that no reader knows any more, and why not."""
VALUES, ALIASES, LABELS, ELSEWHERE = "values", "aliases and padding", "metrics and tags", "what lies in other checkpoints"
"""What a rebuild may not recover, as ``lost`` in the record says it."""

INLINE_LIMIT = 8 << 10
"""Bytes of index files that a record repeats at most: it is read with every listing of a run."""
PART_LIMIT = 1000
"""Characters of what a record says of a part: thousands of globs stay in state.json."""
RECORD_LIMIT = 64 << 20
"""Bytes of a commit record that are read: millions of times what one takes."""

_ZEROS = b"0" * 32
_RANDOM = 36**7
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_TIME = re.compile(r"(?P<to_seconds>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d+))?(?P<zone>Z|[+-]\d\d:\d\d)?")
_DAMAGED = "restore the file from a copy, or rebuild it from the data files: `ckpt rebuild`"


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexFile:
    """One index file: ``path`` relative to the checkpoint, ``size`` in bytes, ``digest`` the XXH3-128 of all of it in hex."""

    path: str
    size: int
    digest: str


class MemberCheckpoint(NamedTuple):
    """The checkpoint of one member in a joint step: ``path`` relative to the root of the run, and the ``id`` of the save."""

    path: str
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """What ``checkpoint.json`` says. ``features`` are the extensions that it takes to read the checkpoint; ``index`` is by file name;
    ``tensor_bytes`` is the sum of the sizes of all stored tensors, before coding; ``metrics`` and ``tags`` are what the job said of it.
    ``inline`` repeats small index files, in base64, for storage where each file is a request. By default it is ours, of now."""

    id: str
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))
    writer: str = WRITER
    world_size: int
    features: tuple[str, ...] = ()
    index: Mapping[str, IndexFile]
    tensor_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """What a rebuild of the index could not recover (``VALUES``, …)."""
    inline: Mapping[str, str] = field(default_factory=dict)
    reusable: bool = False
    """Whether later checkpoints may refer to its data files, or it refers to those of earlier ones."""
    part: str | None = None
    """Of a checkpoint of a part of a state: which, as the arguments of the save."""
    branches: Branches = ()
    """Where its run had gone back to an earlier step; empty if it never had, or nobody knows."""
    members: Mapping[str, MemberCheckpoint] = field(default_factory=dict)
    """Of a joint record: the checkpoint of each member. It has no index then."""
    generation: str | None = None
    """Of a joint record: the id of the restart that its members had in common."""
    given_up: str | None = None
    """Of a joint record: why there is no such step, and never will be in this generation."""

    def to_bytes(self) -> bytes:
        """The whole file. Equal records give equal bytes."""
        for text in (*self.tags, *self.metrics):
            try:
                text.encode()
            except UnicodeEncodeError as err:
                raise UsageError(f"{text!r} is not Unicode", hint="give tags and metrics other names") from err
        members: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "created": self.created,
            "writer": self.writer,
            "world_size": self.world_size,
            "features": list(self.features),
            "index": {n: {"path": f.path, "size": f.size, "digest": f.digest} for n, f in self.index.items()},
            "tensor_bytes": self.tensor_bytes,
        }
        optional = {
            "metrics": {k: v if math.isfinite(v) else str(v) for k, v in self.metrics.items()} or None,
            "tags": list(self.tags) or None,
            "lost": list(self.lost) or None,
            "inline": dict(self.inline) or None,
            "reusable": self.reusable or None,
            "part": self.part,
            "branches": [b._asdict() for b in self.branches] or None,
            "members": None if self.generation is None else {n: m._asdict() for n, m in self.members.items()},
            "generation": self.generation,
            "given_up": self.given_up,
        }
        members |= {name: value for name, value in optional.items() if value is not None}
        members["digest"] = _ZEROS.decode()
        # The digest covers the file itself, with zeros in the place of the digest. So a flipped bit anywhere in the
        # record is found before a path or a size in it is believed.
        data = json.dumps(members, indent=2).encode() + b"\n"
        at = data.rindex(_ZEROS)
        return data[:at] + xxhash.xxh3_128_hexdigest(data).encode() + data[at + len(_ZEROS) :]

    def repeated(self, name: str) -> bytes | None:
        """The index file ``name`` if this record repeats it, verified as the file itself would be; else None."""
        file = self.index[name]
        try:
            data = b64decode(self.inline[name], validate=True)
        except (KeyError, ValueError):
            return None
        return data if len(data) == file.size and xxhash.xxh3_128_hexdigest(data) == file.digest else None

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> CommitRecord:
        """Read and verify a commit record; ``where`` is its URL, for messages."""
        members = _verified(data, where)
        features = members["features"]
        for feature in (CODED, APART, REFERENCED, ANCHORS):
            if {feature, VIRTUAL} <= set(features):
                _damaged(f"it has the features {feature} and {VIRTUAL}, which exclude each other", where)
        rows = _member(members, "index", dict, where)
        more = {VIRTUAL: VIRTUAL_NAMES, APART: RANK_NAMES}
        joint = JOINT in features
        names = () if joint else (*INDEX_NAMES, *(name for feature in features for name in more.get(feature, ())))
        missing = [n for n in names if not isinstance(rows.get(n), dict)]
        if missing:
            _damaged(f"its index lacks {', '.join(missing)}", where)
        index = {}
        for name in names:
            path, size, digest = (_member(rows[name], m, t, where) for m, t in (("path", str), ("size", int), ("digest", str)))
            problem = path_problem(path)
            if problem is not None or size < 0 or not is_digest(digest):
                _damaged(f"its row of {name} cannot be: {problem or (size, digest)}", where)
            index[name] = IndexFile(path=path, size=size, digest=digest)
        own = {name: _member(members, name, kind, where) for name, kind in _MEMBERS.items()}
        if moment_of(own["created"]) is None:
            _damaged(f"its created is {own['created'][:40]!r}, not a time", where)
        metrics, inline, part, branches = (members.get(name) for name in ("metrics", "inline", "part", "branches"))
        if not isinstance(metrics, dict | None) or ("metrics" in members and metrics is None):
            _damaged("its metrics are not an object", where)
        try:
            metrics = {name: float(value) for name, value in (metrics or {}).items()}
        except (TypeError, ValueError, OverflowError):
            _damaged("one of its metrics is not a number, or none that fits a float", where)
        texts: dict[str, Any] = {}
        for name, what in (("tags", "its tags"), ("lost", "its losses")):
            value = members.get(name, [])
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                _damaged(f"{what} are not an array of strings", where)
            texts[name] = tuple(value)
        begun: list[Any] = branches if isinstance(branches, list) else [branches] if "branches" in members else []
        if not all(isinstance(row, dict) and isinstance(row.get("id"), str) and type(row.get("after")) is int for row in begun):
            _damaged("its branches are not an array of objects with id and after", where)
        return cls(
            **own,
            **texts,
            features=tuple(features),
            index=index,
            metrics=metrics,
            # What cannot be used is no damage: the files that it repeats are there.
            inline={name: text for name, text in inline.items() if isinstance(text, str)} if isinstance(inline, dict) else {},
            reusable=members.get("reusable") is True,
            part=part if isinstance(part, str) else None,
            branches=tuple(Branch(row["id"], row["after"]) for row in begun),
            members=_members(members.get("members"), where) if joint else {},
            generation=_member(members, "generation", str, where) if joint else None,
            given_up=_member(members, "given_up", str, where) if joint and "given_up" in members else None,
        )


def is_ours(data: bytes) -> bool:
    """Whether a commit record says that it is one of this format, of whatever version."""
    try:
        return parse_object(data).get("format") == FORMAT
    except ValueError:
        return False


def inlined(files: Mapping[str, bytes], limit: int) -> dict[str, str]:
    """What ``CommitRecord.inline`` repeats of index files: the smallest first, ``limit`` bytes in all at most."""
    texts = {}
    for name, data in sorted(files.items(), key=lambda item: len(item[1])):
        limit -= len(data)
        if limit < 0:
            break
        texts[name] = b64encode(data).decode()
    return texts


def new_id(*earlier: str | None, random: int | None = None) -> str:
    """A fresh ``<id>``: 9 digits of milliseconds since 1970, so that ids sort by time, and 7 random digits, all in base 36.

    It sorts after the ids ``earlier``, such as that of the save that it will replace, also where this machine's clock is behind: clean-up
    relies on that. ``random`` takes the place of the random digits, where they say what is saved.
    """
    moment = time.time_ns() // 1_000_000
    for id in filter(None, earlier):
        with suppress(ValueError):  # it is no id of ours
            moment = max(moment, min(int(id[:9], 36), 36**9 - 2) + 1)
    return _base36(moment, 9) + _base36(secrets.randbelow(_RANDOM) if random is None else random % _RANDOM, 7)


def id_replaced(data: bytes | None, url: str) -> str | None:
    """The id of the checkpoint at ``url`` that a save takes the place of, given its record; None if there is none, or nobody can read it.

    Raises:
        UsageError: it is a step of several jobs, and the save would take the checkpoints of all of them out of their run.
    """
    try:
        record = None if data is None else CommitRecord.from_bytes(data, COMMIT_PATH)
    except (CorruptError, FormatError):
        return None
    if record is not None and record.generation is not None:
        hint = "give member= (a run of several jobs), or save to another directory"
        raise UsageError("a step of several jobs is here, which no checkpoint of one job replaces", where=url, hint=hint)
    return None if record is None else record.id


def has_random_digits(id: str, random: int) -> bool:
    """Whether an id has what ``random`` makes of its last digits."""
    return id[9:] == _base36(random % _RANDOM, 7)


def began(id: str) -> float | None:
    """When the save with this id began, in seconds since 1970; None if it is no id that ``new_id`` gives."""
    try:
        return int(id[:9], 36) / 1000
    except ValueError:
        return None


def moment_of(created: str) -> datetime | None:
    """The time that a record's ``created`` says; None if it says none. Without a zone it is UTC."""
    fields = _TIME.fullmatch(created)
    if fields is None:
        return None
    fraction, zone = fields["fraction"] or "", fields["zone"] or "Z"
    try:
        return datetime.fromisoformat(f"{fields['to_seconds']}.{fraction[:6]:0<6}{zone.replace('Z', '+00:00')}").astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def _base36(number: int, width: int) -> str:
    text = ""
    for _ in range(width):
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the commit record {COMMIT_PATH} is damaged: {what}", where=where, hint=_DAMAGED)


def _verified(data: bytes, where: str) -> dict[str, Any]:
    """The members of a record of this format, of a version and with features that this software knows, whose digest is right."""
    try:
        members = parse_object(data)
    except ValueError as err:
        _damaged(str(err), where)
    digest, ours = members.get("digest"), members.get("format") == FORMAT
    if is_digest(digest):
        digits = str(digest).encode()
        if data.count(digits) != 1:
            _damaged("its digest is not in it exactly once", where)
        computed = xxhash.xxh3_128_hexdigest(data.replace(digits, _ZEROS))
        if computed != digest:
            _damaged(f"its digest is {computed}, recorded is {digest}", where)
    elif ours:
        _damaged("it has no digest of 32 hex digits", where)
    if not ours:
        raise FormatError(
            f"{COMMIT_PATH} is not a commit record of ckpt: its format is {members.get('format')!r}",
            where=where,
            hint="check the URL; this file belongs to other software",
        )
    version, features = members.get("version"), members.get("features")
    hint = f"read it with the software that wrote it ({members.get('writer')}) or a newer release of this one"
    if type(version) is not int or version != VERSION:
        raise FormatError(f"format version {version!r} is not known; this software reads version {VERSION}", where=where, hint=hint)
    unknown = [f for f in features if not isinstance(f, str) or f not in FEATURES] if isinstance(features, list) else [features]
    for dropped in (f for f in unknown if isinstance(f, str) and f in DROPPED):
        raise FormatError(
            f"it has the feature {dropped!r}, which is not read any more: {DROPPED[dropped]}",
            where=where,
            hint=f"load another step, or convert it with the software that wrote it ({members.get('writer')})",
        )
    if unknown:
        raise FormatError(f"it needs features that are not known: {', '.join(map(repr, unknown))}", where=where, hint=hint)
    return members


_MEMBERS = {"id": str, "created": str, "writer": str, "world_size": int, "tensor_bytes": int}


def _members(value: object, where: str) -> dict[str, MemberCheckpoint]:
    rows: dict[str, Any] = value if isinstance(value, dict) else {"": value}
    for name, row in rows.items():
        path, id = (row.get("path"), row.get("id")) if isinstance(row, dict) else (None, None)
        if not isinstance(path, str) or not isinstance(id, str) or path_problem(path) is not None:
            _damaged(f"its member {name!r:.100} is {row!r:.200}, not a path below the run and an id", where)
    return {name: MemberCheckpoint(row["path"], row["id"]) for name, row in rows.items()}


def _member(members: dict[str, Any], name: str, kind: type, where: str) -> Any:
    value = members.get(name)
    if type(value) is not kind:
        _damaged(f"its {name} is {value!r}, not {kind.__name__}", where)
    return value


def read_record(backend: Backend, prefix: str = "") -> bytes | None:
    """The bytes of the commit record below ``prefix`` (empty, or ending in a slash), or None if there is none.

    What cannot be a record is read again; if it stays so, its bytes are given all the same: whoever parses them says what is wrong.
    """
    path, data = prefix + COMMIT_PATH, None

    def read() -> bytes:
        nonlocal data
        data = backend.read_whole(path, RECORD_LIMIT)
        CommitRecord.from_bytes(data, path)
        return data

    try:
        return read_checked(backend, path, read)
    except NotFoundError:
        return None
    except (CorruptError, FormatError):
        if data is None:
            raise
        return data


# What a process has learned of a run.

T = TypeVar("T")


class KnownRecords(Generic[T]):
    """What a process has learned from the commit records of a run, by directory. Any thread may ask.

    A run may have ten thousand steps, so a save must not read them all to remove one. What was read is believed as long as the storage
    shows, in a listing that costs little, that the record is still the same object (``Backend.version_tokens``). Nothing is concluded from
    a name alone: another job, or ``ckpt tag``, may have replaced what is behind it.

    Invariants: a token is older than the record that is kept with it, so that a record replaced in between is read again. What a link leads
    to is never kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, T]] = {}

    def read(
        self, run: Backend, names: Sequence[str], read: Callable[[Sequence[str]], Mapping[str, T]], lasts: Callable[[T], bool]
    ) -> dict[str, T]:
        """What ``read`` gives for these directories of ``run``, asked only for those that are new or changed. ``lasts``: whether something
        stays true as long as the record is the same."""
        tokens = run.version_tokens(names, COMMIT_PATH, skip="/data/")  # before any record is read
        if tokens is None:
            return dict(read(names))
        before = self._kept
        same = {n: before[n] for n in names if n in before and tokens.get(n) == before[n][0] and run.link(n) is None}
        new = read([n for n in names if n not in same])
        self._kept = {**same, **{n: (tokens[n], value) for n, value in new.items() if n in tokens and lasts(value) and run.link(n) is None}}
        return {**{n: value for n, (_, value) in same.items()}, **new}
