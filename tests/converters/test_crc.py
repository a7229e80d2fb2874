"""CRC-32 sums of parts: put together, they are what zlib says of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ckpt.converters.targets.megatron_optimizer import crc_of_parts, joined_crc


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined(first: bytes, second: bytes) -> None:
    assert joined_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_joined_with_long_parts() -> None:
    first, second = b"ckpt" * 1000, bytes(range(256)) * 40_000
    assert joined_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.tuples(st.integers(0, 70), st.binary(max_size=50)), max_size=6), st.integers(0, 70))
def test_zeros_between_parts(gaps: list[tuple[int, bytes]], end: int) -> None:
    whole = b""
    parts = []
    for gap, data in gaps:
        whole += bytes(gap)
        parts.append((len(whole), len(data), zlib.crc32(data)))
        whole += data
    whole += bytes(end)
    assert crc_of_parts(parts, len(whole)) == zlib.crc32(whole)
