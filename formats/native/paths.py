"""Where the files of a checkpoint are, relative to its root (docs/format.md §1)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

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


def path_problem(path: str) -> str | None:
    """Why a path of an index cannot be followed, or None. A damaged or hostile index must not lead out of the checkpoint."""
    if not path or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        return f"path {path!r:.200} is not a plain path below the checkpoint"
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError:
            return f"path {path!r:.200} has a lone surrogate and names no file"
    return None


def is_digest(text: object, digits: int = DIGEST_DIGITS) -> bool:
    """Whether ``text`` is a digest as the format writes it: lower-case hex of the right length."""
    return isinstance(text, str) and len(text) == digits and _HEX.issuperset(text)
