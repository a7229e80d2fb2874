"""Parity in place of copies: three nodes, of which one may be lost, and any damage to one of the three is mended from the other two."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CorruptError
from tests.distributed.ranks import Ranks
from tests.distributed.test_spread import data, flip, names, train


def train_with_parity(folder: str, nodes: Sequence[int], steps: range, dim: int = 0, root: str = "root", no_root: bool = False) -> Any:
    """``train``, and the warnings of this rank."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    return {**train(folder, nodes, steps, dim, root, 0, no_root, parity=3), "warnings": warnings}


@pytest.fixture(scope="module")
def first_job(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    assert [r["left"] for r in ranks.run(3, train_with_parity, str(folder), [0, 1, 2], range(1, 4))] == [((), ())] * 3
    return folder


@pytest.fixture
def saved(first_job: Path, tmp_path: Path) -> Path:
    """Steps 2 and 3 of three ranks on three nodes, published; step 1 was removed."""
    shutil.copytree(first_job, tmp_path, dirs_exist_ok=True)
    return tmp_path


def parity(folder: Path, node: int, step: int = 3) -> Path:
    """The one parity file of a node."""
    (file,) = (folder / f"node{node}" / f"step-{step:08}" / "parity").glob("*.xor")
    return file


def test_each_node_has_its_own_files_and_parity_of_the_others(saved: Path) -> None:
    on = [data(saved / f"node{n}") for n in range(3)]
    assert all(on) and sum(map(len, on)) == len(on[0] | on[1] | on[2]) and on[0] | on[1] | on[2] == data(saved / "root")
    for n in range(3):
        record = json.loads(parity(saved, n).with_suffix(".json").read_bytes())
        protected = {Path(term["path"]).name for term in record["terms"]}
        own = {p.name for p in (saved / f"node{n}").glob("step-00000003/data/*")}
        assert protected and not protected & own
        assert not (saved / f"node{n}" / "step-00000001").exists()  # and with it its parity
    assert not [*(saved / "root").rglob("parity")]
    stored = [p.stat().st_size for n in range(3) for p in (saved / f"node{n}").glob("step-00000003/data/*")]
    assert sum(parity(saved, n).stat().st_size for n in range(3)) <= sum(stored) / 2 + 3 * 4096


@pytest.mark.parametrize(("left", "dim"), [([0, 2], 1), pytest.param([1, 2, 2], 0, marks=pytest.mark.slow)])
def test_a_node_is_gone_and_what_it_had_is_computed(ranks: Ranks, saved: Path, left: list[int], dim: int) -> None:
    """In another layout, by other numbers of ranks, and without the root; what they save then is protected anew."""
    (gone,) = {*range(3)} - {*left}
    shutil.rmtree(saved / f"node{gone}")
    results = ranks.run(len(left), train_with_parity, str(saved), left, range(4, 5), dim, "root", True)
    assert [r["start"] for r in results] == [3] * len(left)
    assert {name for r in results for name in names(r)} == {"parity", *(f"node{n}" for n in left)}
    assert all(parity(saved, n, 4).exists() for n in left) and [r["left"][1] for r in results] == [()] * len(left)


def test_two_of_a_group_are_named_and_the_root_is_read_or_the_step_before(ranks: Ranks, saved: Path) -> None:
    for n in (0, 1):
        shutil.rmtree(saved / f"node{n}" / "step-00000003")
    results = ranks.run(3, train_with_parity, str(saved), [0, 1, 2], range(0))
    assert [r["start"] for r in results] == [3] * 3 and any("root" in names(r) for r in results)
    said = [text for r in results for text in r["warnings"] if "computing it from parity would take data/" in text]
    assert said and all(text.endswith(("of node0", "of node1")) for text in said)
    before = ranks.run(3, train_with_parity, str(saved), [0, 1, 2], range(0), 0, "elsewhere")
    assert [r["start"] for r in before] == [2] * 3
    (text,) = {text for r in before for text in r["warnings"] if "step-00000003 is passed over" in text}
    assert "files are on no node that answers and not at the root, and parity gives the first of them only with data/" in text
    assert "rank 0 on" in text and "w[0:22,:]" in text
    for n in (0, 1):
        shutil.rmtree(saved / f"node{n}")
    assert ranks.run(1, refused, str(saved)) == [True]


def refused(folder: str) -> bool:
    with pytest.raises(CorruptError, match="parity gives the first of them only with"):
        train_with_parity(folder, [2], range(0), 0, "third")
    return True


def test_damaged_parity_is_named_and_the_root_is_read(ranks: Ranks, saved: Path) -> None:
    shutil.rmtree(saved / "node1")
    damaged = parity(saved, 0)
    for at in range(0, damaged.stat().st_size, 64):
        flip(damaged, at)
    results = ranks.run(2, train_with_parity, str(saved), [0, 2], range(0), 1)
    assert [r["start"] for r in results] == [3] * 2 and any("root" in names(r) for r in results)
    warnings = [text for r in results for text in r["warnings"]]
    assert any(f"parity/{damaged.name} on node node0:" in text and "is damaged" in text for text in warnings), warnings
    assert any("node parity gave wrong bytes; node root is read" in text for text in warnings), warnings


def test_damage_of_a_file_is_mended_by_parity(ranks: Ranks, saved: Path) -> None:
    """All nodes are there; one has a flipped byte in a chunk. The root is not read."""
    flip(max((saved / "node0").glob("step-00000003/data/*")), -1)
    results = ranks.run(3, train_with_parity, str(saved), [0, 1, 2], range(0), 1, "root", True)
    assert [r["start"] for r in results] == [3] * 3 and any("parity" in names(r) for r in results)
