"""File systems of fsspec that count what they are asked: each call of one of these methods is a request where the storage is far away."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

CALLS = ("info", "ls", "find", "cat_file", "pipe_file", "put_file", "rm_file", "mv", "modified")


class _Tally(threading.local):
    """Per thread: a call that one of these methods makes of another one is no request of its own."""

    inside = False


calls: Counter[str] = Counter()
_tally = _Tally()
_lock = threading.Lock()


def _counted(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if _tally.inside:
            return getattr(super(type(self), self), name)(*args, **options)
        _tally.inside = True
        with _lock:
            calls[name] += 1
        try:
            return getattr(super(type(self), self), name)(*args, **options)
        finally:
            _tally.inside = False

    return call


class CountedObjects(MemoryFileSystem):
    """An object store: ``counted://``."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012  as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))


class CountedFiles(LocalFileSystem):
    """Directories of this machine, as ``local://``."""


for _name in CALLS:
    setattr(CountedObjects, _name, _counted(_name))
    setattr(CountedFiles, _name, _counted(_name))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Inside the block ``counted://`` is known, and ``local://`` counts; gives what was called, which the caller may clear."""
    fsspec.register_implementation("counted", CountedObjects, clobber=True)
    fsspec.register_implementation("local", CountedFiles, clobber=True)
    calls.clear()
    try:
        yield calls
    finally:
        fsspec.register_implementation("local", LocalFileSystem, clobber=True)
        CountedObjects.store.clear()
        CountedObjects.pseudo_dirs[:] = [""]
