"""Parity of a group of nodes, in one process: what is made, what is read when one is gone, what becomes of damaged and half-made files."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import xxhash

import ckpt
from ckpt.errors import CorruptError, NotFoundError, StorageError, UsageError
from ckpt.io_backends import PosixBackend
from ckpt.nodes import copies
from ckpt.nodes.backend import register_run, unregister_run
from ckpt.nodes.copies import NodeCopier, SpreadFiles, missing_data
from ckpt.nodes.nodes import PARITY, NodeReader, NodeSet
from ckpt.nodes.parity import BLOCK, PIECE, READERS, ParityRecord, add_xor, block_digest
from ckpt.plan.parity import ParityTerm, plan_parity
from ckpt.runs.node_tier import merged_sources
from ckpt.runs.orphans import find_orphans
from ckpt.runs.removal import remove_at
from tests.spread import directories

ID = "0" * 16


nodes_at = partial(directories.nodes_at, parity=3)


# ---- reading, by what the port says


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Four nodes with two files each, of unequal lengths, and their parity."""
    randomness = random.Random(0)
    holders = {f"data/{ID}-{n:05}.safetensors": {n % 4} for n in range(8)}
    content = {path: randomness.randbytes(randomness.randrange(1, 70_000)) for path in holders}
    domains = [*"abcd"]
    for path, data in content.items():
        write(tmp_path / domains[min(holders[path])] / path, data)
    sizes = {path: len(data) for path, data in content.items()}
    for target, layout in plan_parity(holders, sizes, domains, [domains]):
        block = bytearray(layout.size)
        for term in layout.terms:
            for at in range(term.length):
                block[term.at + at] ^= content[term.path][term.offset + at]
        record = ParityRecord(ID, layout, [block_digest(memoryview(block))])
        write(tmp_path / domains[target] / record.path, bytes(block))
        write(tmp_path / domains[target] / record.record_path, record.encode())
    return content


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_lost_files_are_read_as_the_port_says(tmp_path: Path, files: dict[str, bytes]) -> None:
    nodes = nodes_at(tmp_path, "acd")  # b is gone
    register_run(nodes)
    reader = ckpt.io_backends.open_backend(nodes.url)
    randomness = random.Random(1)
    for path, data in files.items():
        assert reader.read(path) == data and reader.size(path) == len(data)
        assert reader.read(path, len(data)) == reader.read(path, len(data), 0) == b""
        start = randomness.randrange(len(data))
        stop = randomness.randrange(start, len(data)) + 1
        assert reader.read(path, start, stop - start) == data[start:stop]
        buffer, digest = memoryview(bytearray(stop - start)), xxhash.xxh3_64()
        reader.read_hashed(path, start, buffer, digest.update)
        assert bytes(buffer) == data[start:stop] and digest.hexdigest() == xxhash.xxh3_64_hexdigest(data[start:stop])
        with pytest.raises(CorruptError, match=rf"(?s){len(data)}"):
            reader.read(path, start, len(data) - start + 1)
        with pytest.raises(UsageError):
            reader.read(path, -1)
    with pytest.raises(NotFoundError):
        reader.size(f"data/{ID}-00009.safetensors")
    assert nodes.read_from[PARITY] > 0
    unregister_run(nodes)


def test_records_that_are_damaged_are_passed_over(tmp_path: Path, files: dict[str, bytes], caplog: pytest.LogCaptureFixture) -> None:
    """A term that has changed, no JSON, another release: each is named, and the file is not computed from it."""
    for name, damage in (
        ("a", lambda text: text.replace('"offset": 0', '"offset": 1', 1)),
        ("c", lambda text: text[:-5]),
        ("d", lambda text: text.replace('"version": 1', '"version": 2')),
    ):
        (record,) = (tmp_path / name / "parity").glob("*.json")
        record.write_text(damage(record.read_text()))
    reader = NodeReader(nodes_at(tmp_path, "acd"), "")
    with pytest.raises(NotFoundError, match="no parity has this file"):
        reader.parity.size(f"data/{ID}-00001.safetensors")
    assert all(f"parity on node {name} is passed over" in caplog.text for name in "acd")
    with pytest.raises(CorruptError):
        ParityRecord.decode(b"[" * 100_000, ID, f"parity/{ID}-0.json")


# ---- making


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[NodeSet, Path]]:
    """One rank has saved on the first of three nodes."""
    nodes = nodes_at(tmp_path, "abc")
    register_run(nodes)
    ckpt.save(f"{nodes.url}/step-1", {"w": torch.arange(50_000), "v": torch.ones(300)})
    yield nodes, tmp_path
    unregister_run(nodes)


def copier(nodes: NodeSet, own: int, completed: Callable[..., object] | None = None) -> NodeCopier:
    """That of one node, after one round."""
    mine = NodeSet(url=nodes.url, nodes=nodes.nodes, own=own, copies=0, parity=3)
    made = NodeCopier(mine, None, completed)
    register_run(mine)
    made.add()
    assert made.finish(60)
    register_run(nodes)
    return made


def parity_files(path: Path, node: str) -> list[Path]:
    return sorted((path / node / "step-1" / "parity").glob("*"))


def test_what_is_half_made_is_made_again_and_nothing_twice(saved: tuple[NodeSet, Path]) -> None:
    nodes, path = saved
    assert copier(nodes, 0).copied == 0 and not parity_files(path, "a")  # it alone has something
    size = sum(f.stat().st_size for f in (path / "a").rglob("data/*"))
    assert sum(copier(nodes, n).copied for n in (1, 2)) == size
    record, content = parity_files(path, "b")
    data = content.read_bytes()
    record.unlink()  # killed between the two
    content.write_bytes(data[:-1])
    assert copier(nodes, 1).copied == len(data) and content.read_bytes() == data
    assert copier(nodes, 1).copied == copier(nodes, 2).copied == 0
    state = {"w": torch.zeros(50_000, dtype=torch.int64), "v": torch.zeros(300)}
    (path / "a").rename(path / "gone")
    left = nodes_at(path, "bc")
    register_run(left)
    ckpt.load(f"{left.url}/step-1", state)
    assert torch.equal(state["w"], torch.arange(50_000)) and torch.equal(state["v"], torch.ones(300))
    assert missing_data(f"{left.url}/step-1") is None
    there = SpreadFiles.of(f"{left.url}/step-1", left)
    assert not there.is_complete and there.missing_parity() == []  # its files are on no node
    content.unlink()
    reason = missing_data(f"{left.url}/step-1")
    assert reason is not None and "1 of 1 files are on no node that answers" in reason and "only with another parity file" in reason
    unregister_run(left)


def test_a_step_is_complete_when_all_parity_is_there(saved: tuple[NodeSet, Path]) -> None:
    nodes, _ = saved
    told: list[str] = []
    copier(nodes, 1)
    first = SpreadFiles.of(f"{nodes.url}/step-1", nodes)
    assert not first.is_complete and [one.target for one in first.missing_parity()] == [2]
    copier(nodes, 2, lambda step, url, id, seconds: told.append(url))
    assert told == [f"{nodes.url}/step-1"] and SpreadFiles.of(f"{nodes.url}/step-1", nodes).is_complete


def test_parity_of_a_job_with_other_groups_counts(saved: tuple[NodeSet, Path]) -> None:
    """More nodes: in groups of three that are others, and in groups of four."""
    nodes, path = saved
    for own in (1, 2):
        copier(nodes, own)
    for further, size, missing in (
        (["a1", "a2", "d"], 3, {3}),  # the same terms, which are all of one file, on other nodes
        (["a1", "a2", "a3", "d", "e"], 4, {3, 4, 5}),  # other terms
    ):
        more = nodes_at(path, [*"abc", *further], parity=size)
        register_run(more)
        assert SpreadFiles.of(f"{more.url}/step-1", more).is_complete
        record = parity_files(path, "b")[0].rename(path / "record")
        assert {one.target for one in SpreadFiles.of(f"{more.url}/step-1", more).missing_parity()} == missing
        record.rename(parity_files(path, "b")[0].with_suffix(".json"))
        unregister_run(more)


def test_bytes_without_their_record_protect_nothing(saved: tuple[NodeSet, Path]) -> None:
    """Node b has its parity without the record, which the node of the file has beside a copy: whatever takes that node takes the record."""
    nodes, path = saved
    for own in (1, 2):
        copier(nodes, own)
    record, content = parity_files(path, "b")
    write(path / "a" / "step-1" / "parity" / content.name, content.read_bytes())
    record.rename(path / "a" / "step-1" / "parity" / record.name)
    more = nodes_at(path, ["a", "b", "c", "a1", "a2", "d"])
    register_run(more)
    there = SpreadFiles.of(f"{more.url}/step-1", more)
    assert not there.is_complete and {one.target for one in there.missing_parity()} == {3}
    unregister_run(more)


def test_nobody_waits_for_a_step_that_has_lost_a_node(
    saved: tuple[NodeSet, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds, and so ``Checkpointer.wait``, end at once, and say why, once; only a step that others may still complete is waited for."""
    nodes, path = saved
    monkeypatch.setattr(copies, "PATIENCE", 1000.0)
    for own in (1, 2):
        copier(nodes, own)
    (path / "a").rename(path / "gone")
    left = nodes_at(path, "bc")
    register_run(left)
    told: list[str] = []
    waiting = NodeCopier(left, None, lambda step, url, id, seconds: told.append(url))
    for _ in range(2):
        waiting.add()
        assert waiting.finish(60) and told == []
    assert caplog.text.count("/step-1: some of its files are on no machine of the job any more") == 1
    unregister_run(left)


def test_long_files_and_damage_in_a_later_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks are made, read and named one by one."""
    nodes = nodes_at(tmp_path, "abc")
    register_run(nodes)
    state = {"w": torch.arange(2_500_000)}
    ckpt.save(f"{nodes.url}/step-1", state)
    for own in (1, 2):
        copier(nodes, own)
    (tmp_path / "a").rename(tmp_path / "gone")
    left = nodes_at(tmp_path, "bc")
    register_run(left)
    loaded = {"w": torch.zeros(2_500_000, dtype=torch.int64)}
    ckpt.load(f"{left.url}/step-1", loaded)
    assert torch.equal(loaded["w"], state["w"])
    record, content = parity_files(tmp_path, "c")
    assert content.stat().st_size > BLOCK and len(ParityRecord.decode(record.read_bytes(), id_in(record), below_step(record)).digests) == 2
    with content.open("r+b") as file:
        file.seek(BLOCK + 17)
        (byte,) = file.read(1)
        file.seek(BLOCK + 17)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptError):
        ckpt.load(f"{left.url}/step-1", loaded)
    assert f"parity/{content.name} on node c is damaged" in caplog.text and "node b is damaged" not in caplog.text
    for run in (nodes, left):
        unregister_run(run)


def id_in(path: Path) -> str:
    return path.name.partition("-")[0]


def below_step(path: Path) -> str:
    return f"parity/{path.name}"


def test_a_damaged_file_gets_no_parity_of_others(saved: tuple[NodeSet, Path], caplog: pytest.LogCaptureFixture) -> None:
    """The node that has it finds out, names it, and makes nothing."""
    nodes, path = saved
    (file,) = (path / "a").rglob("data/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert copier(nodes, 0).uncopied == (1,)
    assert "a file that parity is made of is damaged" in caplog.text and file.name in caplog.text


def test_places_of_two_tiers_are_in_order() -> None:
    tiers = [{"memory of this host": 1, "parity": 2, "root": 4}, {"disk of this host": 8, "parity": 16, "root": 32}]
    merged = merged_sources(tiers)
    assert merged == {"memory of this host": 1, "disk of this host": 8, "parity": 18, "root": 36}
    assert [*merged] == ["memory of this host", "disk of this host", "parity", "root"] and merged_sources([]) == {}


def test_removal_takes_parity_and_gc_knows_it(saved: tuple[NodeSet, Path]) -> None:
    nodes, path = saved
    for own in (1, 2):
        copier(nodes, own)
    left_over = parity_files(path, "b")[1].read_bytes()
    remove_at(f"{nodes.url}/step-1")
    assert not [*path.rglob("*.xor")] and not [*path.rglob("*.json")]
    write(path / "b" / "step-1" / "parity" / f"{ID}-{'1' * 16}.xor", left_over)
    (orphan,) = find_orphans(PosixBackend(str(path / "b")), older_than=0, now=0)
    assert orphan.what == "save" and orphan.id == ID and orphan.removable


@pytest.mark.parametrize("given", [{"parity": 2}, {"parity": True}, {"parity": 3, "copies": 1}, {"copies": -1}, {"copies": True}])
def test_arguments(given: dict[str, int]) -> None:
    for of in (partial(ckpt.NodeLocal, "/nvme"), ckpt.Memory):
        with pytest.raises(UsageError):
            of(**given)  # type: ignore[operator]
    assert ckpt.NodeLocal("/nvme", parity=3, copies=0).parity == 3


# ---- the XOR of ranges of several files

SIZE = PIECE * 2 + 12_345
TERMS = [ParityTerm(name, SIZE, 100 * n, SIZE - 100 * n - 7, 50 * n, name) for n, name in enumerate("abcd")]
"""Of four files; their ranges overlap in part."""


def test_all_files_of_a_xor_are_read_at_once() -> None:
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


def test_an_error_of_one_file_is_raised() -> None:
    def read(path: str, offset: int, view: memoryview) -> None:
        if path == "c":
            raise StorageError("node c is lost")

    with pytest.raises(StorageError, match="node c is lost"):
        add_xor(memoryview(bytearray(SIZE)), TERMS, read)
