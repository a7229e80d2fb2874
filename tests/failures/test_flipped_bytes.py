"""One bit of one byte is flipped, wherever it lies: a load raises. No byte of a checkpoint is without a digest that finds it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest

import ckpt
from ckpt.errors import CkptError
from tests.failures.damage import Copy, header
from tests.failures.states import blank, number_of, state, stored

STEP = 7
"""Bytes of indices and chunks are tried at this distance; all of the commit record and of the text of headers."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    directory = tmp_path_factory.mktemp("c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_SPANS", "off")  # they are outside of the chain of digests
        ckpt.save(str(directory), state(1))
    return Copy.of(directory, "inprocess://flipped")


def flipped(copy: Copy, path: str, numbers: Iterable[int]) -> Iterator[int]:
    """Each byte in turn, with one bit flipped while the caller has it."""
    chance = random.Random(path)
    for at in numbers:
        data = bytearray(copy.files[path])
        data[at] ^= 1 << chance.randrange(8)
        copy.put(path, bytes(data))
        yield at
    copy.put(path, copy.files[path])


def undetected(copy: Copy, path: str, numbers: Iterable[int], load: Callable[[str], object]) -> list[int]:
    """Bytes whose change did not make the load raise one of our errors that names the file and has a hint."""
    found = []
    for at in flipped(copy, path, numbers):
        try:
            load(copy.url)
        except CkptError as err:
            if not err.hint or path not in str(err):
                found.append(at)
        else:
            found.append(at)
    return found


def load(url: str) -> None:
    ckpt.load(url, blank(), job=ckpt.Job(threads=1))


def test_the_loads_below_see_what_they_should(copy: Copy) -> None:
    assert stored(copy.url) == 1
    kinds = sorted(path.rpartition(".")[2] for path in copy.files)
    assert kinds == ["arrow", "arrow", "arrow", "json", "json", "safetensors"]


def test_every_byte_of_the_commit_record_counts(copy: Copy) -> None:
    assert undetected(copy, "checkpoint.json", range(len(copy.files["checkpoint.json"])), load) == []


def test_every_byte_of_an_index_file_counts(copy: Copy) -> None:
    index = {path: data for path, data in copy.files.items() if path.startswith("index-")}
    assert len(index) == 4
    for path, data in index.items():
        assert undetected(copy, path, range(0, len(data), STEP), load) == [], path


@pytest.mark.parametrize("every", [8 * STEP, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_of_a_header_and_of_the_chunks_counts(copy: Copy, every: int) -> None:
    """``every``: of the spaces behind a header, which are thousands, this one."""
    (path,) = (path for path in copy.files if path.startswith("data/"))
    _, start = header(copy.files[path])
    text = len(copy.files[path][:start].rstrip(b" "))
    assert text < start and undetected(copy, path, [*range(text), *range(text, start, every), start - 1], load) == []
    assert undetected(copy, path, range(start, len(copy.files[path]), STEP), load) == []
    assert stored(copy.url) == 1


def test_a_load_of_one_tensor_does_not_mind_damage_elsewhere(copy: Copy) -> None:
    """The counterpart: it is the damage that is found, not any change of a file."""
    (path,) = (path for path in copy.files if path.startswith("data/"))
    entries, start = header(copy.files[path])
    (begin, end) = entries["model.w"]["data_offsets"]
    for _ in flipped(copy, path, range(start + begin, start + end, 97)):
        target = {**blank(), **{k: v for k, v in state(1).items() if not isinstance(v, dict)}}
        target["model"]["w"] = state(1)["model"]["w"]
        ckpt.load(copy.url, target, only=["model.[!w]*", "optimizer.*"])
        assert number_of(target) == 1
