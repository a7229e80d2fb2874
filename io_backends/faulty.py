"""A backend that fails on purpose: at the n-th operation, in a chosen way. For tests of what a failure, a crash or a power loss leaves.

Invariant: after a simulated crash no operation of the process reaches the storage any more, clean-up included.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from ckpt.errors import CkptError, NoSpaceError, NotFoundError, StorageError

from .checks import byte_views
from .protocol import Backend, CopySource, IOHints, ObjectMeta, PendingUpload, Writer

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Callable[..., Any])


class SimulatedCrash(BaseException):
    """The process is gone. No Exception, so that code under test cannot handle what no process can handle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong, once, at operation number ``at`` (from 0).

    Every method of a backend and every write, commit and abort of a Writer is one operation. ``kind``: ``error`` raises StorageError(EIO);
    ``no_space`` raises NoSpaceError; ``crash`` raises SimulatedCrash, then and at every later operation; ``slow`` waits ``seconds`` first;
    ``short_write`` hits the first ``Writer.write`` from ``at`` on, which keeps half of its bytes and raises StorageError(EIO).
    """

    at: int
    kind: Literal["error", "short_write", "no_space", "crash", "slow"]
    after: bool = False
    """The operation takes its effect before ``error``, ``no_space`` or ``crash``: only the answer is lost."""
    lose_unsynced: bool = False
    """With ``crash``: as in a power loss, each object that is not committed keeps a random prefix or vanishes."""
    seed: int = 0
    """Of the random prefixes."""
    seconds: float = 0.05


class FaultyProcess:
    """What the backends of one simulated process share: the count of operations, the fault, and whether the process has crashed.

    ``wrap_backends(FaultyProcess(fault).wrap)`` puts everything that is opened inside the block into the process. Without a fault it only
    counts.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self._fault = fault
        self._lock = threading.Lock()
        self._log: list[str] = []
        self._crashed_at: str | None = None
        self._unsynced: dict[FaultyWriter, None] = {}  # a dict for its order: the seed decides all

    @property
    def operations(self) -> int:
        """Number of operations begun so far, the one that failed included, those after a crash not."""
        return len(self._log)

    @property
    def log(self) -> tuple[str, ...]:
        """The operations, as ``"put_if checkpoint.json"``; entry n is operation number n."""
        with self._lock:
            return tuple(self._log)

    @property
    def crashed(self) -> bool:
        return self._crashed_at is not None

    def wrap(self, inner: Backend) -> FaultyBackend:
        """Put a backend into this process."""
        return FaultyBackend(inner, process=self)

    def check_alive(self) -> None:
        """Raise SimulatedCrash if the process has crashed."""
        if self._crashed_at is not None:
            raise SimulatedCrash(f"crashed at {self._crashed_at}")

    def operate(self, what: str, effect: Callable[[], _T], half: Callable[[], None] | None = None) -> _T:
        """Count one operation, and run ``effect`` or what the fault makes of it. ``half`` is the half of a write."""
        fault = self._begin(what, is_write=half is not None)
        if fault is None:
            return self._run(effect)
        if fault.kind == "slow":
            time.sleep(fault.seconds)
            return self._run(effect)
        if half is not None and fault.kind == "short_write":
            self._run(half)
        elif fault.after:
            with suppress(CkptError):  # the answer is lost, an error too
                self._run(effect)
        if fault.kind == "crash":
            with self._lock:
                self._crashed_at = what
                lost = tuple(self._unsynced) if fault.lose_unsynced else ()
                self._unsynced.clear()
            chance = random.Random(fault.seed)
            for writer in lost:
                writer.lose(chance)
        raise _failure(fault, what)

    def _begin(self, what: str, *, is_write: bool) -> Fault | None:
        with self._lock:
            self.check_alive()
            number = len(self._log)
            self._log.append(what)
            fault = self._fault
            if fault is None or number < fault.at or (number > fault.at and fault.kind != "short_write"):
                return None
            if fault.kind == "short_write":
                if not is_write:
                    return None
                self._fault = None
            return fault

    def _run(self, effect: Callable[[], _T]) -> _T:
        try:
            result = effect()
        except CkptError:
            self.check_alive()  # another thread crashed meanwhile: a dead process sees neither errors nor results
            raise
        self.check_alive()
        return result

    def opened(self, writer: FaultyWriter) -> None:
        """Remember a Writer until it is committed or aborted."""
        with self._lock:
            self._unsynced[writer] = None

    def closed(self, writer: FaultyWriter) -> None:
        with self._lock:
            self._unsynced.pop(writer, None)


def _failure(fault: Fault, what: str) -> BaseException:
    if fault.kind == "crash":
        return SimulatedCrash(f"crashed at {what}")
    full = fault.kind == "no_space"
    error = (NoSpaceError if full else StorageError)(f"injected fault: {fault.kind}", where=what, hint="this comes from a FaultyBackend")
    error.errno = errno.ENOSPC if full else errno.EIO
    return error


def _operation(method: _M) -> _M:
    """A method of a FaultyBackend: an operation that is named as the method is, with its first argument."""
    name: str = method.__name__

    def operation(self: FaultyBackend, *args: Any, **more: Any) -> Any:
        what = " ".join([name, *(str(each) for each in [*args, *more.values()][:1])])
        return self.process.operate(what, lambda: getattr(self._inner, name)(*args, **more))

    return cast(_M, operation)


class FaultyBackend(Backend):
    """``inner`` with a fault. Backends given the same ``process`` crash together and count together."""

    def __init__(self, inner: Backend, fault: Fault | None = None, *, process: FaultyProcess | None = None) -> None:
        self._inner = inner
        self.process: FaultyProcess = FaultyProcess(fault) if process is None else process

    @property
    def operations(self) -> int:
        """Number of operations of the process so far."""
        return self.process.operations

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def io_hints(self) -> IOHints:
        return self._inner.io_hints

    read = _operation(Backend.read)
    read_into = _operation(Backend.read_into)
    copy_source = _operation(Backend.copy_source)
    size = _operation(Backend.size)
    list_dir = _operation(Backend.list_dir)
    put_if = _operation(Backend.put_if)
    delete = _operation(Backend.delete)
    prepare = _operation(Backend.prepare)
    now = _operation(Backend.now)
    modified = _operation(Backend.modified)
    pending_uploads = _operation(Backend.pending_uploads)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        self._inner.evict(path, offset, length)

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return self.process.operate(f"list_prefix {prefix}", lambda: self._listed(self._inner.list_prefix(prefix)))

    def _listed(self, entries: Iterator[ObjectMeta]) -> Iterator[ObjectMeta]:
        for entry in entries:
            self.process.check_alive()
            yield entry

    def version_tokens(self, directories: Sequence[str], name: str, *, skip: str) -> dict[str, str] | None:
        return self.process.operate(f"version_tokens {name}", lambda: self._inner.version_tokens(directories, name, skip=skip))

    def create(self, path: str, size: int) -> Writer:
        return self.process.operate(f"create {path}", lambda: FaultyWriter(self._inner, path, size, self.process))

    def delete_many(self, paths: Collection[str]) -> None:
        for path in paths:  # one after another, each an operation: the seed decides all
            self.delete(path)

    def abilities(self) -> str | None:
        return self._inner.abilities()

    def assume(self, abilities: str) -> None:
        self._inner.assume(abilities)

    def link(self, path: str = "") -> str | None:
        return self._inner.link(path)

    def abort_upload(self, upload: PendingUpload) -> None:
        self.process.operate(f"abort_upload {upload.path}", lambda: self._inner.abort_upload(upload))


class FaultyWriter(Writer):
    """A Writer of a FaultyBackend."""

    def __init__(self, backend: Backend, path: str, size: int, process: FaultyProcess) -> None:
        self._backend = backend
        self._path = path
        self._process = process
        self._settling = threading.Lock()
        self._settled = False
        self._inner = backend.create(path, size)
        process.opened(self)

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        self._process.operate(
            f"write {self._path}", lambda: self._inner.write(offset, parts), lambda: self._inner.write(offset, [_first_half(parts)])
        )

    def copy_range(self, offset: int, source: CopySource, at: int, length: int) -> bool:
        return self._process.operate(f"copy_range {self._path}", lambda: self._inner.copy_range(offset, source, at, length))

    def commit(self) -> None:
        self._process.operate(f"commit {self._path}", lambda: self._settle(self._inner.commit))

    def abort(self) -> None:
        self._process.operate(f"abort {self._path}", lambda: self._settle(self._inner.abort))

    def _settle(self, effect: Callable[[], None]) -> None:
        with self._settling:
            effect()
            self._settled = True
        self._process.closed(self)

    def lose(self, chance: random.Random) -> None:
        """What a power loss does to bytes that were not synced: a prefix of the object is there afterwards, or nothing."""
        with self._settling:
            if self._settled:  # by another thread, while the crash was on its way
                return
            kept: bytes | None = None
            with suppress(NotFoundError):  # a storage that shows nothing before commit leaves nothing
                kept = self._backend.read(self._path)
            self._inner.abort()
        if kept is not None and chance.random() < 0.75:
            kept = kept[: chance.randrange(len(kept) + 1)]
            with self._backend.create(self._path, len(kept)) as writer:
                writer.write(0, [kept])
                writer.commit()


def _first_half(parts: Sequence[memoryview | bytes]) -> bytes:
    joined = b"".join(byte_views(parts))
    return joined[: len(joined) // 2]
