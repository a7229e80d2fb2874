"""Bytes that go from file to file as they are: which these are, against numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import convert
from ckpt import settings as limits
from ckpt.converters import file_stream
from ckpt.converters.file_stream import copy_through, jobs_of, runs_of
from ckpt.converters.selection import OutputSet, OutputTensor
from ckpt.converters.target import FileItem
from ckpt.dtypes import DTYPES
from ckpt.engine.digest_reader import DigestReader
from ckpt.errors import CorruptError
from ckpt.formats.registry import open_catalog
from ckpt.plan import views
from ckpt.plan.layout.geometry import Box

A = np.arange(4 * 4 * 3, dtype=np.float32).reshape(4, 4, 3)
B = -np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
EXPECTED = {
    "a": A,
    "fused": np.concatenate([A[:2], B[:1], A[2:], B[1:]]),
    "turned": A.transpose(1, 0, 2),
    "row": A[1],
    "column": A[:, 2],
    "left": A[:, :2],
    "top": A[:3],
    "padded": np.concatenate([B, np.zeros((1, 4, 3), np.float32)]),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tensors in chunks as large as they are, in small ones, and in a file without digests."""
    root, state = tmp_path_factory.mktemp("runs"), {"a": torch.from_numpy(A), "b": torch.from_numpy(B)}
    ckpt.save(str(root / "whole"), state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.settings.CHUNK", 24)
        convert(str(root / "whole"), str(root / "cut"), to="native")
    torch.save(state, root / "plain.pt")
    return root


def chosen_of(url: Path) -> OutputSet:
    catalog = open_catalog(str(url))
    a, b = (views.whole(n, catalog.tensors[n].shape) for n in "ab")
    made = {
        "a": a,
        "fused": views.interleave([a, b], 0, 2),
        "turned": views.transpose(a, [1, 0, 2]),
        "row": views.unstack(a, 0)[1],
        "column": views.unstack(a, 1)[2],
        "left": views.split(a, 1, [2, 2])[0],
        "top": views.split(a, 0, [3, 1])[0],
        "padded": views.padded(b, 0, 3),
    }
    wanted = {n: OutputTensor(name=n, view=v, dtype=DTYPES["float32"]) for n, v in made.items()}
    return OutputSet(catalog=catalog, tensors=wanted, state={}, ranks={})


class Written:
    """Where the bytes of items go: into memory, each inside of its item."""

    def __init__(self, items: list[FileItem], memory: bytearray) -> None:
        self.items = items
        self.memory = memory

    def take(self, item: int, start: int, data: memoryview) -> None:
        assert self.items[item].offset <= start and start + len(data) <= self.items[item].offset + self.items[item].length
        self.memory[start : start + len(data)] = data

    def mark(self, item: int) -> None:
        return None

    def back(self, item: int, mark: object) -> None:
        """What comes again is written over what came before."""


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_runs_are_the_bytes_of_an_item(places: Path, data: Any) -> None:
    chosen = chosen_of(places / data.draw(st.sampled_from(["whole", "cut", "plain.pt"])))
    items, at = [], data.draw(st.integers(0, 5000))
    for name in data.draw(st.lists(st.sampled_from(sorted(EXPECTED)), min_size=1, max_size=4)):
        shape = EXPECTED[name].shape
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        box = Box(tuple(low), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))
        items.append(FileItem(name, data.draw(st.sampled_from([box, Box.whole(shape)])), at, 4))
        at += items[-1].length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "WORTH_A_CALL", data.draw(st.sampled_from([0, 30, 1000])))
        patch.setattr(limits, "GAP", data.draw(st.sampled_from([0, 40])))
        patch.setattr(file_stream, "JOB", data.draw(st.integers(4, 200)))
        runs = runs_of(chosen, items)
        jobs = list(jobs_of(list(runs.values()), apart=data.draw(st.booleans())))
        fetch, written = DigestReader(chosen.catalog.backend), bytearray(at)

        put = Written(items, written)
        assert sum(copy_through(fetch, job, put) for job in jobs) == sum(items[n].length for n in runs)
    for number, item in enumerate(items):
        expected = np.ascontiguousarray(EXPECTED[item.name][item.box.slices]).tobytes()
        assert number not in runs or written[item.offset : item.offset + item.length] == expected


def test_what_has_runs(places: Path) -> None:
    """Whole chunks where they have digests, any rows where they have none; nothing that is filled or turned."""
    whole = [FileItem(n, Box.whole(EXPECTED[n].shape), 0, 4) for n in EXPECTED]
    rows = FileItem("a", Box((1, 0, 0), (2, 4, 3)), 0, 4)
    found = {}
    for name in ("whole", "cut", "plain.pt"):
        runs = runs_of(chosen_of(places / name), [*whole, rows])
        found[name] = [[*EXPECTED, "rows"][n] for n in sorted(runs)]
    cut, plain = ["a", "fused", "row", "left", "top", "rows"], ["a", "fused", "row", "top", "rows"]
    assert found == {"whole": ["a"], "cut": cut, "plain.pt": plain}


def test_damage_is_found_where_it_is_read(places: Path) -> None:
    chosen = chosen_of(places / "cut")
    (runs,) = runs_of(chosen, [FileItem("a", Box.whole((4, 4, 3)), 0, 4)]).values()
    chunk = runs[3].chunk
    wrong = chunk._replace(extent=chunk.extent._replace(digest="0" * 16))
    fetch = DigestReader(chosen.catalog.backend)
    with pytest.raises(CorruptError, match="tensor a is damaged"):
        copy_through(
            fetch, [*runs[:3], runs[3]._replace(chunk=wrong)], Written([FileItem("a", Box.whole((4, 4, 3)), 0, 4)], bytearray(192))
        )


def test_without_torch(places: Path, tmp_path: Path) -> None:
    code = """
import sys
from ckpt import convert

convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
assert "torch" not in sys.modules
"""
    for to in ("hf", "native"):
        subprocess.run([sys.executable, "-c", code, str(places / "whole"), str(tmp_path / to), to], check=True, timeout=100)
        assert torch.equal(ckpt.open(str(tmp_path / to))["a"].read(), torch.from_numpy(A))
