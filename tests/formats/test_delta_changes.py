"""Changed elements of a run: whatever changed comes back bit for bit, in few bytes, and what does not fit is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, UsageError
from ckpt.formats.delta_changes import apply_section, encode_run, find_changes, pack, unpack


def changed(base: np.ndarray, places: np.ndarray, kind: str) -> np.ndarray:
    """A copy of bytes in which these elements have other bits."""
    new = base.copy()
    new.view(kind)[places] ^= 1
    return new


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    length=st.integers(0, 300_000),
    share=st.sampled_from([0.0, 0.00001, 0.0005, 0.01, 0.2, 0.7, 1.0]),
    first=st.integers(0, 300_000),
    seed=st.integers(0, 99),
)
def test_what_changed_comes_back(itemsize: int, length: int, share: float, first: int, seed: int) -> None:
    """Gaps of all widths, and runs of any length; ``first`` leaves a long gap at the beginning."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, length * itemsize, dtype=np.uint8)
    places = np.flatnonzero((rng.random(length) < share) & (np.arange(length) >= first))
    new = changed(base, places, f"<u{itemsize}")
    indices, values = find_changes(base, new, itemsize)
    assert np.array_equal(indices, places) and np.array_equal(values, new.view(f"<u{itemsize}")[places])
    packed = pack(encode_run(base, new, itemsize))
    assert len(packed) <= new.nbytes + 12 and (len(packed) == 0) == (len(places) == 0)
    apply_section(base.data, unpack(packed, "here"), itemsize, "here")
    assert np.array_equal(base, new)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131070, 131071])
def test_gaps_at_the_edges_of_codes(gap: int) -> None:
    base = np.zeros(2 * (gap + 2), dtype=np.uint8)
    new = changed(base, np.array([0, gap + 1]), "<u2")
    apply_section(base.data, unpack(pack(encode_run(base, new, 2)), "here"), 2, "here")
    assert np.array_equal(base, new)


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.05), (0.03, 0.12), (0.0, 0.0)])
def test_size_of_changed_bf16(share: float, most: float) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
    places = rng.choice(2 << 20, int(share * (2 << 20)), replace=False)
    assert len(pack(encode_run(base, changed(base, places, "<u2"), 2))) <= most * base.nbytes


def test_changed_columns_are_not_taken_for_all() -> None:
    """The sample that looks for runs which changed throughout does not fall in with any pattern."""
    for columns in (2, 64, 1000, 1024, 4096):
        base = np.zeros((1 << 21) // columns * columns, dtype=np.uint16)
        new = base.copy()
        new.reshape(-1, columns)[:, 0] = 1
        assert len(pack(encode_run(base.view(np.uint8), new.view(np.uint8), 2))) <= min(3.1 / columns + 0.005, 2) * base.nbytes, columns


def test_bits_count_not_numbers() -> None:
    """Zeros of both signs differ, equal NaNs do not; complex numbers of 16 bytes are compared by halves."""
    base, new = np.array([0.0, np.nan, 1.0]), np.array([-0.0, np.nan, 1.0])
    assert find_changes(base.view(np.uint8), new.view(np.uint8), 8).indices.tolist() == [0]
    wide = np.array([1 + 2j, 3 + 4j])
    assert find_changes(wide.view(np.uint8), np.array([1 + 2j, 3 + 5j]).view(np.uint8), 16).indices.tolist() == [3]


def test_runs_that_cannot_be_compared() -> None:
    run = np.zeros(12, dtype=np.uint8)
    for base, itemsize in ((run[:8], 4), (run, 8), (run, 3)):
        with pytest.raises(UsageError):
            find_changes(base, run, itemsize)


def sparse() -> tuple[np.ndarray, bytes]:
    base = np.zeros(2000, dtype=np.uint8)
    return base, pack(encode_run(base, changed(base, np.array([3, 400, 999]), "<u2"), 2))


def test_damaged_lengths_and_indices_are_refused() -> None:
    """Nothing has changed after a refusal."""
    base, packed = sparse()
    width, codes, values = struct.unpack_from("<BxxxII", packed)
    assert (width, codes, values) == (1, 6, 6)
    body = packed[12:]
    cases = {
        "head cut off": packed[:7],
        "body cut off": packed[:-1],
        "more bytes": packed + b"\0",
        "a width that is none": struct.pack("<BxxxII", 3, 2, 6) + body,
        "fewer values": struct.pack("<BxxxII", 1, 6, 4) + body[:-2],
        "half a value": struct.pack("<BxxxII", 1, 6, 5) + body[:-1],
        "an index beyond the run": packed[:12] + bytes([254] * 6) + packed[18:],
        "ends in a skip": packed[:12] + body[:5] + b"\xff" + packed[18:],
        "dense of another length": struct.pack("<BxxxII", 0, 0, 6) + body[6:],
        "dense with gaps": struct.pack("<BxxxII", 0, 6, 6) + body,
        "huge lengths": struct.pack("<BxxxII", 4, 2**32 - 1, 2**32 - 1) + body,
    }
    for what, data in cases.items():
        with pytest.raises(CorruptError, match="a delta has"):
            apply_section(base.data, unpack(data, "here"), 2, "here")
        assert not base.any(), what


@given(st.binary(max_size=60))
def test_any_bytes_are_applied_or_refused(data: bytes) -> None:
    base = np.zeros(64, dtype=np.uint8)
    try:
        apply_section(base.data, unpack(data, "here"), 2, "here")
    except CorruptError:
        assert not base.any()


@pytest.mark.parametrize(("share", "percent"), [(0.0, 0.0), (0.01, 1.54), (0.03, 4.5), (1.0, 100.0)])
def test_sizes_are_those_of_the_documents(share: float, percent: float) -> None:
    """Weights in bfloat16, of which a share moves by one step of the mantissa, at random places (docs/formats.md)."""
    rng, elements = np.random.default_rng(7), 1 << 21
    base = ((rng.standard_normal(elements, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    new = base + (rng.random(elements, dtype=np.float32) < share).astype(np.uint16)
    packed = pack(encode_run(base.view(np.uint8), new.view(np.uint8), 2))
    assert 100 * len(packed) / base.nbytes == pytest.approx(percent, abs=0.1)
    apply_section(base.data.cast("B"), unpack(packed, ""), 2, "")
    assert np.array_equal(base, new)
