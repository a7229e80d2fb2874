"""The CRC-32 of bytes one after another from those of their parts, so that parts need not be read in order. Pure.

(Source: ``crc32_combine`` of zlib.) A sum is a polynomial over GF(2); zeros that follow multiply it by a power of x.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320


def joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of bytes with the CRC-32 ``first``, followed by ``length`` bytes with the CRC-32 ``second``."""
    power = 3  # of two: bits of a byte
    while length:
        if length & 1:
            first = _times(_zeros(power), first)
        length >>= 1
        power += 1
    return first ^ second


def of_parts(parts: Iterable[tuple[int, int, int]], length: int) -> int:
    """The CRC-32 of ``length`` bytes that are zeros but for ``parts``: where each begins, its length, and its CRC-32, in order."""
    total = at = 0
    for start, size, crc in parts:
        total = joined(joined(total, zlib.crc32(bytes(start - at)), start - at), crc, size)
        at = start + size
    return joined(total, zlib.crc32(bytes(length - at)), length - at)


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """The matrix that ``2 ** power`` zero bits make."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << n for n in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
