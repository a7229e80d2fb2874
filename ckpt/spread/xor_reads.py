"""The XOR of ranges of files, which are read from several nodes at once. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ckpt.concurrency.workers import run_tasks
from ckpt.plan.redundancy.parity import ParityTerm
from ckpt.settings import limits

READERS = 8
"""Ranges that are read at once."""
PIECE = 2 * limits.MIB
"""Bytes of a range that is read by itself: for each reader there is so much memory beside the result."""


def add_xor(result: memoryview, terms: Sequence[ParityTerm], read: Callable[[str, int, memoryview], None]) -> int:
    """XOR the bytes of ``terms`` into their places in ``result``; how many bytes were read.

    ``read`` fills memory with the bytes of a file from an offset on; any number of threads call it. The first piece of every term is read
    before the second one of any, so that all nodes are asked from the beginning on. What ``read`` raises is raised when no thread reads any
    more, and then ``result`` has anything in it.
    """
    whole = np.frombuffer(result, dtype=np.uint8)
    lock = threading.Lock()
    buffers: list[npt.NDArray[np.uint8]] = []

    def add(term: ParityTerm) -> None:
        try:
            buffer = buffers.pop()
        except IndexError:
            buffer = np.empty(PIECE, dtype=np.uint8)
        part = buffer[: term.length]
        read(term.path, term.offset, part.data)
        there = whole[term.at : term.at + term.length]
        with lock:  # of two terms of one place
            np.bitwise_xor(there, part, out=there)
        buffers.append(buffer)

    pieces = sorted((piece for term in terms for piece in _pieces(term)), key=lambda piece: piece.at)
    run_tasks([partial(add, piece) for piece in pieces], READERS, "ckpt-parity")
    return sum(piece.length for piece in pieces)


def _pieces(term: ParityTerm) -> Iterator[ParityTerm]:
    for start in range(0, term.length, PIECE):
        yield term._replace(offset=term.offset + start, length=min(PIECE, term.length - start), at=term.at + start)
