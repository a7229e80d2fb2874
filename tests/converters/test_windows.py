"""Windows of files, and boxes of views read into memory, against numpy."""

from __future__ import annotations

import math
import subprocess
import sys
import zlib
from itertools import pairwise, product
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
from ckpt.catalog import Grid, TensorEntry
from ckpt.converters import export_plan, file_stream
from ckpt.converters.buffered import ViewBox, read_views
from ckpt.converters.export_plan import StateCatalog, Way, WritePlan, WritePlanner
from ckpt.converters.file_stream import copy_through, jobs_of, runs_of
from ckpt.converters.selection import OutputSet, OutputTensor, SelectOptions, choose_weights, seams_of
from ckpt.converters.target import FileItem, OutputFile, OutputOptions, slabs, windows
from ckpt.converters.targets.hf import plan
from ckpt.converters.targets.megatron_optimizer import crc_of_parts, joined_crc
from ckpt.dtypes import DTYPES
from ckpt.engine.digest_reader import DigestReader
from ckpt.engine.load.reader import Reader
from ckpt.errors import CorruptError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.plan import views
from ckpt.plan.layout.geometry import Box
from ckpt.plan.views import LogicalTensor
from tests.box_strategies import grids

SHAPES = st.lists(st.integers(0, 6), max_size=4)


@st.composite
def boxes(draw: Any) -> Box:
    shape = draw(SHAPES)
    return Box(tuple(draw(st.integers(0, 9)) for _ in shape), tuple(shape))


@given(boxes(), st.sampled_from([1, 2, 8]), st.lists(st.integers(0, 15), unique=True).map(sorted), st.integers(1, 200))
def test_slabs_are_the_box_row_by_row(box: Box, itemsize: int, seams: list[int], most: int) -> None:
    found = list(slabs(box, itemsize, seams, most))
    numbers = np.arange(box.numel).reshape(box.shape)
    back = tuple(-o for o in box.offset)
    flat = [numbers[b.shifted(back).slices].ravel() for b in found if b.shifted(back)]
    assert (np.concatenate(flat) if flat else np.zeros(0)).tolist() == list(range(box.numel))
    assert all(b.numel * itemsize <= max(most, itemsize) for b in found)
    if box.shape and box.shape[0] > 1 and all(box.numel // box.shape[0] * itemsize <= most for _ in "1") and box.numel * itemsize > most:
        ends = [b.offset[0] + b.shape[0] for b in found[:-1]]
        rows = max(1, most // (box.numel // box.shape[0] * itemsize))
        starts = [b.offset[0] for b in found]
        for start, end in zip(starts, ends, strict=False):
            inside = [s for s in seams if start < s <= start + rows]
            assert end == (inside[-1] if inside else start + rows)


@given(st.lists(st.tuples(boxes(), st.sampled_from([1, 4]), st.integers(0, 30)), max_size=6), st.integers(8, 300), st.integers(1, 300))
def test_windows_have_each_byte_once(rows: list[tuple[Box, int, int]], most: int, enough: int) -> None:
    items, at = [], 0
    for i, (box, size, gap) in enumerate(rows):
        items.append(FileItem(f"t{i}", box, at + gap, size))
        at += gap + items[-1].length
    found = list(windows(items, [[]] * len(items), most, enough))
    covered = [b for w in found for s in w for b in range(s.start, s.start + s.length)]
    assert covered == [b for i in items for b in range(i.offset, i.offset + i.length)]
    for window in found:
        start, stop = window[0].start, window[-1].start + window[-1].length
        assert sum(s.length for s in window) <= stop - start
        assert len(window) == 1 or window[-1].start - start <= most
        assert all(s.length == s.box.numel * items[s.item].itemsize for s in window)
        for last, first in pairwise(window):
            assert last.item == first.item or first.start - start < enough
    for before, after in pairwise(found):  # none ends early within an item
        last, first = before[-1], after[0]
        assert last.item != first.item or last.start + last.length - before[0].start + first.length > most


def transformed(shapes: dict[str, tuple[int, ...]]) -> dict[str, views.LogicalTensor]:
    a, b = (views.whole(n, shapes[n]) for n in "ab")
    return {
        "fused": views.interleave([a, b], 0, 2),
        "stacked": views.stack([views.transpose(a, [1, 0, 2])] * 2, 1),
        "padded": views.padded(views.split(b, 1, [1, 3])[1], 1, 5),
        "one": views.unstack(a, 1)[2],
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_a_view_is_what_numpy_says(tmp_path_factory: Any, data: Any) -> None:
    url = str(tmp_path_factory.getbasetemp() / "read-views")
    a, b = torch.arange(4 * 4 * 3.0).reshape(4, 4, 3), -torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    if not Path(url).exists():
        ckpt.save(url, {"a": a, "b": b})
    expected = {
        "fused": torch.cat([a[:2], b[:1], a[2:], b[1:]]),
        "stacked": torch.stack([a.permute(1, 0, 2)] * 2, 1),
        "padded": torch.cat([b[:, 1:], torch.zeros(2, 2, 3)], 1),
        "one": a[:, 2],
    }
    catalog = open_catalog(url)
    made = transformed({n: t.shape for n, t in catalog.tensors.items()})
    parts, wanted = [], []
    for name in data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, max_size=3)):
        shape = tuple(expected[name].shape)
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        box = Box(tuple(low), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))
        kind = data.draw(st.sampled_from([torch.float32, torch.float64]))
        parts.append(ViewBox(made[name], box, torch.full(box.shape, math.nan, dtype=kind)))
        wanted.append(expected[name][box.slices].to(kind))
    read_views(Reader(catalog=catalog, verify="full", threads=2), parts)
    assert all(torch.equal(p.memory, w) for p, w in zip(parts, wanted, strict=True))


def test_seams_are_where_chunks_and_pieces_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ckpt.settings.CHUNK", 24)
    from ckpt import convert

    ckpt.save(str(tmp_path / "s"), {"a": torch.arange(21.0).reshape(7, 3)})
    convert(str(tmp_path / "s"), str(tmp_path / "n"), to="native")
    catalog = open_catalog(str(tmp_path / "n"))
    a = views.whole("a", (7, 3))
    assert seams_of(catalog, a) == [0, 2, 4, 6]
    assert seams_of(catalog, views.concat([views.part(a, Box((3, 0), (4, 3))), a], 0)) == [0, 1, 3, 4, 6, 8, 10]
    assert seams_of(catalog, views.transpose(a, [1, 0])) == [0]


# ---------------------------------------------------------------- CRC-32 sums of parts: put together, they are what zlib says of the whole.


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined(first: bytes, second: bytes) -> None:
    assert joined_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_joined_with_long_parts() -> None:
    first, second = b"ckpt" * 1000, bytes(range(256)) * 40_000
    assert joined_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.tuples(st.integers(0, 70), st.binary(max_size=50)), max_size=6), st.integers(0, 70))
def test_zeros_between_parts(gaps: list[tuple[int, bytes]], end: int) -> None:
    whole = b""
    parts = []
    for gap, data in gaps:
        whole += bytes(gap)
        parts.append((len(whole), len(data), zlib.crc32(data)))
        whole += data
    whole += bytes(end)
    assert crc_of_parts(parts, len(whole)) == zlib.crc32(whole)


# ------------------------------------------------------------- Bytes that go from file to file as they are: which these are, against numpy.

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


# ------------------------------------------------------------------------------------------------------------------------------------------
# Who writes what of files that are written together: every byte once, by windows or directly, and no more in a round than is allowed. The
# oracle evaluates views on numpy arrays that hold the number of each element.

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
