"""Checkpoints of Megatron-LM and Megatron-Core as catalogs: the format ``torch`` of files per model-parallel rank, and ``torch_dist``.

Whatever the layout that wrote them, they are one training checkpoint: ``model.<parameter>`` and, for an optimizer,
``optimizer.state.model.<parameter>.<key>``, with names as in ``names``. Nothing is rearranged: bytes are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.formats.protocol import Format
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.text.json_reader import parse_json

from .base import RANK_DIRECTORY, MegatronCatalog

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

TRACKER = "latest_checkpointed_iteration.txt"
METADATA_JSON = "metadata.json"
_MAX_JSON = 1 << 16


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether it is a directory of one iteration in one of the two formats, or one above it that says which is the latest."""
    if _is_iteration(backend, names, ""):
        return True
    if TRACKER not in names:
        return False
    try:
        below = _latest(backend)
    except CkptError:
        return False
    return _is_iteration(backend, backend.list_dir(below), below + "/")


def _is_iteration(backend: Backend, names: Sequence[str], below: str) -> bool:
    return any(RANK_DIRECTORY.fullmatch(name) for name in names) or _is_torch_dist(backend, names, below)


def _is_torch_dist(backend: Backend, names: Sequence[str], below: str) -> bool:
    path = below + METADATA_JSON
    if METADATA_JSON not in names or backend.size(path) > _MAX_JSON:
        return False
    try:
        metadata = parse_json(backend.read(path))
    except ValueError:
        return False
    return isinstance(metadata, dict) and metadata.get("sharded_backend") == "torch_dist"


def _latest(backend: Backend) -> str:
    """The directory of the latest iteration."""
    text = backend.read(TRACKER, 0, min(backend.size(TRACKER), 64)).decode("utf-8", "replace").strip()
    if text == "release":
        return text
    if not text.isascii() or not text.isdigit():
        raise CorruptError(
            f"{text!r} is no iteration", where=f"{backend.url.rstrip('/')}/{TRACKER}", hint="open the directory of one iteration"
        )
    return f"iter_{int(text):07d}"


def open_megatron(backend: Backend) -> MegatronCatalog:
    """Open what ``recognises`` found.

    Raises:
        NotFoundError: the latest iteration is not there.
        FormatError: a form of the format that is not read, or parameters whose layout is not known.
        CorruptError: files are damaged or missing.
    """
    from .legacy.rank_files import open_legacy  # the catalogs of other formats ask this module too, and need none of these
    from .torch_dist import open_torch_dist

    names = backend.list_dir()
    if not _is_iteration(backend, names, ""):
        below = _latest(backend)
        names = backend.list_dir(below)
        if not names:
            raise NotFoundError("the latest iteration is missing", where=join_url(backend.url, below), hint="open another one")
        backend = open_backend(join_url(backend.url, below))
    try:
        return open_torch_dist(backend) if _is_torch_dist(backend, names, "") else open_legacy(backend, names)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as err:
        if isinstance(err, CkptError):
            raise
        what = f"the files do not say what Megatron writes ({type(err).__name__}: {err})"
        raise CorruptError(what, where=backend.url, hint="the files are damaged, or of different saves: copy the checkpoint again") from err


FORMAT = Format(name="Megatron", recognises=recognises, open=open_megatron)
"""This format, for ckpt.formats.registry."""
