"""``testbucket://``: an object store in memory that is reached through fsspec, and can be told to fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """An object store: no directories, and objects that appear whole."""

    protocol = "testbucket"
    store: dict[str, Any] = {}  # noqa: RUF012  as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012
    answers: dict[str, Exception] = {}  # noqa: RUF012
    """Method → what it raises instead of doing anything."""
    lost: dict[str, Exception] = {}  # noqa: RUF012
    """Method → what it raises after it did what it should."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("testbucket://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if "pipe_file" in self.answers:
            raise self.answers["pipe_file"]
        super().pipe_file(path, value, mode, **options)
        if "pipe_file" in self.lost:
            raise self.lost["pipe_file"]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if "cat_file" in self.answers:
            raise self.answers["cat_file"]
        found: bytes = super().cat_file(path, start, end, **options)
        return found[:-1] if "short" in self.answers else found


@contextmanager
def buckets() -> Iterator[None]:
    """Inside the block fsspec knows the scheme; afterwards nothing is left of what was stored."""
    fsspec.register_implementation("testbucket", Bucket, clobber=True)
    try:
        yield
    finally:
        for kept in (Bucket.store, Bucket.answers, Bucket.lost):
            kept.clear()
        Bucket.pseudo_dirs[:] = [""]
