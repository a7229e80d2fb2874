"""Where checkpoints are stored: the storage port (``protocol``), its backends, and ``open_backend``, which finds the one for a URL.

``conformance`` is a public test suite for backends; it needs pytest and is imported only by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

from .inprocess import InProcessBackend
from .posix_backend import PosixBackend
from .protocol import Backend, IOHints, ObjectMeta, PendingUpload, Writer
from .registry import join_url, open_backend, wrap_backends

if TYPE_CHECKING:
    from .faulty import Fault as Fault
    from .faulty import FaultyBackend as FaultyBackend
    from .faulty import FaultyProcess as FaultyProcess
    from .faulty import SimulatedCrash as SimulatedCrash

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

if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, dict.fromkeys(("Fault", "FaultyBackend", "FaultyProcess", "SimulatedCrash"), ".faulty"))
