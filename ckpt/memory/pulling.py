"""Fetching objects from the daemon of another machine, in the background: each appears here when it is complete and has its digest."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import xxhash

from ckpt.errors import CkptError, ConflictError, CorruptError, NotFoundError, error_to_json
from ckpt.settings import limits

from .messages import Message
from .objects import MemoryObject
from .remote import RemoteMemory
from .store import Lent, MemoryStore

_BLOCK = 8 * limits.MIB
"""Bytes that are asked for at once."""
_REMEMBERED = 10_000
"""Pulls whose outcome is remembered."""

log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True)
class Pull:
    """One object on its way here from ``source``."""

    source: str
    path: str
    size: int = 0
    """Bytes; 0 until it is known."""
    copied: int = 0
    state: Literal["waiting", "copying", "complete", "failed"] = "waiting"
    error: Message | None = None

    def row(self) -> Message:
        return {
            "source": self.source,
            "path": self.path,
            "size": self.size,
            "copied": self.copied,
            "state": self.state,
            "error": self.error,
        }


class ObjectPuller:
    """Pulls objects into a store, a thread for each source. An object that is here already, with the same digest, is complete."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pulls: OrderedDict[tuple[str, str], Pull] = OrderedDict()
        self._busy: set[str] = set()
        self._closing = threading.Event()

    def pull(self, source: str, secret: str, paths: Sequence[str], pace: float | None) -> None:
        """Begin to fetch ``paths`` from the daemon at ``source``, at most ``pace`` bytes a second. Those that are on their way stay so."""
        with self._lock:
            for path in paths:
                known = self._pulls.get((source, path))
                if known is None or known.state in ("complete", "failed"):
                    self._pulls[source, path] = Pull(source=source, path=path)
            while len(self._pulls) > _REMEMBERED and next(iter(self._pulls.values())).state in ("complete", "failed"):
                self._pulls.popitem(last=False)
            if source in self._busy:
                return
            self._busy.add(source)
        threading.Thread(target=self._run, args=(source, secret, pace), name="ckpt-memory-pull", daemon=True).start()

    def rows(self) -> list[Message]:
        """All pulls that are remembered."""
        with self._lock:
            return [pull.row() for pull in self._pulls.values()]

    def is_busy(self) -> bool:
        with self._lock:
            return bool(self._busy)

    def close(self) -> None:
        """End all of them."""
        self._closing.set()

    def _run(self, source: str, secret: str, pace: float | None) -> None:
        remote = RemoteMemory(source, secret, alive=self._check_going)
        try:
            while (waiting := self._next(source)) is not None:
                self._one(remote, waiting, pace)
        finally:
            remote.close()

    def _next(self, source: str) -> Pull | None:
        with self._lock:
            waiting = next((pull for pull in self._pulls.values() if pull.source == source and pull.state == "waiting"), None)
            if waiting is None or self._closing.is_set():
                self._busy.discard(source)
                return None
            return waiting

    def _note(self, pull: Pull) -> Pull:
        with self._lock:
            self._pulls[pull.source, pull.path] = pull
        return pull

    def _one(self, remote: RemoteMemory, pull: Pull, pace: float | None) -> None:
        try:
            there = remote.stat(pull.path)
            if there.path != pull.path or there.size < 0:
                raise CorruptError(f"asked for this, it speaks of {there.path!r:.200}, {there.size} bytes", where=pull.path)
            pull = self._note(replace(pull, size=there.size, state="copying"))
            if not self._is_here(remote, there):
                pull = self._copy(remote, there, pull, pace)
            self._note(replace(pull, copied=there.size, state="complete"))
        except (CkptError, OSError, KeyError, TypeError, ValueError) as err:  # what a peer says may be anything
            log.warning("%s was not copied from %s: %s", pull.path, pull.source, err)
            row = error_to_json(err if isinstance(err, CkptError) else CkptError(str(err)))
            self._note(replace(pull, state="failed", error=row))

    def _is_here(self, remote: RemoteMemory, there: MemoryObject) -> bool:
        """Whether this memory has the same bytes under the same name: sizes of other steps are the same, so only digests tell.

        Raises:
            ConflictError: it has other bytes.
        """
        try:
            here = self._store.stat(there.path)
        except NotFoundError:
            return False
        if here.size == there.size and self._store.digest(there.path).digest == remote.digest(there).digest:
            return True
        raise ConflictError(
            "this machine has another object of that name",
            where=f"mem://{there.path}",
            hint="drop one of them (ckpt memory drop), then copy it again",
        )

    def _copy(self, remote: RemoteMemory, there: MemoryObject, pull: Pull, pace: float | None) -> Pull:
        lent = self._store.lend(there.size)
        try:
            digest = self._fill(lent, remote, there, pace, lambda count: self._note(replace(pull, copied=count)))
            # The digest is asked for at the end: if nobody has given one, its machine computes it from its own memory.
            promised = remote.digest(there)
            if promised.version != there.version:
                raise ConflictError("the object was replaced while it was copied", where=there.path, hint="copy it again")
            if promised.digest != digest:
                raise CorruptError(
                    "what arrived has another digest than what was sent",
                    where=f"mem://{pull.source}/{there.path}",
                    hint="copy it again; if it comes back, look at the memory and the network of both machines",
                )
            self._store.put(lent, there.path, digest)
        except BaseException:
            self._store.take_back(lent)
            raise
        return pull

    def _fill(self, lent: Lent, remote: RemoteMemory, there: MemoryObject, pace: float | None, note: Callable[[int], object]) -> str:
        # Through a small buffer, not a mapping: what this process maps counts as its own memory.
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_BLOCK, max(there.size, 1))))
        began = time.monotonic()
        for offset in range(0, there.size, len(buffer)):
            view = buffer[: min(len(buffer), there.size - offset)]
            at = offset

            def keep(block: memoryview) -> None:
                nonlocal at
                digest.update(block)
                written = 0
                while written < len(block):
                    written += os.pwrite(lent.file, block[written:], at + written)
                at += len(block)

            known = remote.read_into(there.path, offset, view, keep)
            if known.version != there.version:
                raise ConflictError("the object was replaced while it was copied", where=there.path, hint="copy it again")
            note(offset + len(view))
            if pace is not None:
                self._closing.wait(max(0.0, began + (offset + len(view)) / pace - time.monotonic()))
            self._check_going()
        return digest.hexdigest()

    def _check_going(self) -> None:
        if self._closing.is_set():
            raise ConnectionAbortedError("the daemon ends")
