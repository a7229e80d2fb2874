"""The commit record: digest first, then version and features, then the rest."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from ckpt.errors import ConflictError, ConsistencyError, CorruptError, FormatError, StorageError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import Branch, CommitRecord, IndexFile, inlined, new_id, read_record
from ckpt.formats.native.writer import CheckpointJournal, committed_id, files_of, write_index
from ckpt.io_backends.faulty import FaultyBackend
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.registry import open_backend
from tests.formats.native_sample import ID, contents_of, read, sample, save, two_ranks, write_data

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


# ------------------------------------------------------------------------------------------------------------------------------------------
# Committing: there is the old checkpoint or the new one, whole. tests/failures/test_every_operation.py has a fault at each operation.

OTHER = "f" * 16
OLD = [sample("w", "int8", (4,), [[0, 2, 4]], ranks=(0, 1))]
NEW = [sample("v", "int16", (5,), ranks=(1,))]


@pytest.fixture
def backend():
    InProcessBackend.reset()
    return open_backend("inprocess://w")


def paths(backend, prefix=""):
    return {e.path for e in backend.list_prefix(prefix)}


def new_contents(backend):
    return contents_of(NEW, *write_data(backend, NEW, id=OTHER))


def test_what_is_written(backend):
    record = save(backend, two_ranks())
    names = {"tensors.arrow", "grids.arrow", "files.arrow", "state.json"}
    assert {n: f.path for n, f in record.index.items()} == {n: f"index-{ID}/{n}" for n in names}
    assert paths(backend) == {
        "checkpoint.json",
        *(f"index-{ID}/{n}" for n in names),
        *(f"data/{ID}-0000{r}.safetensors" for r in (0, 1)),
    }
    assert (record.id, record.world_size, record.features) == (ID, 2, ())
    assert record.writer.startswith("ckpt ")
    assert read_record(backend) == record.to_bytes()
    assert committed_id(backend) == ID


def test_nothing_committed(backend):
    assert (read_record(backend), committed_id(backend), files_of(backend, read_record(backend))) == (None, None, ())


def test_replacing(backend):
    save(backend, OLD)
    previous = read_record(backend)
    old = set(files_of(backend, read_record(backend)))
    assert old == paths(backend) - {"checkpoint.json"}
    write_index(CheckpointJournal(backend, id=OTHER, previous=previous), new_contents(backend), world_size=1)
    assert set(files_of(backend, previous)) == old
    assert paths(backend) - {"checkpoint.json"} == old | set(files_of(backend, read_record(backend)))
    for path in old:
        backend.delete(path)
    np.testing.assert_array_equal(read(backend, NativeCatalog(backend), "v"), NEW[0].data)


def test_files_of_a_checkpoint_whose_index_is_lost(backend):
    save(backend, OLD)
    write_data(backend, NEW, id=OTHER)
    wanted = set(files_of(backend, read_record(backend)))
    backend.delete(f"index-{ID}/files.arrow")
    assert set(files_of(backend, read_record(backend))) == wanted - {f"index-{ID}/files.arrow"}
    assert not any(OTHER in p for p in wanted)


def test_files_of_a_damaged_record(backend):
    save(backend, OLD)
    with pytest.raises(CorruptError, match=r"checkpoint\.json"):
        files_of(backend, read_record(backend)[:-9])


def test_contents_that_cannot_be(backend):
    contents = new_contents(backend)
    twice = contents_of(NEW * 2, contents.files, {"v": [0]})
    with pytest.raises(ConsistencyError, match="twice"):
        write_index(CheckpointJournal(backend, id=OTHER, previous=None), twice, world_size=1)
    assert paths(backend, "index-") == set()


class Removing(FaultyBackend):
    """Before the first of two puts of the commit record somebody removes the old one, and before the second puts it back, if ``back``."""

    def __init__(self, inner, *, back):
        super().__init__(inner)
        self.inner, self.back, self.puts = inner, back, 0
        self.old = read_record(inner)

    def put_if(self, path, data, *, expected):
        if path == "checkpoint.json":
            self.puts += 1
            if self.puts == 1:
                self.inner.delete(path)
            elif self.puts == 2 and self.back:
                self.inner.put_if(path, self.old, expected=None)
        super().put_if(path, data, expected=expected)


@pytest.mark.parametrize("back", [False, True])
def test_what_is_replaced_is_removed_meanwhile(backend, back):
    """Retention removes in the background, also a step that the run went back before and saves once more."""
    save(backend, OLD)
    removing = Removing(backend, back=back)
    write_index(CheckpointJournal(removing, id=OTHER, previous=removing.old), new_contents(backend), world_size=1)
    assert committed_id(backend) == OTHER and removing.puts == 2 + back
    np.testing.assert_array_equal(read(backend, NativeCatalog(backend), "v"), NEW[0].data)


def test_what_was_removed_is_not_committed_again(backend):
    """The save that replaces it turns out to lack a file, right after its commit."""
    save(backend, OLD)
    contents, removing = new_contents(backend), Removing(backend, back=False)

    def vanish(path, data, *, expected):
        Removing.put_if(removing, path, data, expected=expected)
        if path == "checkpoint.json":
            backend.delete(contents.files[0].path)

    removing.put_if = vanish
    with pytest.raises(StorageError, match="files are not there"):
        write_index(CheckpointJournal(removing, id=OTHER, previous=removing.old), contents, world_size=1)
    assert read_record(backend) is None


@pytest.mark.parametrize("seen", [None, b"something else"])
def test_somebody_else_committed_first(backend, seen):
    save(backend, OLD)
    before = paths(backend)
    contents = new_contents(backend)
    with pytest.raises(ConflictError, match=r"another save was first here: cannot (.|\n)*process_group\(\) before they save"):
        write_index(CheckpointJournal(backend, id=OTHER, previous=seen), contents, world_size=1)
    assert paths(backend) == before | {contents.files[0].path}
    assert committed_id(backend) == ID


def test_index_files_of_others_are_not_removed(backend):
    """An id that is not fresh is a mistake, but it must not cost what is there."""
    save(backend, OLD)
    before = {p: backend.read(p) for p in paths(backend)}
    with pytest.raises(ConflictError):
        write_index(CheckpointJournal(backend, id=ID, previous=None), new_contents(backend), world_size=1)
    assert {p: backend.read(p) for p in before} == before


class Unsure(FaultyBackend):
    """Publishes, fails to say so, and from then on answers nothing."""

    def __init__(self, inner, publishes) -> None:
        super().__init__(inner)
        self._publishes = publishes
        self.gone = False

    def put_if(self, path, data, *, expected) -> None:
        if self._publishes:
            super().put_if(path, data, expected=expected)
        self.gone = True
        raise StorageError("no answer", where=path)

    def read(self, path, offset=0, length=None):
        if self.gone:
            raise StorageError("no answer", where=path)
        return super().read(path, offset, length)


@pytest.mark.parametrize("publishes", [True, False])
def test_storage_that_cannot_say(backend, publishes):
    """The index stays: if the record was published after all, the checkpoint has to be whole."""
    save(backend, OLD)
    contents = new_contents(backend)
    with pytest.raises(StorageError, match="no answer"):
        write_index(CheckpointJournal(Unsure(backend, publishes), id=OTHER, previous=read_record(backend)), contents, world_size=1)
    assert len(paths(backend, f"index-{OTHER}/")) == 4
    assert NativeCatalog(backend).record.id == (OTHER if publishes else ID)


class Retried(FaultyBackend):
    """A client that repeats a request whose answer was lost, and meets its own first attempt."""

    def put_if(self, path, data, *, expected) -> None:
        super().put_if(path, data, expected=expected)
        if data != expected:
            super().put_if(path, data, expected=expected)


def test_meeting_ones_own_record(backend):
    contents = new_contents(backend)
    record = write_index(CheckpointJournal(Retried(backend), id=OTHER, previous=None), contents, world_size=1)
    assert read_record(backend) == record.to_bytes()
    assert CommitRecord.from_bytes(record.to_bytes(), "there") == NativeCatalog(backend).record


class Unsynced(FaultyBackend):
    """The record's name is there, but no publish makes it durable."""

    def put_if(self, path, data, *, expected) -> None:
        super().put_if(path, data, expected=expected)
        raise StorageError("sync failed", where=path)


def test_a_record_that_is_not_durable(backend):
    contents = new_contents(backend)
    with pytest.raises(StorageError, match="sync failed"):
        write_index(CheckpointJournal(Unsynced(backend), id=OTHER, previous=None), contents, world_size=1)
    assert committed_id(backend) == OTHER
    np.testing.assert_array_equal(read(backend, NativeCatalog(backend), "v"), NEW[0].data)
