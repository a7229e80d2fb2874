"""The spread runs that this process knows, by name: ``spread://name/step-00000100`` is opened through them. No torch."""

from __future__ import annotations

from ckpt.errors import UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import serve_scheme

from .backend import SpreadBackend
from .nodes import NodeSet

SCHEME = "spread"
_runs: dict[str, NodeSet] = {}


def run_url(name: str) -> str:
    """The URL of the run that is called ``name``."""
    return f"{SCHEME}://{name}"


def is_spread(url: str) -> bool:
    """Whether only this job can open a URL."""
    return url.startswith(f"{SCHEME}://")


def know(nodes: NodeSet) -> None:
    """From now on URLs below that of ``nodes`` lead to them."""
    _runs[nodes.url] = nodes
    serve_scheme(SCHEME, open_spread)


def forget(nodes: NodeSet) -> None:
    """The job has ended, unless another one of the same name has begun."""
    if _runs.get(nodes.url) is nodes:
        del _runs[nodes.url]


def open_spread(url: str) -> Backend:
    """The files below ``url``."""
    name, _, path = url.removeprefix(f"{SCHEME}://").rstrip("/").partition("/")
    nodes = _runs.get(run_url(name))
    if nodes is None:
        hint = "it exists while a Checkpointer with local=NodeLocal(...) does; on each node its directory has the files of that node"
        raise UsageError("no job of this process has its checkpoints there", where=url, hint=hint)
    return SpreadBackend(nodes, f"{path}/" if path else "")
