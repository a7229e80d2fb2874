"""References: rows of files.arrow for data files that lie in other checkpoints of the same run (docs/format.md §14).

    runs/a/step-00000100/data/<id>-00000.safetensors        all tensors: the frozen ones, and what is trained
    runs/a/step-00000200/data/<id>-00000.safetensors        what is trained
    runs/a/step-00000200/index-<id>/files.arrow             0: data/<id>-00000.safetensors
                                                            1: ../step-00000100/data/<id>-00000.safetensors

A reference names the file that has the bytes, never another checkpoint's reference to it: whatever the chain of bases was, one step leads
to the data. The path goes up once and down into a sibling's ``data/``, so a run that is moved as a whole stays readable, and an index of a
stranger can name nothing but data files of the directory that it lies in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, ConflictError, NotFoundError, UsageError
from ckpt.formats.external.base import ReadOnly
from ckpt.io_backends.registry import join_url, open_backend

from .paths import path_problem

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend, CopySource, IOHints, ObjectMeta


UP = "../"
_REFERENCE = re.compile(r"\.\./([^/]+)/(data/[0-9a-z]{16}-[0-9]{5,}(?:-[0-9]+)?\.safetensors)")


def is_reference(path: str) -> bool:
    """Whether a path of files.arrow leads to another checkpoint."""
    return path.startswith(UP)


def reference_problem(path: str) -> str | None:
    """Why a reference cannot be followed, or None."""
    match = _REFERENCE.fullmatch(path)
    problem = None if match is None else path_problem(path[len(UP) :])
    return f"{path!r:.200} is not a data file of another checkpoint of the run" if match is None else problem


def owner_of(path: str) -> str:
    """The directory, beside the checkpoint's own, that a reference leads to."""
    return path.split("/", 2)[1]


def split_url(backend: Backend) -> tuple[str, str]:
    """The run that a checkpoint lies in, as a URL, and the name of its directory there."""
    run, _, name = backend.url.rstrip("/").rpartition("/")
    if not name or run.endswith((":", ":/", "//")):
        raise UsageError("it lies in no directory, so it has no neighbours to refer to", where=backend.url, hint="save below a run")
    return run or "/", name


def reference_to(path: str, owner: str) -> str:
    """A path of files.arrow of the checkpoint ``owner``, as its neighbours have to write it."""
    return path if is_reference(path) else f"{UP}{owner}/{path}"


def check_not_replaced(references: Iterable[str], base: str, name: str) -> None:
    """That none of these references, which were found in the checkpoint ``base``, leads to ``name``, which a save is about to replace."""
    if any(owner_of(path) == name for path in references):
        raise ConflictError(
            f"{base} refers to files of {name}, which this save would replace",
            where=name,
            hint="save to another URL, or without a base",
        )


class RunBackend(ReadOnly):
    """What a checkpoint with references is read through: its own storage, and below ``../`` that of its run.

    Of a checkpoint that is opened through a link, neighbours are those of the link where they are there, else those of the directory that
    it leads to: somebody may link to a step of another run, or move a step away and leave a link in its place.
    """

    why = "a checkpoint is not written to through its references"

    def __init__(self, own: Backend) -> None:
        self._own = own
        self._runs: dict[str, Backend] = {}

    def owner_url(self, path: str) -> str:
        """Where the checkpoint is that a reference leads to."""
        return join_url(self._run(path).url, owner_of(path))

    def _run(self, path: str) -> Backend:
        owner = owner_of(path)
        if owner not in self._runs:
            run, target = open_backend(split_url(self._own)[0]), self._own.link()
            if target is not None and not _is_there(run, path[len(UP) :]):
                run = open_backend(split_url(open_backend(target))[0])
            self._runs[owner] = run
        return self._runs[owner]

    def _place(self, path: str) -> tuple[Backend, str]:
        if not is_reference(path):
            return self._own, path
        problem = reference_problem(path)
        if problem is not None:
            raise UsageError(problem, where=self.url, hint="`ckpt verify` says what is wrong with this index")
        return self._run(path), path[len(UP) :]

    @property
    def url(self) -> str:
        return self._own.url

    @property
    def io_hints(self) -> IOHints:
        return self._own.io_hints

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        backend, inner = self._place(path)
        return backend.read(inner, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        backend, inner = self._place(path)
        backend.read_into(inner, offset, buffer)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        backend, inner = self._place(path)
        backend.read_hashed(inner, offset, buffer, update)

    def read_whole(self, path: str, limit: int) -> bytes:
        backend, inner = self._place(path)
        return backend.read_whole(inner, limit)

    def read_start(self, path: str, length: int) -> tuple[bytes, int]:
        backend, inner = self._place(path)
        return backend.read_start(inner, length)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        backend, inner = self._place(path)
        backend.evict(inner, offset, length)

    def nearby(self, paths: Collection[str]) -> Collection[str] | None:
        """See ``Backend.nearby``."""
        near = self._own.nearby([path for path in paths if not is_reference(path)])
        if near is None:
            return None
        of_run: dict[Backend, list[str]] = {}
        with suppress(CkptError):
            for path in filter(is_reference, paths):
                backend, inner = self._place(path)
                of_run.setdefault(backend, []).append(inner)
        others = (UP + inner for backend, inners in of_run.items() for inner in backend.nearby(inners) or ())
        return {*near, *others}

    def size(self, path: str) -> int:
        backend, inner = self._place(path)
        return backend.size(inner)

    def modified(self, path: str) -> float | None:
        """See ``Backend.modified``."""
        backend, inner = self._place(path)
        return backend.modified(inner)

    def version_token(self, path: str) -> str | None:
        """See ``Backend.version_token``."""
        backend, inner = self._place(path)
        return backend.version_token(inner)

    def link(self, path: str = "") -> str | None:
        """See ``Backend.link``."""
        backend, inner = self._place(path)
        return backend.link(inner)

    def copy_source(self, path: str) -> CopySource | None:
        """See ``Backend.copy_source``."""
        backend, inner = self._place(path)
        return backend.copy_source(inner)

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """The checkpoint's own files."""
        return self._own.list_prefix(prefix)

    def list_dir(self, prefix: str = "") -> list[str]:
        """The checkpoint's own files."""
        return self._own.list_dir(prefix)


def _is_there(backend: Backend, path: str) -> bool:
    try:
        backend.size(path)
    except NotFoundError:
        return False
    return True
