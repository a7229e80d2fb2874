"""Where checkpoints are stored: the storage port (``protocol``), its backends, and ``open_backend``, which finds the one for a URL.

``conformance`` is a public test suite for backends; it needs pytest and is imported only by name.
"""

from __future__ import annotations

from .faulty import Fault, FaultyBackend, FaultyProcess, SimulatedCrash
from .inprocess import InProcessBackend
from .posix.backend import PosixBackend
from .protocol import Backend, IOHints, ObjectMeta, PendingUpload, Writer
from .registry import join_url, open_backend, wrap_backends

__all__ = [
    "Backend",
    "Fault",
    "FaultyBackend",
    "FaultyProcess",
    "IOHints",
    "InProcessBackend",
    "ObjectMeta",
    "PendingUpload",
    "PosixBackend",
    "SimulatedCrash",
    "Writer",
    "join_url",
    "open_backend",
    "wrap_backends",
]
