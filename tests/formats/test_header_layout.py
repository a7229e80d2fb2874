"""Headers of files that are cut alike: what is found without parsing them is what json finds, and whatever else differs is parsed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.catalog import DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError
from ckpt.formats.native import header as header_module
from ckpt.formats.native import header_layout
from ckpt.formats.native.datafile import ChunkSpec, plan_data_file
from ckpt.formats.native.header import Known, find_alike, parse_header
from ckpt.plan.layout.geometry import Box

ID = "0123456789abcdef"
SHAPE = (40_000, 4)


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    header_layout.forget()


def file_of(rank: int, names: list[str], rows: int = 2, dtype: str = "float32") -> tuple[bytes, DataFile]:
    """The header of the rank that has ``rows`` rows of each tensor, and what an index says of it."""
    box = Box((rank * rows, 0), (rows, 4))
    plan = plan_data_file([ChunkSpec(name=n, box=box, shape=SHAPE, dtype=DTYPES[dtype]) for n in names], id=ID, rank=rank)
    header = plan.encode_header([1000 * rank + i for i in range(len(names))])
    return header, plan.row(header)


def by_json(header: bytes, start: int) -> dict[str, tuple[Any, ...]]:
    """The chunks by key, as json has them."""
    entries = json.loads(header[8:])
    digests = entries.pop("__metadata__")["ckpt.digests"]
    found = {}
    for i, key in enumerate(sorted(entries)):
        e = entries[key]
        first, last = e["data_offsets"]
        found[key] = (e["dtype"], tuple(e["shape"]), start + first, last - first, digests[16 * i : 16 * i + 16])
    return found


NAMES = st.lists(
    st.sampled_from(["a", "a.b", "ab", "a[1]", "a[12]", "z\\", "ä", 'q"', "a[", "b]", "0", "[7:8]", "a[3:4]"]), min_size=1, unique=True
)


@settings(max_examples=100)
@given(NAMES, st.lists(st.integers(0, 19_999), min_size=2, max_size=4))
def test_chunks_are_those_of_json(names: list[str], ranks: list[int]) -> None:
    for rank in ranks:
        data, file = file_of(rank, names)
        assert dict(parse_header(data, file, "there").chunks) == by_json(data, file.header)


def test_headers_of_ranks_that_are_cut_alike_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is done for each number of digits, not for each file."""
    parsed: list[int] = []
    parse = header_module._layout
    monkeypatch.setattr(header_module, "_layout", lambda *args: parsed.append(1) or parse(*args))
    names = [f"layers.{i}.weight" for i in range(50)]
    for rank in range(600, 4000):
        data, file = file_of(rank, names[: 50 if rank in (600, 3999) else 2])
        header = parse_header(data, file, "there")
        assert header.chunks["layers.1.weight" + f"[{2 * rank}:{2 * rank + 2},:]"].digest == f"{1000 * rank + 1:016x}"
    assert len(parsed) < 15


@pytest.mark.parametrize("change", [(b"w1[", b"w2["), (b'"F32"', b'"I32"'), (b"[2000:2002,:]", b"[2000:2x02,:]"), (b"[0,32]", b"[0,31]")])
def test_what_differs_elsewhere_is_not_alike(change: tuple[bytes, bytes]) -> None:
    first, file = file_of(1000, ["w1", "v"])
    parse_header(first, file, "there")
    text = json.loads(first[8:])
    text.pop("__metadata__")
    stripped = b"," + json.dumps(text, separators=(",", ":")).encode()[1:]
    size = file.size - file.header
    assert header_layout.recall(stripped, size) is not None
    assert change[0] in stripped
    assert header_layout.recall(stripped.replace(*change), size) is None
    assert header_layout.recall(stripped, size + 1) is None
    assert header_layout.recall(stripped.replace(b"[2000:2002,:]", b"[2002:2004,:]"), size) is not None


def entry_of(name: str, dtype: str = "float32") -> TensorEntry:
    files = np.zeros(1, dtype=np.int32)
    return TensorEntry(name=name, dtype=DTYPES[dtype], shape=SHAPE, grid=Grid(cuts=((0, 40_000), (0, 4)), files=files))


def test_many_chunks_at_once_are_those_of_their_keys() -> None:
    names, others = [f"t{i}" for i in range(30)], [f"u{i}" for i in range(0, 30, 7)]
    groups, known = [[entry_of(n) for n in reversed(part)] for part in (names, others)], Known()
    for rank in (1000, 1001, 4999, 5000, 9999):
        data, file = file_of(rank, [*names, *others])
        header, box = parse_header(data, file, "there"), Box((2 * rank, 0), (2, 4))
        found = find_alike(header, [(entries, box) for entries in groups], known)
        chunks = by_json(data, file.header)
        rows = [c.tolist() for c in (found.alike.groups, found.alike.members, found.alike.offsets, found.alike.lengths, found.digests)]
        assert len(rows[0]) == len(names) + len(others)
        assert rows[2] == sorted(rows[2])
        for group, member, offset, length, digest in zip(*rows, strict=True):
            expected = chunks[f"{groups[group][member].name}[{2 * rank}:{2 * rank + 2},:]"]
            assert expected[2:] == (found.start + offset, length, digest.decode())
        wrong = (Box((2 * rank + 2, 0), (2, 4)), Box((2 * rank, 0), (1, 4)), Box.whole(SHAPE))
        for other in wrong:  # of one group: the other is found all the same
            beside = find_alike(header, [(groups[0], other), (groups[1], box)], known)
            assert [b is None for b in beside.alike.boxes] == [True, False]
            assert set(beside.alike.groups.tolist()) == {1}
            assert len(beside.digests) == len(beside.alike.members) == len(others)
        for lacking in ([entry_of("t1", "int32")], [entry_of("t1"), entry_of("lost")]):
            assert find_alike(header, [(lacking, box)], known).alike.boxes == [None]


def test_layouts_that_are_read_directly_are_those_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more digit, another shape, or names that begin others: no JSON parser is needed, and what is found is the same."""
    monkeypatch.setattr(header_module, "_layout", lambda *args: pytest.fail("parsed as JSON"))
    for part, names in (
        (1 << 20, ["w", "a.b", "a[7]", "b[", "ä"]),
        (80, ["w", "a.b", "a[7]", "b[", "ä"]),
        (80, ["w1", "w10", "w1[2]", "ä"]),
    ):
        header_layout.forget()
        monkeypatch.setattr(header_layout, "_PART", part)
        for rank, rows in ((0, 2), (1, 2), (49, 2), (7, 1), (3, 5), (4999, 2), (0, SHAPE[0])):
            data, file = file_of(rank, names, rows)
            assert dict(parse_header(data, file, "there").chunks) == by_json(data, file.header)
            assert dict(parse_header(data, file, "there").chunks) == by_json(data, file.header)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dtype":"F32","shape":[2,4]', b'"dtype":"F32", "shape":[2,4]'),
        (b'"shape":[2,4]', b'"shape":[4,2]'),
        (b"[6:8,:]", b"[6:8,:]x"),
        (b'"w[6', b'"\\u0077[6'),
        (b'"w[6', b'"\xff[6'),
        (b'"w[6', b'"w\t[6'),
        (b'"dtype":"F32"', b'"dtype":"F99"'),
        (b'"dtype":"F32"', b'"dtype":"F64"'),
        (b"[0,32]", b"[00,32]"),
        (b"[0,32]", b"[0,31]"),
        (b"[0,32]", b"[1,32]"),
        (b"[0,32]", b"[0,99999999999999999999]"),
        (b'"shape":[2,4]', b'"shape":[02,4]'),
        (b'"shape":[2,4]', b'"shape":[2,4,]'),
        (b'"shape":[2,4]', b'"shape":[99999999999,99999999999,8]'),
        (b'"v[6:8,:]"', b'"w[6:8,:]"'),
        (b'"v[6:8,:]"', b'"w[7:9,:]"'),
        (b'"v[6:8,:]"', b'"w"'),
        (b'"v[6:8,:]"', b'"__metadata__"'),
        (b"},", b"},,"),
        (b"},", b"} ,"),
    ],
)
def test_a_layout_that_is_read_directly_is_one_that_json_has(old: bytes, new: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a header says: with the direct reader or without, it is damaged or not, and has the same chunks."""
    data, file = repacked(*file_of(3, ["w", "v"]), old, new, after=b'"w[6')

    def outcome() -> object:
        header_layout.forget()
        try:
            return dict(parse_header(data, file, "there").chunks)
        except CorruptError as err:
            return err.message

    directly = outcome()
    monkeypatch.setattr(header_module, "read_layout", lambda text, size: None)
    assert directly == outcome()


def repacked(data: bytes, file: DataFile, old: bytes, new: bytes, after: bytes = b"") -> tuple[bytes, DataFile]:
    """A header with other text somewhere after ``after``, with the digest that the index has of it."""
    at = data.index(after)
    assert old in data[at:]
    changed = (data[:at] + data[at:].replace(old, new, 1)).rstrip().ljust(len(data))[: len(data)]
    digest = header_module.xxhash.xxh3_128_hexdigest(changed)
    return changed, DataFile(path=file.path, size=file.size, header=file.header, digest=digest, rank=file.rank)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"},"w[', b'"}}"w['),
        (b'"},"w[', b'"},,"w['),
        (b"]}}", b"]}}}"),
        (b"]}}", b"]},}"),
        (b"]}}", b']},"\\u005f_metadata__":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    ],
)
def test_what_is_no_json_as_a_whole_is_damage(old: bytes, new: bytes) -> None:
    data, file = repacked(*file_of(3, ["w"]), old, new)
    for _ in range(2):
        with pytest.raises(CorruptError):
            parse_header(data, file, "there")
        parse_header(*file_of(3, ["w"]), "there")


def test_a_shape_of_thousands_of_digits_is_damage() -> None:
    data, file = file_of(3, ["w"])
    text = data[8:].rstrip().replace(b'"shape":[', b'"shape":[' + b"1" * 5000)
    long = (8184).to_bytes(8, "little") + text.ljust(8184)
    digest = header_module.xxhash.xxh3_128_hexdigest(long)
    with pytest.raises(CorruptError, match="not JSON"):
        parse_header(long, replace(file, size=file.size + 4096, header=8192, digest=digest), "there")


def test_a_digest_that_is_not_hex_is_damage() -> None:
    data, file = file_of(3, ["w"])
    for bad in (b"g" * 16, "é".encode() * 8):
        digest = json.loads(data[8:])["__metadata__"]["ckpt.digests"].encode()
        broken = data.replace(digest, bad)
        row = DataFile(path=file.path, size=file.size, header=file.header, digest=header_module.xxhash.xxh3_128_hexdigest(broken), rank=3)
        with pytest.raises(CorruptError, match="digests of 16 hex digits"):
            parse_header(broken, row, "there")


def test_layouts_that_are_kept_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(100):
        parse_header(*file_of(rank, [f"{'w' * rank}"] if rank else ["v"]), "there")
    assert len(header_layout._known) == header_layout._MOST
    assert len(header_layout._known_names) == header_layout._MOST_NAMES
    monkeypatch.setattr(header_layout, "_ALL_TEXT", 1000)
    parse_header(*file_of(100, ["u"]), "there")
    assert 0 < sum(len(layout.text) for _, layout in header_layout._known) <= 1000
