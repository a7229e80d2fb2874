"""That all second copies of a checkpoint were seen: a small file beside its index on every node, for ``ckpt memory status``. No torch.

The leader writes it when the copies are complete, and removes it when a later life of the job finds that some are missing. Nothing that
loads or copies asks it: what nodes have is asked of the nodes themselves.
"""

from __future__ import annotations

import json
from contextlib import suppress

from ckpt.errors import CkptError, ConflictError, NotFoundError
from ckpt.formats.native.paths import COPIES, data_prefix, index_path
from ckpt.formats.native.writer import committed_id
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend

from .backend import SpreadBackend
from .nodes import NodeSet


def note_copies(nodes: NodeSet, url: str, id: str) -> None:
    """Note on every node of the job that the checkpoint ``id`` at ``url`` has all of its copies."""
    backend, path = open_backend(url), index_path(id, COPIES)
    assert isinstance(backend, SpreadBackend)
    data = json.dumps({"nodes": [node.name for node in nodes.nodes]}).encode()

    def put(node: int) -> None:
        with suppress(ConflictError):  # an earlier life of the job has noted it
            backend.node(node).put_if(path, data, expected=None)

    nodes.ask_all(put)
    if committed_id(backend) != id:  # it was removed or replaced meanwhile, and nobody would remove the note
        backend.delete(path)


def forget_copies(nodes: NodeSet, url: str, id: str) -> None:
    """Some copies are missing, though an earlier life of the job may have noted that it has all. Costs no message if it has not."""
    backend, path = open_backend(url), index_path(id, COPIES)
    assert isinstance(backend, SpreadBackend)
    with suppress(NotFoundError):
        backend.node(nodes.own).size(path)
        backend.delete(path)


def copies_seen(url: str) -> bool | None:
    """Whether all copies of the checkpoint at ``url``, in the memory of this machine, were seen. None if no other machine had a part in it:
    all of its files are here, and no copies are noted; or if it cannot be read, or only by those who ask for what it is.
    """
    backend = open_backend(url)
    try:
        id = committed_id(backend)
        if id is None:
            return None
        if COPIES in backend.list_dir(f"index-{id}"):
            return True
        return None if _is_all_here(backend, url, id) else False
    except CkptError:
        return None


def _is_all_here(backend: Backend, url: str, id: str) -> bool:
    here = {entry.path for entry in backend.list_prefix(data_prefix(id))}
    own = (file.path for file in open_catalog(url).files if file.path.startswith(data_prefix(id)))  # others are of checkpoints referred to
    return all(path in here for path in own)
