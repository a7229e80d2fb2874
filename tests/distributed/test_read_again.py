"""Ranks that read for each other, and one gets a flipped bit: what it had handed out by then is read again by those that have it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.io_backends.registry import wrap_backends
from tests.distributed.ranks import Ranks, RanksFailedError
from tests.distributed.test_exchange import apart
from tests.failures.damage import flip
from tests.failures.flips import Flip

NAMES = ("a", "b", "c")
SIZE = (3000, 900)
"""Of float32: chunks of five pieces."""


def whole(name: str) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(ord(name)))


class Average:
    """An object that adds what it is given to what it has: it notices if it is given something twice, or something wrong."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = self.values + state["values"]


def save(url: str) -> None:
    ckpt.save(url, {**{name: whole(name) for name in NAMES}, "small": torch.arange(1000), "average": Average(whole("d"))})


def load(url: str, places: list[tuple[str, int]], kind: str, options: dict[str, Any]) -> tuple[bool, int, int, int]:
    """Whether all is right; how many flips there were, what was read unchecked, and how often the log says that it was right at last. Each
    rank's first answer with a place is wrong."""
    options = dict(options)
    if options.pop("apart", False):
        apart()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = [Replicate() if kind == "whole" else Shard(0 if kind == "rows" else 1)]
    state: dict[str, Any] = {name: distribute_tensor(torch.zeros(SIZE), mesh, spread) for name in NAMES}
    state["small"] = torch.zeros(1000, dtype=torch.int64)
    state["average"] = Average(torch.zeros(SIZE))
    flips = [Flip(path, at) for path, at in places]
    with ExitStack() as wrapped:
        for one in flips:
            wrapped.enter_context(wrap_backends(one.wrap))
        report = ckpt.load(url, state, **options)
    same = all(torch.equal(t.full_tensor(), whole(n)) for n, t in state.items() if isinstance(t, DTensor))
    same = same and torch.equal(state["small"], torch.arange(1000)) and torch.equal(state["average"].values, whole("d"))
    return same, sum(f.happened for f in flips), report.bytes_unverified, sum("read again, and right" in line for line in lines)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("read_again") / "c"
    ranks.run(1, save, str(directory))
    return directory


def at_places(saved: Path) -> list[tuple[str, int]]:
    """The beginning of a chunk, which is in its first piece, its middle and its end, each of another tensor; and a small one."""
    from ckpt.formats.registry import open_catalog

    catalog = open_catalog(str(saved))
    extents = {name: catalog.extents(catalog.tensors[name], [0])[0] for name in (*NAMES, "small", "average.values")}
    within = {"a": 5, "b": extents["b"].length // 2, "c": extents["c"].length - 1, "small": 9, "average.values": 7}
    return [(f"{saved}/{extents[name].path}", extents[name].offset + at) for name, at in within.items()]


HANDED_OUT = [
    pytest.param(
        kind,
        {"read": ckpt.ReadOptions(exchange=True), **more},
        id=f"{kind}-{more or ''}",
        marks=pytest.mark.slow if more and kind != "rows" else (),
    )
    for kind in ("whole", "rows", "columns")
    for more in ({}, {"apart": True}, {"job": ckpt.Job(threads=3)})
]


@pytest.mark.parametrize(("kind", "options"), HANDED_OUT)
def test_pieces_that_were_handed_out_are_read_again(ranks: Ranks, saved: Path, kind: str, options: dict[str, Any]) -> None:
    found = ranks.run(3, load, str(saved), at_places(saved), kind, options)
    assert all(same for same, *_ in found)
    assert sum(flips for _, flips, *_ in found) >= 5  # each reader's first answer, and that of those that read again
    assert sum(lines for *_, lines in found) == sum(flips for _, flips, *_ in found)
    assert all(unchecked == 0 for *_, unchecked, _ in found)


def test_damage_in_the_storage_is_found_as_before(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    import shutil

    directory = tmp_path / "c"
    shutil.copytree(saved, directory)
    path, at = at_places(saved)[1]
    flip(directory / Path(path).relative_to(saved), at)
    with pytest.raises(RanksFailedError, match=r"chunk .* of tensor b is damaged: its XXH3-64 digest is"):
        ranks.run(3, load, str(directory), [], "rows", {"read": ckpt.ReadOptions(exchange=True)})
