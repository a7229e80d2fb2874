"""Checkpoints of Megatron-LM and Megatron-Core as catalogs: the format ``torch`` of files per model-parallel rank, and ``torch_dist``.

Whatever the layout that wrote them, they are one training checkpoint: ``model.<parameter>`` and, for an optimizer,
``optimizer.state.model.<parameter>.<key>``, with names as in ``names``. Nothing is rearranged: bytes are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ckpt.errors import CkptError, CorruptError, FormatError, NotCommittedError, NotFoundError
from ckpt.formats.external.base import SingleFile
from ckpt.formats.protocol import Format
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.text import parse_object

from .training import COMMON, RANK_DIRECTORY, MegatronCatalog

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

TRACKER = "latest_checkpointed_iteration.txt"
METADATA_JSON = "metadata.json"
TORCH_DIST = "torch_dist"
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
    """Others call files ``metadata.json`` too; beside ``common.pt`` it is Megatron's, whatever it says."""
    if METADATA_JSON not in names:
        return False
    try:
        return COMMON in names or _sharded_backend(backend, below + METADATA_JSON) == TORCH_DIST
    except (CkptError, ValueError):
        return False


def _sharded_backend(backend: Backend, path: str) -> object:
    return parse_object(backend.read_whole(path, _MAX_JSON)).get("sharded_backend")


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
    """Open what ``recognises`` found."""
    from .legacy_ranks import open_legacy  # the catalogs of other formats ask this module too, and need none of these
    from .torch_dist import open_torch_dist

    names = backend.list_dir()
    if not _is_iteration(backend, names, ""):
        below = _latest(backend)
        names = backend.list_dir(below)
        if not names:
            raise NotFoundError("the latest iteration is missing", where=join_url(backend.url, below), hint="open another one")
        backend = open_backend(join_url(backend.url, below))
    try:
        if not _is_torch_dist(backend, names, ""):
            return open_legacy(backend, names)
        kind = _sharded_backend(backend, METADATA_JSON)
        if kind != TORCH_DIST:
            message = f"a checkpoint of Megatron in the form {kind!r}, of which {TORCH_DIST} alone is read"
            raise FormatError(message, where=backend.url, hint=f"save it again with --ckpt-format {TORCH_DIST}")
        return open_torch_dist(backend)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as err:
        if isinstance(err, CkptError):
            raise
        what = f"the files do not say what Megatron writes ({type(err).__name__}: {err})"
        raise CorruptError(what, where=backend.url, hint="the files are damaged, or of different saves: copy the checkpoint again") from err


FORMAT = Format(name="Megatron", recognises=recognises, open=open_megatron)
"""This format, for ckpt.formats.registry."""


def _is_unfinished(backend: Backend, names: Sequence[str]) -> bool:
    """Megatron writes ``common.pt`` first, then the tensors, and ``metadata.json`` last."""
    return COMMON in names and METADATA_JSON not in names and not isinstance(backend, SingleFile)


def _open_unfinished(backend: Backend) -> NoReturn:
    raise NotCommittedError(
        f"this is a Megatron save that was not finished: {COMMON} is there, and no {METADATA_JSON}",
        where=backend.url,
        hint=f"open another iteration; or, if it is a torch.save file of your own, {join_url(backend.url, COMMON)}",
    )


UNFINISHED = Format(name="unfinished Megatron save", recognises=_is_unfinished, open=_open_unfinished)
"""Recognised so that no other format takes what is there for a checkpoint."""
