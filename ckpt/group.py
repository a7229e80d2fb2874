"""The ranks of one job, and how they agree. Control goes through the job's key-value store only: no collective that training could
interleave with.

Every wait has a deadline: ``timeout`` seconds without a sign of life. A rank that raised, died or hangs ends the call on all
others, with its name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import xxhash

from . import errors
from .errors import CkptError, ConsistencyError, DeadlineError, GroupError, RankFailedError, UsageError
from .plan.tables import ranks_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Row = dict[str, Any]
"""What a rank says in one phase: JSON."""

R = TypeVar("R")


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(eq=False)
class Group:
    """The ranks that take part, as global ranks; the first is the leader. ``store`` is None for a single process."""

    rank: int
    ranks: tuple[int, ...]
    store: Store | None = None
    calls: int = 0
    _written: list[list[str]] = field(default_factory=list)

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def call(self, kind: str, url: str, timeout: float) -> Call:
        """Begin a collective call; every rank makes the same calls in the same order."""
        self.calls += 1
        self._forget()
        return Call(self, f"{self.calls}", kind, url, timeout)

    def _forget(self) -> None:
        """Delete what this rank wrote in the call before the last: every rank has left that one, since the last call needed all of
        them."""
        self._written.append([])
        if len(self._written) > 2 and self.store is not None:
            for key in self._written.pop(0):
                self.store.delete_key(key)

    def remember(self, key: str) -> None:
        self._written[-1].append(key)


_groups: dict[int, tuple[object, Group]] = {}


def current_group(process_group: ProcessGroup | None = None) -> Group:
    """The group of ``process_group``, of torch.distributed's world, or of this process alone if torch.distributed is not in use."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Group(0, (0,))
    pg = process_group if process_group is not None else dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(pg))
    rank = dist.get_rank()
    if rank not in ranks:
        raise UsageError(f"rank {rank} is not in the process group {list(ranks)[:8]}")
    known = _groups.get(id(pg))
    if known is None or known[0] is not pg:
        base = dist.distributed_c10d._get_default_store()
        name = xxhash.xxh3_64_hexdigest(repr(ranks).encode())
        store = cast(Store, dist.distributed_c10d.PrefixStore(f"ckpt/{name}", base))
        known = _groups[id(pg)] = (pg, Group(rank, ranks, store))
    return known[1]


# ------------------------------------------------------------------------------------------------------------- one call


@dataclass(eq=False)
class Call:
    """One collective call: a few phases, in each of which every rank says something and the leader decides."""

    group: Group
    number: str
    kind: str
    url: str
    timeout: float
    _phase: str = "start"
    _beats: int = 0
    _beaten: float = 0.0
    _blobs: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_leader(self) -> bool:
        return self.group.rank == self.group.leader

    def agree(self, phase: str, work: Callable[[], Row], decide: Callable[[dict[int, Row]], R]) -> R:
        """Run ``work`` on every rank, then ``decide`` on the leader with all rows (JSON); every rank returns what it decided (JSON).

        Raises:
            the error of ``work`` on the rank that it happened on, and RankFailedError on the others; the error of ``decide`` on all;
            DeadlineError if a rank gave no sign of life for ``timeout`` seconds.
        """
        self._phase = phase
        try:
            row = work()
        except BaseException as err:
            self._post_failure(err)
            raise
        if self.group.store is None:
            return decide({self.group.rank: json.loads(json.dumps(row))})
        self._post({"kind": self.kind, "url": self.url, "row": row})
        return self._lead(decide) if self.is_leader else self._follow()

    def beat(self) -> None:
        """Give a sign of life. Cheap: at most a few messages per deadline."""
        now = time.monotonic()
        if self.group.store is None or now - self._beaten < self.timeout / 8:
            return
        self._beaten = now
        self._beats += 1
        self._set(f"beat/{self.group.rank}", str(self._beats).encode())

    def share(self, data: bytes) -> str:
        """Leave bytes for the leader under their digest; equal bytes of several ranks are sent once."""
        digest = xxhash.xxh3_128_hexdigest(data)
        if self.group.store is None:
            self._blobs[digest] = data
        elif self.group.store.add(self._key(f"claim/{digest}"), 1) == 1:
            self.group.remember(self._key(f"claim/{digest}"))
            self._set(f"blob/{digest}", data)
        return digest

    def fetch(self, digest: str) -> bytes:
        """What some rank shared under this digest."""
        if self.group.store is None:
            return self._blobs[digest]
        self.group.store.wait([self._key(f"blob/{digest}")], timedelta(seconds=self.timeout))
        return bytes(self.group.store.get(self._key(f"blob/{digest}")))

    # ---- the protocol

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    def _set(self, name: str, data: bytes) -> None:
        assert self.group.store is not None
        self.group.store.set(self._key(name), data)
        self.group.remember(self._key(name))

    def _post(self, message: Row) -> None:
        store = self.group.store
        assert store is not None
        self._set(f"{self._phase}/row/{self.group.rank}", json.dumps(message).encode())
        count = self._key(f"{self._phase}/count")
        if store.add(count, 1) == self.group.size or "error" in message:
            self._set(f"{self._phase}/all", b"1")
            self.group.remember(count)

    def _post_failure(self, err: BaseException) -> None:
        if self.group.store is None or type(err).__name__ == "SimulatedCrash":
            return
        try:
            self._post({"error": _error_to_json(err)})
            if self.is_leader:
                self._publish({"error": _error_to_json(err), "rank": self.group.rank})
        except RuntimeError as lost:
            if hasattr(err, "add_note"):  # Python 3.11
                err.add_note(f"the other ranks could not be told: {lost}")

    def _publish(self, verdict: Row) -> None:
        self._set(f"{self._phase}/verdict", json.dumps(verdict).encode())

    def _lead(self, decide: Callable[[dict[int, Row]], R]) -> R:
        try:
            rows = self._gather()
            found = decide(rows)
        except BaseException as err:
            self._publish({"error": _error_to_json(err), "all": True})
            raise
        self._publish({"found": found})
        return found

    def _gather(self) -> dict[int, Row]:
        watch = _Watch(self)
        while not self._arrived(f"{self._phase}/all"):
            self.beat()
            watch.check([r for r in self.group.ranks if not self._has(f"{self._phase}/row/{r}")])
        rows = {r: self._read(f"{self._phase}/row/{r}") for r in self.group.ranks if self._has(f"{self._phase}/row/{r}")}
        failed = {r: row["error"] for r, row in rows.items() if "error" in row}
        if failed:
            raise _failure(self.kind, self._phase, failed)
        for r, row in rows.items():
            if (row["kind"], row["url"]) != (self.kind, self.url):
                raise ConsistencyError(
                    f"rank {r} calls {row['kind']}({row['url']!r}) while rank {self.group.rank} calls {self.kind}({self.url!r})",
                    hint="make the same calls in the same order on every rank",
                )
        return {r: row["row"] for r, row in rows.items()}

    def _follow(self) -> Any:
        watch = _Watch(self)
        while not self._arrived(f"{self._phase}/verdict"):
            watch.check([self.group.leader])
        verdict = self._read(f"{self._phase}/verdict")
        if "error" not in verdict:
            return verdict["found"]
        if verdict.get("all"):
            raise _error_from_json(verdict["error"])
        raise _failure(self.kind, self._phase, {verdict["rank"]: verdict["error"]})

    def _arrived(self, name: str) -> bool:
        """Wait a slice of the deadline for a key."""
        assert self.group.store is not None
        slice_ = min(self.timeout / 4, 5.0)
        began = time.monotonic()
        try:
            self.group.store.wait([self._key(name)], timedelta(seconds=slice_))
        except RuntimeError as err:
            if time.monotonic() - began < slice_ / 2:
                raise DeadlineError(
                    f"{self.kind}: the job's store is gone, so the process that serves it (rank 0 or the launcher) probably died",
                    where=self.url,
                    hint="look at the log of rank 0; the previous checkpoint is untouched",
                ) from err
            return False
        return True

    def _has(self, name: str) -> bool:
        assert self.group.store is not None
        return self.group.store.check([self._key(name)])

    def _read(self, name: str) -> Row:
        assert self.group.store is not None
        found: Row = json.loads(self.group.store.get(self._key(name)))
        return found

    def heard(self, rank: int) -> bytes | None:
        """The last sign of life of a rank."""
        key = f"beat/{rank}"
        assert self.group.store is not None
        return bytes(self.group.store.get(self._key(key))) if self._has(key) else None


class _Watch:
    """Finds ranks of which nothing was heard for the call's timeout."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.last: dict[int, tuple[bytes | None, float]] = {}
        self.began = time.monotonic()

    def check(self, waiting_for: list[int]) -> None:
        now = time.monotonic()
        silent = []
        for rank in waiting_for:
            beat = self.call.heard(rank)
            if rank not in self.last or self.last[rank][0] != beat:
                self.last[rank] = (beat, now if rank in self.last else self.began)
            if now - self.last[rank][1] >= self.call.timeout:
                silent.append(rank)
        if silent:
            raise DeadlineError(
                f"{self.call.kind}: nothing was heard of {ranks_text(silent)} for {self.call.timeout:g} s (phase {self.call._phase!r})",
                where=self.call.url,
                hint="look whether they died or hang; a larger timeout= gives slow storage more time. The previous checkpoint is untouched",
            )


def _failure(kind: str, phase: str, failed: dict[int, Any]) -> GroupError:
    """One error for what failed on other ranks; equal texts are told once."""
    by_text: dict[str, list[int]] = {}
    for rank, err in failed.items():
        by_text.setdefault(f"{err['type']}: {err['message']}" + (f" ({err['where']})" if err["where"] else ""), []).append(rank)
    told = "; ".join(f"{ranks_text(ranks)} raised {text}" for text, ranks in by_text.items())
    hint = next((err["hint"] for err in failed.values() if err["hint"]), None)
    return RankFailedError(f"{kind} failed in phase {phase!r}: {told}", hint=hint)


def _error_to_json(err: BaseException) -> Row:
    message = err.message if isinstance(err, CkptError) else str(err)
    where, hint = (err.where, err.hint) if isinstance(err, CkptError) else (None, None)
    return {"type": type(err).__name__, "message": message, "where": where, "hint": hint}


def _error_from_json(data: Row) -> CkptError:
    """The leader's error, as the same class on every rank if it is one of ours."""
    found = getattr(errors, data["type"], None)
    if isinstance(found, type) and issubclass(found, CkptError):
        return found(data["message"], where=data["where"], hint=data["hint"])
    return RankFailedError(f"the leading rank raised {data['type']}: {data['message']}", hint=data["hint"])
