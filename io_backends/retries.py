"""Storage that is asked again: how often, counted for all of the process (what one save has seen is a difference, and what else goes on
beside it counts too), and the second reading of bytes that do not fit their digest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from ckpt.errors import CkptError, CorruptError


class Retries(NamedTuple):
    """Requests that were made again, and those of them where the storage had asked to slow down."""

    again: int = 0
    throttled: int = 0

    def since(self, before: Retries) -> Retries:
        """What has come since ``before``."""
        return Retries(self.again - before.again, self.throttled - before.throttled)


_lock = threading.Lock()
_total = Retries()


def total() -> Retries:
    """Since the process began."""
    return _total


def count(*, throttled: bool) -> None:
    """A request is made again."""
    global _total
    with _lock:
        _total = Retries(_total.again + 1, _total.throttled + throttled)


# Bytes that do not fit their digest, or cannot be parsed, are read again, past caches, before they count as damaged.
#
# A network without checksums of its own, or a failing host, may flip a bit on the way: then the stored bytes are right, and nothing must be
# given up. Every comparison with a digest goes through :func:`read_checked`; its first read is the only one if the bytes are right.

T = TypeVar("T")
log = logging.getLogger("ckpt")

READS = 3
"""How often bytes are read at most. What is the same twice is what is stored."""


class Storage(Protocol):
    """The part of a storage backend that is needed here."""

    @property
    def url(self) -> str: ...

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None: ...


def read_checked(
    storage: Storage,
    path: str,
    read: Callable[[], T],
    *,
    offset: int = 0,
    length: int | None = None,
    faults: tuple[type[CkptError], ...] = (CorruptError,),
) -> T:
    """What ``read`` gives. It reads the bytes from ``offset`` on (``length`` of them, or all) of ``path`` and raises one of ``faults`` if
    they do not fit; then caches of this machine forget these bytes, and it is called again. It may be called ``READS`` times, so it sets
    anew whatever it sets."""
    seen: set[str] = set()
    while True:
        try:
            result = read()
        except faults as err:
            # Damage has a message that names the digest of what was read. The same message twice means that two
            # reads, the second past the caches, gave the same wrong bytes: that is what is stored.
            if err.message in seen or len(seen) == READS - 1:
                raise
            seen.add(err.message)
            storage.evict(path, offset, length)
            continue
        if seen:
            span = "" if length is None else f", bytes {offset} to {offset + length}"
            log.warning(
                "%s/%s%s: read again, and right: %s the first time. The network, a cache or the memory of a machine flips bits",
                storage.url.rstrip("/"),
                path,
                span,
                "; ".join(sorted(seen)),
            )
        return result


def read_alike(storage: Storage, path: str, read: Callable[[], bytes]) -> bytes:
    """Bytes that no digest is known of yet, because one is made of them: what two reads agree about."""
    seen = [read()]
    while len(seen) < READS:
        storage.evict(path)
        data = read()
        if data in seen:
            return data
        seen.append(data)
    raise CorruptError(
        f"{READS} reads gave different bytes each time",
        where=f"{storage.url.rstrip('/')}/{path}",
        hint="the network, a cache or the memory of a machine flips bits: read on another machine",
    )
