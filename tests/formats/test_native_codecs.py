"""Codecs: what goes in comes out, bit for bit; hostile blobs end in a clear error, in bounded memory, and never outside of ``out``."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.codecs import CODECS, ITEMSIZES, decode, encode, encode_difference, encode_into
from ckpt.io_backends.registry import open_backend
from tests.formats.native_sample import coded_samples, read, save
from tests.formats.oracle import CODECS as ORACLE
from tests.formats.oracle import read as oracle
from tests.pairwise import pairwise

RNG = np.random.default_rng(5)


def bf16(count):
    return (RNG.normal(0, 0.02, count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def fp32(count):
    return RNG.normal(0, 0.02, count).astype("<f4").tobytes()


def upcast(count):
    return (np.frombuffer(bf16(count), "<u2").astype("<u4") << 16).tobytes()


def odd_floats(count):
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3e38, 1.0], dtype="<f4")
    raw = values.view("<u4")
    raw[1::3] |= 0x7FC12345  # NaNs with payloads
    return np.resize(raw, count).tobytes()


def numbers(count):
    return np.arange(count, dtype="<i8").tobytes()


def mixed(count):
    """Noise, then zeros, then weights: planes of one chunk differ from block to block."""
    third = count // 3
    return RNG.integers(0, 256, 2 * third, dtype=np.uint8).tobytes() + bytes(2 * third) + bf16(count - 2 * third)


MADE = {
    "bf16": (bf16, 2),
    "fp32": (fp32, 4),
    "upcast": (upcast, 4),
    "odd floats": (odd_floats, 4),
    "int64": (numbers, 8),
    "complex128": (lambda n: RNG.normal(size=2 * n).astype("<f8").tobytes(), 16),
    "bytes": (lambda n: (RNG.normal(0, 3, n)).astype(np.int8).tobytes(), 1),
    "mixed": (mixed, 2),
}
COUNTS = [1, 7, 1000, 4097, 131_071, (1 << 18) + 1, 600_001]
"""Less than a block, some elements over one, and several blocks with planes that were sampled."""
ALONE = [name for name, codec in CODECS.items() if not codec.anchored]
"""Those that need no anchor."""


def back(codec, blob, size, itemsize):
    out = bytearray(b"\xa5" * (size + 32))
    decode(codec, memoryview(blob), memoryview(out)[16 : 16 + size], itemsize)
    assert out[:16] == out[-16:] == b"\xa5" * 16
    return bytes(out[16 : 16 + size])


@pytest.mark.parametrize(("codec", "kind", "count"), pairwise(ALONE, list(MADE), COUNTS))
def test_what_goes_in_comes_out(codec, kind, count):
    make, itemsize = MADE[kind]
    data = make(count)
    assert len(data) == count * itemsize
    blob = encode(codec, memoryview(data), itemsize)
    if blob is not None:
        assert len(blob) <= 0.97 * len(data)
        assert back(codec, blob, len(data), itemsize) == data
        assert ORACLE[codec](bytes(blob), len(data), itemsize) == data


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("codec", ALONE)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_data(codec, itemsize, data):
    """Runs, repeats and noise of any length."""
    parts = data.draw(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 2000)), min_size=1, max_size=6))
    raw = b"".join(part * times for part, times in parts)
    raw = raw[: len(raw) // itemsize * itemsize]
    blob = encode(codec, memoryview(raw), itemsize)
    if blob is not None:
        assert 0 < len(blob) <= 0.97 * len(raw)
        assert back(codec, blob, len(raw), itemsize) == raw
        assert ORACLE[codec](bytes(blob), len(raw), itemsize) == raw


@pytest.mark.parametrize(
    ("kind", "codec", "low", "high"),
    [
        ("bf16", "planes-zstd", 66, 67.5),
        ("fp32", "planes-zstd", 82, 84.5),
        ("upcast", "planes-zstd", 32, 34.5),
        ("int64", "planes-zstd", 0, 5),
        ("odd floats", "planes-zstd", 0, 10),
        ("bf16", "zstd", 70, 80),
        ("upcast", "zstd", 40, 52),
    ],
)
def test_how_small(kind, codec, low, high):
    make, itemsize = MADE[kind]
    data = make(1 << 20)
    assert low < 100 * len(encode(codec, memoryview(data), itemsize)) / len(data) < high


@pytest.mark.parametrize(("size", "codec", "itemsize"), pairwise([0, 16, 1 << 14, 3 << 20], ALONE, ITEMSIZES))
def test_not_worth_it(codec, itemsize, size):
    assert encode(codec, memoryview(RNG.bytes(size)), itemsize) is None


@pytest.mark.parametrize("codec", ALONE)
def test_zeros_take_next_to_nothing(codec):
    assert len(encode(codec, memoryview(bytes(8 << 20)), 4)) < 8 << 10


def test_a_plane_that_the_sample_took_for_noise_is_still_found_constant():
    """Noise where the samples are, zeros in between: blocks without noise are stored in a few bytes."""
    data = np.zeros(4 << 20, dtype="<u2")
    data[:] = np.frombuffer(bf16(1), "<u2")
    starts = np.linspace(0, len(data) - 8192, 8).astype(int)
    for s in starts:
        data[s : s + 8192] = RNG.integers(0, 256, 8192)
    blob = encode("planes-zstd", data.data, 2)
    assert len(blob) < 0.6 * data.nbytes
    assert back("planes-zstd", blob, data.nbytes, 2) == data.tobytes()


@pytest.mark.parametrize("codec", ALONE)
def test_memory_of_any_format_and_alignment(codec):
    data = bf16(300_000)
    wanted = bytes(encode(codec, memoryview(data), 2))
    assert encode(codec, np.frombuffer(data, "<u2").data, 2) == wanted
    shifted = bytearray(b"x" + data)
    assert encode(codec, memoryview(shifted)[1:], 2) == wanted
    out = bytearray(len(data) + 1)
    decode(codec, memoryview(b"x" + wanted)[1:], memoryview(out)[1:], 2)
    assert out[1:] == data
    typed = np.zeros(300_000, dtype="<u2")
    decode(codec, memoryview(wanted), typed.data, 2)
    assert typed.tobytes() == data


@pytest.mark.parametrize("codec", ALONE)
def test_encode_into(codec):
    data = bf16(300_000)
    blob = bytes(encode(codec, memoryview(data), 2))
    out = bytearray(b"\xa5" * (len(blob) + 9))
    assert encode_into(codec, memoryview(data), 2, memoryview(out)) == len(blob)
    assert bytes(out) == blob + b"\xa5" * 9
    exact = bytearray(len(blob))
    assert encode_into(codec, memoryview(data), 2, memoryview(exact)) == len(blob)
    for room in (0, 3, 8, 20, 100_000, len(blob) - 1):
        short = bytearray(b"\xa5" * (len(blob) + 9))
        assert encode_into(codec, memoryview(data), 2, memoryview(short)[:room]) is None
        assert bytes(short[room:]) == b"\xa5" * (len(short) - room)


def test_wrong_calls():
    with pytest.raises(FormatError, match="'lz4'"):
        encode("lz4", memoryview(b"abcd"), 2)
    with pytest.raises(FormatError, match="'lz4'"):
        decode("lz4", memoryview(b"a"), memoryview(bytearray(4)), 2)
    for size, itemsize in ((5, 2), (6, 3), (4, 0), (32, 32)):
        with pytest.raises(ValueError, match=f"{size} bytes"):
            encode("planes-zstd", memoryview(bytes(size)), itemsize)
        with pytest.raises(ValueError, match=f"{size} bytes"):
            decode("zstd", memoryview(b"a"), memoryview(bytearray(size)), itemsize)


@pytest.mark.parametrize("codec", ALONE)
def test_threads_do_not_share_scratch(codec):
    """Each thread codes data of its own, again and again, at the same time as the others."""
    wrong = []

    def run(seed):
        data = np.random.default_rng(seed).normal(0, seed + 1, 200_000).astype("<f4").view("<u4") & np.uint32(0xFFFF0000)
        for _ in range(5):
            blob = encode(codec, data.data, 4)
            out = np.zeros_like(data)
            decode(codec, memoryview(bytes(blob)), out.data, 4)
            if not np.array_equal(out, data):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("codec", ALONE)
def test_catalog_and_oracle_read_the_same(tmp_path, codec):
    backend = open_backend(str(tmp_path))
    made = coded_samples()
    assert save(backend, made, codec=codec).features == ("codecs",)
    catalog = NativeCatalog(backend)
    found = oracle(tmp_path)
    for s in made:
        assert found[s.name] == (s.dtype.name, s.shape, s.data.tobytes())
        np.testing.assert_array_equal(read(backend, catalog, s.name), s.data)


# --------------------------------------------------------------------------------------------------------- hostile blobs


def frame(data, **options):
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


def planes(blocks, itemsize=2, version=1, zero=0, count=4096):
    """A blob of planes-zstd, by hand: blocks of planes, each a kind and stored bytes."""
    blob = struct.pack("<BBHI", version, itemsize, zero, count)
    for block in blocks:
        blob += bytes(kind for kind, _ in block) + b"".join(struct.pack("<I", len(stored)) for _, stored in block)
        blob += b"".join(stored for _, stored in block)
    return blob


def refused(codec, blob, size, itemsize=2, error=CorruptError):
    """The error's text; memory stays small and nothing outside of ``out`` is touched."""
    decode("planes-zstd", memoryview(planes([[(2, b"x"), (2, b"y")]])), memoryview(bytearray(8192)), 2)  # scratch of this thread exists
    out = bytearray(size + 32)
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            decode(codec, memoryview(blob), memoryview(out)[16 : 16 + size], itemsize)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert out[:16] == out[-16:] == bytes(16)
    return str(caught.value)


def test_hand_made_planes_are_read():
    low, high = RNG.bytes(4096), bytes(range(256)) * 16
    blob = planes([[(0, low), (1, frame(high))], [(2, b"\x07"), (0, b"abc")]])
    wanted = b"".join(bytes(pair) for pair in zip(low + b"\x07" * 3, high + b"abc", strict=True))
    assert back("planes-zstd", blob, 2 * 4099, 2) == wanted == ORACLE["planes-zstd"](blob, 2 * 4099, 2)


GOOD = [(0, bytes(range(256)) * 16), (2, b"\x01")]
LARGE = frame(bytes(4097))


@pytest.mark.parametrize(
    ("blob", "word"),
    [
        (b"", "0 bytes"),
        (b"\x01\x02\x00", "no header"),
        (planes([GOOD])[:8], "truncated"),
        (planes([GOOD])[:17], "truncated"),
        (planes([GOOD])[:-1], "truncated"),
        (planes([GOOD]) + b"\0", "end at byte"),
        (planes([GOOD, [(2, b"x"), (2, b"y")]]), "end at byte"),
        (planes([GOOD], itemsize=4), "4 planes"),
        (planes([GOOD], zero=1), "and 1"),
        (planes([GOOD], count=0), "0 elements"),
        (planes([GOOD], count=1), "1 elements"),
        (planes([GOOD], count=4095), "4095 elements"),
        (planes([GOOD], count=(1 << 20) + 1), "1048577 elements"),
        (planes([[(3, b"x"), GOOD[1]]]), "kind 3"),
        (planes([[(255, bytes(4096)), GOOD[1]]]), "kind 255"),
        (planes([[(0, bytes(4095)), GOOD[1]]]), "stored in 4095"),
        (planes([[(0, b""), GOOD[1]]]), "stored in 0"),
        (planes([[(2, b""), GOOD[1]]]), "stored in 0"),
        (planes([[(2, b"ab"), GOOD[1]]]), "stored in 2"),
        (planes([[(1, b""), GOOD[1]]]), "zstd frame"),
        (planes([[(1, b"not a frame"), GOOD[1]]]), "zstd frame"),
        (planes([[(1, LARGE), GOOD[1]]]), "4097 bytes"),
        (planes([[(1, frame(bytes(4095))), GOOD[1]]]), "4095 bytes"),
        (planes([[(1, frame(bytes(4096))[:-1]), GOOD[1]]]), "cannot be decoded"),
        (planes([[(1, frame(bytes(4096)) + b"x"), GOOD[1]]]), "cannot be decoded"),
        (planes([[(1, frame(bytes(4096), write_content_size=False)), GOOD[1]]]), "frame announces"),
        (planes([[(1, frame(bytes(2048)) * 2), GOOD[1]]]), "2048 bytes"),
        (planes([[(1, bytes.fromhex("28b52ffde0") + (1 << 62).to_bytes(8, "little") + b"\x01\0\0"), GOOD[1]]]), "frame announces 46116"),
        (planes([[(1, b"\x50\x2a\x4d\x18\x00\x10\x00\x00" + bytes(4096)), GOOD[1]]]), "zstd frame"),
        (struct.pack("<BBHI2BII", 1, 2, 0, 4096, 0, 0, 2**32 - 1, 2**32 - 1), "truncated"),
    ],
)
def test_wrong_planes(blob, word):
    assert word in refused("planes-zstd", blob, 2 * 4096)


def test_planes_of_another_version():
    assert "version 2" in refused("planes-zstd", planes([GOOD], version=2), 2 * 4096, error=FormatError)


HUGE = bytes.fromhex("28b52ffde0") + (1 << 62).to_bytes(8, "little") + b"\x01\0\0"
BOMB = bytes.fromhex("28b52ffd0098") + b"\x02\0\x10\0" * 3000 + b"\x03\0\x10\0"
"""Runs of 128 KiB, each in 4 bytes."""


@pytest.mark.parametrize(
    ("blob", "word"),
    [
        (b"", "0 bytes"),
        (b"plain", "no zstd frame"),
        (frame(bytes(20000))[:-1], "truncated|cannot be decoded"),
        (frame(bytes(20000))[:4], "no zstd frame"),
        (frame(bytes(19999)), "19999 bytes"),
        (frame(bytes(20001)), "more than 20000"),
        (frame(bytes(10000)), "10000 bytes"),
        (frame(bytes(10000)) * 3, "more than 20000"),
        (frame(bytes(20000)) + b"\0", "no zstd frame"),
        (frame(bytes(20000)) + frame(b""), "1 to 1048576"),
        (frame(b""), "1 to 1048576"),
        (frame(bytes(20000), write_content_size=False), "1 to 1048576"),
        (HUGE, "1 to 1048576"),
        (BOMB, "1 to 1048576"),
        (bytes.fromhex("28b52ffd60204d") + BOMB[6:], "more than 1024 blocks"),
        (bytes.fromhex("28b52ffd60204d") + b"\x02\0\x10\0\x03\0\x10\0", "cannot be decoded"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + frame(bytes(20000)), "zstd frame"),
    ],
)
def test_wrong_frames(blob, word):
    text = refused("zstd", blob, 20000)
    assert any(w in text for w in word.split("|")), text


def test_a_blob_larger_than_its_data_is_refused():
    assert "101 bytes for a chunk of 100" in refused("zstd", bytes(101), 100)
    assert "for a chunk of 0" in refused("planes-zstd", bytes(8), 0)


@pytest.mark.parametrize("kind", ["bf16", "upcast", "int64", "complex128"])
@pytest.mark.parametrize("codec", ALONE)
def test_tampered_blobs(codec, kind):
    """Any change is either refused or gives some bytes of the right number: the digest is what tells these."""
    make, itemsize = MADE[kind]
    data = make(9000)
    blob = bytes(encode(codec, memoryview(data), itemsize) or b"")
    rng = np.random.default_rng(11)
    for _ in range(150 if blob else 0):
        changed = bytearray(blob)
        for at in rng.integers(0, min(len(blob), 200) if rng.random() < 0.7 else len(blob), rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        if rng.random() < 0.3:
            del changed[rng.integers(0, len(blob)) :]
        out = bytearray(len(data) + 32)
        with suppress(CorruptError, FormatError):
            decode(codec, memoryview(changed), memoryview(out)[16:-16], itemsize)
        assert out[:16] == out[-16:] == bytes(16)


@given(blob=st.binary(max_size=300), size=st.integers(0, 200), itemsize=st.sampled_from(ITEMSIZES))
@settings(max_examples=200, deadline=None)
def test_any_blob(blob, size, itemsize):
    for codec in ALONE:
        out = bytearray(size * itemsize)
        for start in (b"", struct.pack("<BBHI", 1, itemsize, 0, 4096), b"\x28\xb5\x2f\xfd"):
            with suppress(CorruptError, FormatError):
                decode(codec, memoryview(start + blob), memoryview(out), itemsize)


# --------------------------------------------------------------------------------------------------------- differences


def near(data, itemsize, step):
    """Elements a few units in the last place away."""
    words = np.frombuffer(data, f"<u{itemsize}").copy()
    words[::step] += 1
    return words.tobytes()


@pytest.mark.parametrize(("kind", "count"), [("bf16", 1000), ("fp32", 70_000), ("fp32", 600_001), ("int64", 4097), ("odd floats", 9000)])
def test_a_difference_and_its_anchor_give_the_chunk(kind, count):
    make, itemsize = MADE[kind]
    anchor = make(count)
    chunk = near(anchor, itemsize, 3)
    blob = encode_difference(memoryview(chunk), memoryview(bytearray(anchor)), itemsize)
    assert blob is not None and len(blob) < 0.3 * len(chunk)
    out = bytearray(len(chunk))
    decode("xor-planes-zstd", blob, memoryview(out), itemsize, memoryview(anchor))
    assert out == chunk
    difference = np.frombuffer(ORACLE["xor-planes-zstd"](bytes(blob), len(chunk), itemsize), np.uint8)
    assert (difference ^ np.frombuffer(anchor, np.uint8)).tobytes() == chunk


@pytest.mark.parametrize("count", [5000, 600_001])
def test_a_difference_that_is_not_ten_percent_smaller_is_not_taken(count):
    # The other anchor has nothing in common with the chunk, so XOR makes planes that are as noisy as those of the chunk, or more so.
    assert encode_difference(memoryview(fp32(count)), memoryview(bytearray(fp32(count))), 4) is None
    assert encode_difference(memoryview(b""), memoryview(bytearray()), 4) is None


def test_an_anchor_is_needed_where_it_is_and_only_there():
    chunk = bf16(1000)
    blob = encode_difference(memoryview(chunk), memoryview(bytearray(chunk)), 2)
    out = memoryview(bytearray(2000))
    for anchor in (None, memoryview(chunk)[:-2]):
        with pytest.raises(ValueError, match="do not go together"):
            decode("xor-planes-zstd", blob, out, 2, anchor)
    with pytest.raises(ValueError, match="do not go together"):
        decode("planes-zstd", blob, out, 2, memoryview(chunk))
    with pytest.raises(ValueError, match="needs an anchor"):
        encode("xor-planes-zstd", memoryview(chunk), 2)
