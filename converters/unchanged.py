"""Whether files stayed as they were while something else looked at them. No torch.

Invariant: "yes" is only said where any change would show: a file that was written so lately that another write could bear the same time, or
one that was not seen beforehand, makes it "perhaps not".
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from ckpt.catalog import Source
from ckpt.errors import NotFoundError
from ckpt.formats.single import open_single
from ckpt.io_backends.protocol import Backend, stamp_of
from ckpt.io_backends.registry import absolute_url, open_backend

LATELY = 2.0
"""Seconds: the times of no file system are coarser."""
MOST = 4096
"""Files beyond which looking at each of them is not cheap any more."""


class _Seen(NamedTuple):
    size: int
    stamp: str
    modified: float


class Watch:
    """The files right below ``url``, or the one there, as they were when this was made. Of storages where a look costs a request, none."""

    def __init__(self, url: str) -> None:
        backend: Backend = open_backend(url)
        names = [] if backend.grain.calls else [name for name in backend.children() if not name.endswith("/")]
        if not names and not backend.grain.calls and (single := open_single(url)) is not None:
            backend, names = single.parent, [single.name]
        self._backend = backend
        self._before = {name: _look(backend, name) for name in names} if len(names) <= MOST else {}

    def are_as_they_were(self, sources: Iterable[Source]) -> bool:
        """Whether it is certain that neither these files nor any others that were seen have changed since."""
        root = absolute_url(self._backend.url)
        if any(s.root != root or s.path not in self._before for s in sources):
            return False
        latest = time.time() - LATELY
        return all(
            seen is not None and seen.modified < latest and _look(self._backend, name) == seen for name, seen in self._before.items()
        )


def _look(backend: Backend, name: str) -> _Seen | None:
    """None if the storage does not say enough of a file, or it has gone."""
    try:
        size, stamp, modified = backend.size(name), stamp_of(backend, name), backend.modified(name)
    except NotFoundError:
        return None
    return None if stamp is None or modified is None else _Seen(size, stamp, modified)
