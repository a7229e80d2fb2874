"""Who writes what of files that are written together: every byte once, by windows or directly, and no more in a round than is allowed.

The oracle evaluates views on numpy arrays that hold the number of each element.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.catalog import Grid, TensorEntry
from ckpt.converters import export_plan
from ckpt.converters.export_plan import StateCatalog, Way, WritePlan, WritePlanner
from ckpt.converters.selection import SelectOptions, choose_weights
from ckpt.converters.target import OutputFile, OutputOptions
from ckpt.converters.targets.hf import plan
from ckpt.dtypes import DTYPES
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.plan import views
from ckpt.plan.views import LogicalTensor
from tests.box_strategies import grids

RANKS = (0, 1, 2, 5)
KIND = DTYPES["int32"]
Numbers = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


@st.composite
def catalogs(draw: st.DrawFn) -> StateCatalog:
    entries, owners = {}, {}
    for name in "abc":
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0 if name == "c" else 2, max_size=3)))
        grid = draw(grids(shape))
        entries[name] = TensorEntry(name=name, dtype=KIND, shape=shape, grid=grid)
        owners[name] = np.array([draw(st.sampled_from(RANKS)) for _ in range(len(grid))], dtype=np.int64)
    nodes = {name: {"$tensor": name} for name in entries}
    return StateCatalog(
        url="inprocess://x", backend=InProcessBackend("inprocess://x"), tensors=entries, owners=owners, state=nodes, world_size=4
    )


def respelled(shapes: Any) -> dict[str, LogicalTensor]:
    """One turned, one cut in two and put together the other way round with a hole at its end, one as it is."""
    a, b, c = (views.whole(n, shapes[n]) for n in "abc")
    rank = len(shapes["b"])
    first, second = views.split(b, rank - 1, [shapes["b"][-1] // 2, shapes["b"][-1] - shapes["b"][-1] // 2])
    return {
        "turned": views.transpose(a, list(reversed(range(len(shapes["a"]))))),
        "swapped": views.padded(views.concat([second, first], rank - 1), 0, shapes["b"][0] + 1),
        "c": c,
    }


def evaluated(view: LogicalTensor, sources: Numbers) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.zeros(view.shape, dtype=np.int64)
    for piece in view.pieces:
        found[piece.box.slices] = taken(piece, sources)
    return found


def taken(piece: views.ViewPiece, sources: Numbers) -> Any:
    part = sources[piece.source][piece.part.slices]
    named = [a for a in piece.axes if a is not None]
    return part.transpose(named + [a for a in range(part.ndim) if a not in named]).reshape(piece.box.shape)


def filled(planner: WritePlanner, found: WritePlan, files: tuple[OutputFile, ...], sources: Numbers) -> tuple[list[Any], list[Any]]:
    """The elements of all files by place, and how often each was written: as if every rank had done its share."""
    image = [np.zeros(f.size // KIND.itemsize, dtype=np.int64) for f in files]
    times = [np.zeros(f.size // KIND.itemsize, dtype=np.int64) for f in files]
    for w in found.windows:
        for segment in w.segments:
            held = np.zeros(segment.box.shape, dtype=np.int64)
            for move in planner.moves(w.file, segment):
                assert move.rank in w.sizes
                held[move.piece.box.relative_to(segment.box.offset).slices] += taken(move.piece, sources)
            at = slice(segment.start // KIND.itemsize, (segment.start + segment.length) // KIND.itemsize)
            image[w.file][at] += held.ravel()
            times[w.file][at] += 1
            assert w.start <= segment.start and segment.start + segment.length <= w.stop
    for rank in RANKS:
        for f, i, piece in planner.direct_pieces(found, rank):
            item = files[f].items[i]
            at = slice(item.offset // KIND.itemsize, (item.offset + item.length) // KIND.itemsize)
            image[f][at].reshape(item.box.shape)[piece.box.slices] += taken(piece, sources)
            times[f][at].reshape(item.box.shape)[piece.box.slices] += 1
    return image, times


@settings(deadline=None, max_examples=60)
@given(catalogs(), st.sampled_from(["ranges", "parts", "files"]), st.booleans(), st.sampled_from([64, 256, 4096]), st.integers(1, 800))
def test_every_byte_once(catalog: StateCatalog, way: Way, translate: bool, part: int, shard: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.settings.WORTH_A_CALL", 12)
        patch.setattr(export_plan, "WINDOW", 64)
        chosen = choose_weights(catalog, SelectOptions(views=respelled if translate else None))
        files = plan(chosen, OutputOptions(id="", url="x", shard_size=shard, name=None, previous=None)).files
        planner = WritePlanner(catalog, chosen.tensors, files, RANKS)
        budget = 700
        found = planner.plan(way, [part if way == "parts" else 0] * len(files), budget)
    sources, at = {}, 1
    for name, entry in catalog.tensors.items():
        sources[name] = np.arange(at, at + entry.numel).reshape(entry.shape)
        at += entry.numel
    image, times = filled(planner, found, files, sources)
    for f, file in enumerate(files):
        for item in file.items:
            place = slice(item.offset // KIND.itemsize, (item.offset + item.length) // KIND.itemsize)
            wanted = evaluated(chosen.tensors[item.name].view, sources)
            assert (image[f][place].reshape(item.box.shape) == wanted).all()
            assert (times[f][place] == 1).all()
    check_rounds(found, budget)
    if way == "parts":
        by_file = [[(w.start, w.stop) for w in found.windows if w.file == f] for f in range(len(files))]
        for file, ranges in zip(files, by_file, strict=True):
            assert ranges == [*pairwise([*range(0, file.size, part), file.size])]
    if way == "files":
        assert all(w.aggregator == RANKS[w.file % len(RANKS)] for w in found.windows)


def check_rounds(found: WritePlan, budget: int) -> None:
    """A rank has no more than the budget in a round, unless it is one window alone."""
    load: dict[tuple[int, int], list[int]] = {}
    for w in found.windows:
        for rank, n in w.sizes.items():
            if rank != w.aggregator:
                load.setdefault((w.round, rank), []).append(n)
        load.setdefault((w.round, w.aggregator), []).append(w.stop - w.start)
    assert all(sum(sizes) <= budget or len(sizes) == 1 for sizes in load.values())


@pytest.mark.parametrize(
    ("cuts", "shortest"),
    [
        (((0, 4, 8), (0, 6)), math.inf),
        (((0, 8), (0, 2, 6)), 2 * 4),
        (((0, 1), (0, 2, 6)), math.inf),
        (((0, 4, 8), (0, 3, 6)), 3 * 4),
        (((0, 2), (0, 1, 5), (0, 10)), 10 * 4),
        ((), math.inf),
    ],
)
def test_the_shortest_run_of_a_grid(cuts: Any, shortest: float) -> None:
    shape = [c[-1] for c in cuts]
    assert export_plan._shortest(shape, cuts, 4) == shortest
    strides = np.arange(math.prod(shape)).reshape(shape)
    runs = []
    for cell in product(*(pairwise(c) for c in cuts)):
        flat = np.sort(strides[tuple(slice(*x) for x in cell)].ravel())
        lengths = np.diff(np.flatnonzero(np.diff(flat, prepend=-2, append=flat[-1] + 2) != 1))
        runs.append(math.inf if len(lengths) == 1 else int(lengths.min()) * 4)
    assert min(runs) == shortest


def test_tensors_cut_by_rows_need_no_windows_and_aggregators_share_the_rest() -> None:
    shape = (1024, 4096)
    rows = Grid(cuts=((0, 256, 512, 768, 1024), (0, 4096)), files=np.zeros(1, dtype=np.int32))
    columns = Grid(cuts=((0, 1024), (0, 1024, 2048, 3072, 4096)), files=np.zeros(1, dtype=np.int32))
    entries = {n: TensorEntry(name=n, dtype=KIND, shape=shape, grid=g) for n, g in {"rows": rows, "columns": columns}.items()}
    owners = dict.fromkeys(entries, np.array(RANKS))
    state = {n: {"$tensor": n} for n in entries}
    catalog = StateCatalog(url="x", backend=InProcessBackend("inprocess://x"), tensors=entries, owners=owners, state=state, world_size=4)
    chosen = choose_weights(catalog, SelectOptions())
    files = plan(chosen, OutputOptions(id="", url="x", shard_size=None, name="x", previous=None)).files
    found = WritePlanner(catalog, chosen.tensors, files, RANKS).plan("ranges", [0], 64 << 20)
    assert [files[f].items[i].name for f, i in found.direct] == ["rows"]
    kept = [sum(w.stop - w.start for w in found.windows if w.aggregator == r) for r in RANKS]
    assert sum(kept) == 16 << 20 and len(found.windows) <= 3 and max(kept) <= export_plan.WINDOW
