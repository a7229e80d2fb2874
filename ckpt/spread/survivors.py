"""Memory daemons of machines where no rank runs (``CKPT_MEMORY``): what the job before had there is read, never changed. No torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial

from ckpt import settings
from ckpt.concurrency.workers import map_tasks
from ckpt.errors import AccessError, CkptError, FormatError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.memory.client import secret_for
from ckpt.memory.remote import RemoteMemory

from .nodes import StorageNode

HELLO_SECONDS = 10.0
"""After so long without an answer a machine counts as gone."""
_THREADS = 16

log = logging.getLogger("ckpt")


def surviving_nodes(directory: str, known: Collection[str]) -> Sequence[StorageNode]:
    """Those that answer of the daemons that ``CKPT_MEMORY`` names, without the ones whose ids are ``known``: these are the job's own.
    ``directory``: ``mem://name`` of the run."""
    addresses = settings.memory_machines()
    if not addresses:
        return ()
    greeted = map_tasks(_greet, addresses, _THREADS, "ckpt-survivors")
    met = {address: who for address, who in zip(addresses, greeted, strict=True) if who is not None}
    there = {id: (address, host) for address, (id, host) in met.items() if id not in known}
    return [_node(address, host, directory) for address, host in there.values()]


def _greet(address: str) -> tuple[str, str] | None:
    memory = RemoteMemory(address, secret_for(address), HELLO_SECONDS)
    try:
        return memory.hello()
    except (AccessError, FormatError):
        raise
    except CkptError as err:
        log.warning("the memory daemon at %s (CKPT_MEMORY) is passed over: %s", address, err)
        return None
    finally:
        memory.close()


def _node(address: str, host: str, directory: str) -> StorageNode:
    root = f"mem://{address}/{directory.removeprefix('mem://')}"
    return StorageNode(name=f"{host}:{root}", domain=host, below=partial(_below, root), host=host, in_memory=True)


def _below(root: str, prefix: str) -> Backend:
    return open_backend(join_url(root, prefix.rstrip("/")) if prefix else root)
