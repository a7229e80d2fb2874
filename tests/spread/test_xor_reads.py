"""The XOR of ranges of several files: all are read at once, in pieces, and an error of one is raised."""

from __future__ import annotations

import random
import threading

import pytest

from ckpt.errors import StorageError
from ckpt.nodes.parity import PIECE, READERS, add_xor
from ckpt.plan.parity import ParityTerm

SIZE = PIECE * 2 + 12_345
TERMS = [ParityTerm(name, SIZE, 100 * n, SIZE - 100 * n - 7, 50 * n, name) for n, name in enumerate("abcd")]
"""Of four files; their ranges overlap in part."""


def test_all_files_are_read_at_once() -> None:
    """No file's first piece comes before every other one's was asked for."""
    randomness = random.Random(0)
    content = {term.path: randomness.randbytes(SIZE) for term in TERMS}
    first = {term.path: term.offset for term in TERMS}
    all_asked, reading, lengths = threading.Barrier(len(TERMS)), threading.Semaphore(READERS), set[int]()

    def read(path: str, offset: int, view: memoryview) -> None:
        assert reading.acquire(blocking=False), "more are read at once than there is memory for"
        if offset == first[path]:
            all_asked.wait(30)
        view[:] = content[path][offset : offset + len(view)]
        lengths.add(len(view))
        reading.release()

    before = randomness.randbytes(SIZE)
    result = bytearray(before)
    assert add_xor(memoryview(result), TERMS, read) == sum(term.length for term in TERMS)
    expected = int.from_bytes(before, "little")
    for path, _, offset, length, at, _ in TERMS:
        expected ^= int.from_bytes(content[path][offset : offset + length], "little") << 8 * at
    assert int.from_bytes(result, "little") == expected
    assert max(lengths) == PIECE


def test_an_error_of_one_is_raised() -> None:
    def read(path: str, offset: int, view: memoryview) -> None:
        if path == "c":
            raise StorageError("node c is lost")

    with pytest.raises(StorageError, match="node c is lost"):
        add_xor(memoryview(bytearray(SIZE)), TERMS, read)
