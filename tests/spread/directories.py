"""Nodes of one job in one process: a directory for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckpt.io_backends import Backend, PosixBackend
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.nodes import NodeSet, StorageNode

Kind = Callable[[str], Backend]
"""Makes the backend of a directory."""


def nodes_at(
    path: Path, names: Iterable[str], kinds: Iterable[Kind] = (), *, own: int = 0, copies: int = 1, parity: int | None = None
) -> NodeSet:
    """Nodes whose files are in directories of these names. ``kinds``: how the first of them are opened, if not as other directories."""
    kind_of = dict(zip(names, kinds, strict=False))
    nodes = [StorageNode(name=n, domain=n, below=partial(_below, kind_of.get(n, PosixBackend), path / n)) for n in names]
    return NodeSet(url=run_url(f"nodes-{'-'.join(names)}"), nodes=nodes, own=own, copies=0 if parity else copies, parity=parity)


def _below(kind: Kind, directory: Path, prefix: str) -> Backend:
    return kind(str(directory / prefix))


@contextmanager
def registered(nodes: NodeSet) -> Iterator[NodeSet]:
    """For the length of the block, URLs below that of ``nodes`` lead to them."""
    register_run(nodes)
    try:
        yield nodes
    finally:
        unregister_run(nodes)
