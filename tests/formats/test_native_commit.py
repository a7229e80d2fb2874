"""The commit record: digest first, then version and features, then the rest."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
import xxhash

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.native.commit import Branch, CommitRecord, IndexFile, inlined, new_id

RECORD = CommitRecord(
    id="0123456789abcdef",
    created="2025-01-02T03:04:05.678+00:00",
    writer="ckpt 0",
    world_size=16,
    index={
        name: IndexFile(path=f"index-0123456789abcdef/{name}", size=100 + i, digest=f"{i + 1:032x}")
        for i, name in enumerate(["tensors.arrow", "grids.arrow", "files.arrow", "state.json"])
    },
    tensor_bytes=12345,
)


def sealed(members):
    """A record of any members with a right digest, made as the specification says, without the package."""
    text = json.dumps(members | {"digest": "0" * 32}).encode()
    at = text.rindex(b"0" * 32)
    return text[:at] + xxhash.xxh3_128_hexdigest(text).encode() + text[at + 32 :]


def members():
    return json.loads(RECORD.to_bytes())


def test_repeated_index_files_have_to_be_what_their_digest_says():
    files = {"state.json": b"{}", "tensors.arrow": b"x" * 300, "grids.arrow": b"y" * 5000, "files.arrow": b"z" * 4000}
    index = {n: IndexFile(path=f"index-0123456789abcdef/{n}", size=len(d), digest=xxhash.xxh3_128_hexdigest(d)) for n, d in files.items()}
    record = replace(RECORD, index=index, inline=inlined(files, 8192))
    assert set(record.inline) == {"state.json", "tensors.arrow", "files.arrow"}  # the smallest, as far as they go
    assert CommitRecord.from_bytes(record.to_bytes(), "x") == record
    assert [record.repeated(name) for name in files] == [b"{}", b"x" * 300, None, b"z" * 4000]
    assert record.to_bytes() != replace(record, inline={}).to_bytes()
    written = json.loads(record.to_bytes())
    for other in ("e30", "e30=!", "eyB9", "\u00e9", 7, None):  # no base64, other bytes, no text
        changed = CommitRecord.from_bytes(sealed(written | {"inline": {"state.json": other, "unknown": "e30="}}), "x")
        assert changed.repeated("state.json") is None
    for other in ([], "e30=", None, 7):
        assert CommitRecord.from_bytes(sealed(written | {"inline": other}), "x").inline == {}
    assert inlined(files, 0) == {}


def test_round_trip():
    assert CommitRecord.from_bytes(RECORD.to_bytes(), "there") == RECORD


def test_features_that_are_known():
    coded = replace(RECORD, features=("codecs",))
    assert json.loads(coded.to_bytes())["features"] == ["codecs"]
    assert CommitRecord.from_bytes(coded.to_bytes(), "there") == coded


def test_as_specified():
    found = members()
    digest = found.pop("digest")
    assert found == {
        "format": "ckpt",
        "version": 1,
        "id": "0123456789abcdef",
        "created": "2025-01-02T03:04:05.678+00:00",
        "writer": "ckpt 0",
        "world_size": 16,
        "features": [],
        "index": {n: {"path": f.path, "size": f.size, "digest": f.digest} for n, f in RECORD.index.items()},
        "tensor_bytes": 12345,
    }
    blank = re.sub(rb'("digest": ")[0-9a-f]{32}("\s*}\s*)\Z', rb"\g<1>" + b"0" * 32 + rb"\2", RECORD.to_bytes())
    assert xxhash.xxh3_128_hexdigest(blank) == digest


def test_every_flipped_bit_is_found():
    data = RECORD.to_bytes()
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptError, match=r"checkpoint\.json"):
                CommitRecord.from_bytes(bytes(flipped), "there")


def test_every_truncation_is_found():
    data = RECORD.to_bytes()
    for size in range(len(data)):
        with pytest.raises(CorruptError, match="damaged"):
            CommitRecord.from_bytes(data[:size], "there")


def test_members_in_any_order_and_unknown_ones():
    """Other writers need not put the digest last."""
    mixed = {"digest": "", "new": {"x": [1, "digest"]}} | dict(sorted(members().items()))
    mixed["digest"] = "f" * 32
    text = json.dumps(mixed).encode()
    digest = xxhash.xxh3_128_hexdigest(text.replace(b"f" * 32, b"0" * 32))
    assert CommitRecord.from_bytes(text.replace(b"f" * 32, digest.encode()), "there") == RECORD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ["version 2", "version 1"]),
        ({"version": True}, ["True"]),
        ({"version": "1"}, ["'1'"]),
        ({"features": ["codec-zstd"]}, ["codec-zstd"]),
        ({"features": ["codecs", "holograms"]}, ["'holograms'"]),
        ({"features": None}, ["None"]),
        ({"features": ["references", "mixed-steps"]}, ["'mixed-steps'", "not read any more", "load another step"]),
        ({"format": "other"}, ["other"]),
    ],
)
def test_unknown_is_refused_by_name(change, words):
    with pytest.raises(FormatError) as caught:
        CommitRecord.from_bytes(sealed(members() | change), "there")
    assert all(w in str(caught.value) for w in [*words, "there"])


def test_unknown_version_with_a_wrong_digest_is_damage():
    with pytest.raises(CorruptError):
        CommitRecord.from_bytes(json.dumps(members() | {"version": 2}).encode(), "there")


def test_json_of_other_software():
    with pytest.raises(FormatError, match="not a commit record"):
        CommitRecord.from_bytes(b'{"epoch": 3}', "there")


@pytest.mark.parametrize(
    "change",
    [
        {"id": 7},
        {"world_size": "16"},
        {"tensor_bytes": True},
        {"index": []},
        {"index": {}},
        {"index": members()["index"] | {"state.json": {"path": "../x", "size": 1, "digest": "0" * 32}}},
        {"index": members()["index"] | {"state.json": {"path": "/x", "size": 1, "digest": "0" * 32}}},
        {"index": members()["index"] | {"state.json": {"path": "x", "size": -1, "digest": "0" * 32}}},
        {"index": members()["index"] | {"state.json": {"path": "x", "size": 1, "digest": "0" * 31 + "g"}}},
    ],
)
def test_impossible_members(change):
    with pytest.raises(CorruptError, match="damaged"):
        CommitRecord.from_bytes(sealed(members() | change), "there")


def test_ids():
    first = [new_id() for _ in range(100)]
    time.sleep(0.002)
    assert len(set(first)) == 100
    assert all(re.fullmatch("[0-9a-z]{16}", i) for i in first)
    assert all(i < new_id() for i in first)
    stamp = int(new_id()[:9], 36)
    assert abs(stamp / 1000 - time.time()) < 60


def test_branches():
    record = replace(RECORD, branches=(Branch("0123456789abcdeg", 800), Branch("0123456789abcdeh", 900)))
    assert CommitRecord.from_bytes(record.to_bytes(), "there") == record
    assert json.loads(record.to_bytes())["branches"][1] == {"id": "0123456789abcdeh", "after": 900}
    assert "branches" not in members()
    known = {"id": "0123456789abcdeg", "after": 1, "and": "more"}
    assert CommitRecord.from_bytes(sealed(members() | {"branches": [known]}), "x").branches == (Branch(known["id"], 1),)
    for odd in ({}, None, "", [[]], [{"id": "a"}], [{"id": 1, "after": 1}], [{"id": "a", "after": True}], [{"id": "a", "after": 1.0}]):
        with pytest.raises(CorruptError, match="branches"):
            CommitRecord.from_bytes(sealed(members() | {"branches": odd}), "x")
