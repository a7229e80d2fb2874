"""One bit of one byte is flipped, wherever it lies: a load raises. No byte of a checkpoint is without a digest that finds it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import CkptError
from ckpt.io_backends.registry import open_backend
from tests.failures.damage import header
from tests.failures.states import blank, number_of, state, stored

STEP = 7
"""Bytes of indices and chunks are tried at this distance; all of the commit record and of headers."""


class Flipper:
    """A checkpoint on disk, and what is left of it in memory when a bit of a byte is flipped."""

    def __init__(self, directory: Path) -> None:
        self.url = "memory://flipped"
        self.backend = open_backend(self.url)
        self.files = {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
        for path, data in self.files.items():
            self.put(path, data)

    def put(self, path: str, data: bytes) -> None:
        self.backend.delete(path)
        with self.backend.create(path, len(data)) as writer:
            writer.write(0, [data])
            writer.commit()

    def flipped(self, path: str, numbers: range) -> Iterator[int]:
        """Each byte in turn, with one bit flipped while the caller has it."""
        chance = random.Random(path)
        for at in numbers:
            data = bytearray(self.files[path])
            data[at] ^= 1 << chance.randrange(8)
            self.put(path, bytes(data))
            yield at
        self.put(path, self.files[path])


@pytest.fixture(scope="module")
def flipper(tmp_path_factory: pytest.TempPathFactory) -> Flipper:
    directory = tmp_path_factory.mktemp("c")
    ckpt.save(str(directory), state(1))
    return Flipper(directory)


def undetected(flipper: Flipper, path: str, numbers: range, load: Callable[[str], object]) -> list[int]:
    """Bytes whose change did not make the load raise one of our errors with a hint."""
    found = []
    for at in flipper.flipped(path, numbers):
        try:
            load(flipper.url)
        except CkptError as err:
            if not err.hint:
                found.append(at)
        else:
            found.append(at)
    return found


def load(url: str) -> None:
    ckpt.load(url, blank(), threads=1)


def test_the_loads_below_see_what_they_should(flipper: Flipper) -> None:
    assert stored(flipper.url) == 1
    kinds = sorted(path.rpartition(".")[2] for path in flipper.files)
    assert kinds == ["arrow", "arrow", "arrow", "json", "json", "safetensors"]


def test_every_byte_of_the_commit_record_counts(flipper: Flipper) -> None:
    assert undetected(flipper, "checkpoint.json", range(len(flipper.files["checkpoint.json"])), load) == []


def test_every_byte_of_an_index_file_counts(flipper: Flipper) -> None:
    index = {path: data for path, data in flipper.files.items() if path.startswith("index-")}
    assert len(index) == 4
    assert {path: undetected(flipper, path, range(0, len(data), STEP), load) for path, data in index.items()} == dict.fromkeys(index, [])


def test_every_byte_of_a_header_and_of_the_chunks_counts(flipper: Flipper, tmp_path: Path) -> None:
    (path,) = (path for path in flipper.files if path.startswith("data/"))
    (tmp_path / "d").write_bytes(flipper.files[path])
    _, start = header(tmp_path / "d")
    assert undetected(flipper, path, range(start), load) == []
    assert undetected(flipper, path, range(start, len(flipper.files[path]), STEP), load) == []
    assert stored(flipper.url) == 1


def test_a_load_of_one_tensor_does_not_mind_damage_elsewhere(flipper: Flipper, tmp_path: Path) -> None:
    """The counterpart: it is the damage that is found, not any change of a file."""
    (path,) = (path for path in flipper.files if path.startswith("data/"))
    (tmp_path / "d").write_bytes(flipper.files[path])
    entries, start = header(tmp_path / "d")
    (begin, end) = entries["model.w"]["data_offsets"]
    for _ in flipper.flipped(path, range(start + begin, start + end, 97)):
        target = {**blank(), **{k: v for k, v in state(1).items() if not isinstance(v, dict)}}
        target["model"]["w"] = state(1)["model"]["w"]
        ckpt.load(flipper.url, target, only=["model.[!w]*", "optimizer.*"])
        assert number_of(target) == 1


def test_verify_finds_what_load_finds(flipper: Flipper) -> None:
    for path, data in flipper.files.items():
        for at in flipper.flipped(path, range(3, len(data), 211)):
            try:
                report = verify(flipper.url, threads=1)
            except CkptError:
                continue
            assert not report.ok and report.problems[0].file == path, f"byte {at} of {path}: {report.problems}"
