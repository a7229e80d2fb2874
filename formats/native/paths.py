"""Where the files of a checkpoint are, relative to its root (docs/format.md §1), and those of others that it refers to (§14)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress

from ckpt.errors import CkptError, ConflictError, NotFoundError, UsageError
from ckpt.formats.external import Routed, routed
from ckpt.io_backends.checks import path_problem
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend

TENSORS = "tensors.arrow"
GRIDS = "grids.arrow"
FILES = "files.arrow"
STATE = "state.json"
INDEX_NAMES = (TENSORS, GRIDS, FILES, STATE)
SOURCES = "sources.arrow"
EXTENTS = "extents.arrow"
VIRTUAL_NAMES = (SOURCES, EXTENTS)
"""Index files that virtual checkpoints have besides."""
RANK_TABLE = "ranks.arrow"
RANK_ROWS = "ranks.jsonl"
RANK_NAMES = (RANK_TABLE, RANK_ROWS)
"""Index files that checkpoints have besides whose values of single ranks lie apart. The rows are read when somebody asks for them."""
SPANS = "spans.json"
"""Lies beside the index, but is no part of it: no reader of tensors needs it, and no digest of the checkpoint covers it."""

PROGRESS = "progress.json"
"""Lies beside the index of a save that goes on (``progress``)."""
COPIES = "copies.json"
"""Lies beside the index of a checkpoint in memory of which all second copies were seen on other machines (``nodes.copies``)."""
CLEARING = "clearing"
"""Lies beside the index while somebody clears away a save that was not committed (``clearing``)."""
_BESIDE_INDEX = (*INDEX_NAMES, *VIRTUAL_NAMES, *RANK_NAMES, SPANS, PROGRESS, COPIES, CLEARING)

_OF_A_SAVE = re.compile(
    rf"index-([0-9a-z]{{16}})/(?:{'|'.join(map(re.escape, _BESIDE_INDEX))})|data/([0-9a-z]{{16}})-\d{{5,}}(?:-\d+)?\.safetensors"
    r"|parity/([0-9a-z]{16})-[0-9a-f]{16}\.(?:xor|json)"
)

_NUMBER = re.compile(r"(?:(?:^|.*[-_=.])(?:step|iter|iteration|checkpoint|ckpt)[-_=]?)?([0-9]+)", re.IGNORECASE | re.DOTALL)

INDEX_LIMIT = 256 << 20
"""Bytes of an index file that are written or read: a million tensors, or some million plain values, take a tenth of it."""
DIGEST_DIGITS = 32
_HEX = frozenset("0123456789abcdef")


def index_path(id: str, name: str) -> str:
    """Path of the index file ``name`` of save ``id``."""
    return f"index-{id}/{name}"


def data_path(id: str, rank: int, number: int = 0) -> str:
    """Path of a data file; ``number`` tells the files of one rank apart."""
    return f"{data_prefix(id)}{rank:05d}{f'-{number}' if number else ''}.safetensors"


def data_number(path: str) -> int:
    """The number of a file that ``data_path`` names."""
    return int((path.removesuffix(".safetensors").split("-")[2:] or ["0"])[0])


def data_prefix(id: str) -> str:
    """What the paths of all data files of save ``id`` start with."""
    return f"data/{id}-"


def parity_prefix(id: str) -> str:
    """What the paths of all parity files of save ``id`` start with: they lie on nodes beside the data files of others (``ckpt.nodes``)."""
    return f"parity/{id}-"


def id_of(path: str) -> str | None:
    """The save that a path belongs to, or None if it is not a path of this format: a file of another name is somebody else's."""
    match = _OF_A_SAVE.fullmatch(path)
    return (match[1] or match[2] or match[3]) if match else None


def has_orphans(backend: Backend, prefix: str = "") -> bool:
    """Whether files of a save lie below ``prefix`` (empty, or ending in a slash), which has no commit record: it did not finish."""
    names = backend.list_dir(prefix.rstrip("/"))
    indexes = [name for name in names if name.endswith("/") and id_of(f"{name}{STATE}")]
    if any(id_of(f"{index}{name}") for index in indexes for name in backend.list_dir(f"{prefix}{index}")):
        return True
    return "data/" in names and any(id_of(f"data/{name}") for name in backend.list_dir(f"{prefix}data"))


def is_there(backend: Backend, path: str) -> bool:
    """Whether there is such an object."""
    try:
        backend.size(path)
    except NotFoundError:
        return False
    return True


def others_files(backend: Backend) -> list[str]:
    """Names right below the root of ``backend`` that are no part of a checkpoint of this format, nor of what a killed save or copy left.
    Hidden files do not count, nor do directories without files."""

    def is_ours(name: str) -> bool:
        if name == "data/":
            return all(id_of(f"data/{file}") for file in backend.list_dir("data"))
        return name.startswith(".") or id_of(f"{name}{STATE}") is not None

    names = [name for name in backend.list_dir() if not is_ours(name)]
    return [name for name in names if not name.endswith("/") or next(iter(backend.list_prefix(name)), None) is not None]


def step_number(name: str) -> int | None:
    """The step in the name of a directory such as ``step-00001000``, ``global_step100``, ``iteration_5``, ``weights-ckpt5`` or ``100``.

    None if there is none: ``timestep7`` and ``llama-3`` are no steps."""
    match = _NUMBER.fullmatch(name.strip("/"))
    return int(match[1]) if match else None


def is_digest(text: object, digits: int = DIGEST_DIGITS) -> bool:
    """Whether ``text`` is a digest as the format writes it: lower-case hex of the right length."""
    return isinstance(text, str) and len(text) == digits and _HEX.issuperset(text)


# References: rows of files.arrow for data files that lie in other checkpoints of the same run (docs/format.md §14).
#
#     runs/a/step-00000100/data/<id>-00000.safetensors        all tensors: the frozen ones, and what is trained
#     runs/a/step-00000200/data/<id>-00000.safetensors        what is trained
#     runs/a/step-00000200/index-<id>/files.arrow             0: data/<id>-00000.safetensors
#                                                             1: ../step-00000100/data/<id>-00000.safetensors
#
# A reference names the file that has the bytes, never another checkpoint's reference to it: whatever the chain of bases was, one step leads
# to the data. The path goes up once and down into a sibling's ``data/``, so a run that is moved as a whole stays readable, and an index of
# a stranger can name nothing but data files of the directory that it lies in.

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
            f"{base} refers to files of {name}, which this save would replace", where=name, hint="save to another URL, or without reuse="
        )


class RunBackend(Routed):
    """What a checkpoint with references is read through: its own storage, and below ``../`` that of its run.

    Of a checkpoint that is opened through a link, neighbours are those of the link where they are there, else those of the directory that
    it leads to: somebody may link to a step of another run, or move a step away and leave a link in its place.
    """

    why = "a checkpoint is not written to through its references"

    def __init__(self, own: Backend) -> None:
        self.inner = own
        self._runs: dict[str, Backend] = {}

    def owner_url(self, path: str) -> str:
        """Where the checkpoint is that a reference leads to."""
        return join_url(self._run(path).url, owner_of(path))

    def _run(self, path: str) -> Backend:
        owner = owner_of(path)
        if owner not in self._runs:
            run, target = open_backend(split_url(self.inner)[0]), self.inner.link()
            if target is not None and not is_there(run, path[len(UP) :]):
                run = open_backend(split_url(open_backend(target))[0])
            self._runs[owner] = run
        return self._runs[owner]

    def route(self, path: str) -> tuple[Backend, str]:
        if not is_reference(path):
            return self.inner, path
        problem = reference_problem(path)
        if problem is not None:
            raise UsageError(problem, where=self.url, hint="`ckpt verify` shows the faults of this index")
        return self._run(path), path[len(UP) :]

    def nearby(self, paths: Collection[str]) -> Collection[str] | None:
        near = self.inner.nearby([path for path in paths if not is_reference(path)])
        if near is None:
            return None
        of_run: dict[Backend, list[str]] = {}
        with suppress(CkptError):
            for path in filter(is_reference, paths):
                backend, inner = self.route(path)
                of_run.setdefault(backend, []).append(inner)
        others = (UP + inner for backend, inners in of_run.items() for inner in backend.nearby(inners) or ())
        return {*near, *others}

    modified = routed(Backend.modified)
    link = routed(Backend.link)
    copy_source = routed(Backend.copy_source)
