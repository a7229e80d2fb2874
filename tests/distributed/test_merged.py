"""Flat shards (ZeRO, Megatron's distributed optimizer) on real ranks, merged into whole rows and not: the same bytes for every reader,
fewer chunks, little sent; and what happens when ranks die or disagree in the middle.

Shards are cut here by hand, and what is stored is read by the oracle, too. Tensors are larger than what is gathered whole (64 KiB), or
say that they are small.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt import Flat, GlobalShape, Layout, Replicate, Shard, Stage, pipeline
from ckpt.engine.verify import verify
from ckpt.errors import CkptError, ConsistencyError, CorruptError, DeadlineError, RankFailedError
from ckpt.net.peers import Peers
from tests.api.checked import described, pattern, same
from tests.distributed.ranks import Lost, Ranks, at_once
from tests.formats import oracle

Parts = dict[str, torch.Tensor]
F32, BF16, U8, F64 = torch.float32, torch.bfloat16, torch.uint8, torch.float64

LARGE: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "rows": (F32, (301, 257)),
    "deep": (F32, (61, 5, 7, 11)),
    "half": (BF16, (64, 1023)),
    "bytes": (U8, (999, 101)),
    "line": (F32, (100_001,)),
    "leading ones": (F32, (1, 1, 90, 1000)),
    "one row": (F64, (1, 20_003)),
    "few rows": (F32, (3, 40_000)),
    "wide": (F32, (2, 60_001)),
    "experts": (F32, (2, 91, 1002)),
}
"""No block of them is small. Of ``few rows`` too much would move between 2 or 4 ranks. ``wide`` and ``experts`` have rows that are larger
than the range of one of 3 or 4 ranks; those of the second are divided evenly by 4."""
SMALL: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "small": (F32, (20, 31)),
    "tiny": (BF16, (3,)),
    "one": (F32, (1,)),
    "empty": (F32, (0, 5)),
    "none": (U8, (0,)),
}
ALL = LARGE | SMALL
REGULAR = {"rows", "deep", "half", "bytes", "line", "leading ones", "one row", "small", "tiny", "one"}
"""Merged for any number of ranks up to 4."""


def whole(name: str, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = ALL) -> torch.Tensor:
    dtype, shape = shapes[name]
    return pattern(dtype, *shape, seed=sum(map(ord, name)))


def flat_part(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    """Range ``index`` of the flattening, of ``ceil(n / parts)`` elements."""
    flat = tensor.contiguous().flatten()
    length = -(-len(flat) // parts)
    return flat[index * length : (index + 1) * length].clone()


# ------------------------------------------------------------------------------------------------------------ the layouts

Case = Callable[[int, int], "tuple[Parts, Layout]"]
"""From rank and number of ranks: the rank's tensors and the layout."""


def zero(rank: int, world: int) -> tuple[Parts, Layout]:
    """Flat over all ranks."""
    parts = {n: flat_part(whole(n), world, rank) for n in ALL}
    scalar = {"scalar": torch.tensor(2.5, dtype=F64)}
    rules: list[Any] = [(n, Flat("dp"), GlobalShape(shape)) for n, (_, shape) in ALL.items()]
    return parts | scalar, Layout({"dp": world}, [*rules, ("scalar", Replicate())])


def hsdp(rank: int, world: int) -> tuple[Parts, Layout]:
    """Two replicas of each range on an even number of ranks, else as many as there are ranks."""
    copies = 2 if world % 2 == 0 else world
    parts, layout = zero(rank % (world // copies), world // copies)
    return parts, Layout({"copies": copies, "dp": world // copies}, [(glob, *placements) for glob, placements in layout.rules])


def over_rows(rank: int, world: int) -> tuple[Parts, Layout]:
    """The distributed optimizer over tensor parallelism: rows over two, and what they leave flat over the others."""
    dp = max(world // 2, 1)
    tp = world // dp
    shapes = {n: shape for n, (_, shape) in LARGE.items() if shape[0] >= 60}
    parts = {n: flat_part(whole(n).chunk(tp)[rank % tp], dp, rank // tp) for n in shapes}
    return parts, Layout({"dp": dp, "tp": tp}, [(n, Shard(0, "tp"), Flat("dp"), GlobalShape(s)) for n, s in shapes.items()])


def stages(rank: int, world: int) -> tuple[Parts, Layout]:
    """Four layers on up to two stages, each flat over the ranks of its stage; the embedding on the first."""
    pp = 2 if world % 2 == 0 else 1
    dp = world // pp
    stage, at = divmod(rank, dp)
    parts = {}
    for local in range(4 // pp):
        layer = stage * (4 // pp) + local
        parts[f"layers.{local}.w"] = flat_part(layer_weight(layer), dp, at)
        parts[f"layers.{local}.b"] = flat_part(layer_weight(layer)[0], dp, at)
    if stage == 0:
        parts["embed"] = flat_part(whole("rows"), dp, at)
    rules = [
        ("*.w", Flat("dp"), GlobalShape((173, 129))),
        ("*.b", Flat("dp"), GlobalShape((129,))),
        ("embed", Flat("dp"), GlobalShape((301, 257)), Stage("pp", 0)),
    ]
    return parts, Layout({"pp": pp, "dp": dp}, rules, numbered=[pipeline("layers.{n}", layers=4, stages=pp)])


def layer_weight(layer: int) -> torch.Tensor:
    return pattern(F32, 173, 129, seed=layer)


WANTED: dict[Case, Callable[[], Parts]] = {
    zero: lambda: {n: whole(n) for n in ALL} | {"scalar": torch.tensor(2.5, dtype=F64)},
    hsdp: lambda: {n: whole(n) for n in ALL} | {"scalar": torch.tensor(2.5, dtype=F64)},
    over_rows: lambda: {n: whole(n) for n, (_, shape) in LARGE.items() if shape[0] >= 60},
    stages: lambda: (
        {f"layers.{i}.w": layer_weight(i) for i in range(4)}
        | {f"layers.{i}.b": layer_weight(i)[0].clone() for i in range(4)}
        | {"embed": whole("rows")}
    ),
}


# ------------------------------------------------------------------------------------------------------------ in a rank


def save(case: Case, url: str, how: dict[str, Any]) -> ckpt.SaveReport:
    parts, layout = case(dist.get_rank(), dist.get_world_size())
    if "capture" in how:
        handle = ckpt.save_async(url, dict(parts), layout=layout, **how)
        for part in parts.values():
            if part.nbytes < 256 << 10:  # captured before the call returns (docs of save_async), what other ranks get of it too
                part.zero_()
        handle.fence()
        for part in parts.values():
            part.zero_()
        return handle.result()
    return ckpt.save(url, dict(parts), layout=layout, **how)


def load(case: Case, urls: list[str]) -> list[str]:
    """Differences of each rank's own parts, after a load from each."""
    parts, layout = case(dist.get_rank(), dist.get_world_size())
    problems = []
    for url in urls:
        state = {name: torch.full_like(t, 7) for name, t in parts.items()}
        ckpt.load(url, dict(state), layout=layout)
        problems += [f"{url}: {name}" for name, t in parts.items() if not same(state[name], t)]
    return problems


def load_rows(case: Case, urls: list[str]) -> list[str]:
    """The same into parts by rows of the whole tensors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = []
    for url in urls:
        state, wanted, rules = {}, {}, []
        for name, tensor in WANTED[case]().items():
            split = tensor.ndim > 0 and tensor.shape[0] >= world
            wanted[name] = tensor.chunk(world)[rank].clone() if split and tensor.shape[0] % world == 0 else tensor
            rules.append((name, Shard(0, "x") if split and tensor.shape[0] % world == 0 else Replicate()))
            state[name] = torch.full_like(wanted[name], 7)
        ckpt.load(url, dict(state), layout=Layout({"x": world}, rules))
        problems += [f"{url}: {name}" for name, t in wanted.items() if not same(state[name], t)]
    return problems


# ------------------------------------------------------------------------------------------------------------ what is stored


@dataclass(frozen=True, kw_only=True)
class Index:
    """What the tables of a checkpoint say, read by pyarrow alone."""

    cuts: dict[str, list[list[int]] | None]
    chunks: dict[str, int]


def index(url: str) -> Index:
    record = json.loads(Path(url, "checkpoint.json").read_bytes())
    tensors, grids = (
        pa.ipc.open_file(pa.memory_map(str(Path(url, record["index"][f"{n}.arrow"]["path"])))).read_all().to_pylist()
        for n in ("tensors", "grids")
    )
    of = {t["name"]: grids[t["grid"]] for t in tensors}
    rank = {t["name"]: len(t["shape"]) for t in tensors}
    count = {
        n: math.prod(len(c) - 1 for c in g["cuts"]) if g["cuts"] is not None else len(g["boxes"]) // (2 * rank[n]) for n, g in of.items()
    }
    return Index(cuts={n: g["cuts"] for n, g in of.items()}, chunks=count)


WAYS: dict[str, dict[str, Any]] = {
    "merged": {},
    "boxes": {"merge_flat_shards": False},
    "lazy, coded": {"capture": "lazy", "codec": "planes-zstd"},
    "coded": {"codec": "zstd"},
    "eager": {"capture": "eager"},
}


@dataclass(frozen=True, kw_only=True)
class Saved:
    urls: dict[str, str]
    reports: dict[str, list[ckpt.SaveReport]]


def save_all(folder: str) -> dict[str, dict[str, ckpt.SaveReport]]:
    """All cases in all ways: a run of ranks costs more than a save."""
    return {case.__name__: {way: save(case, f"{folder}/{case.__name__}/{way}", how) for way, how in WAYS.items()} for case in WANTED}


def load_all(urls: dict[str, list[str]]) -> list[str]:
    """What is wrong after loads of all cases, in the layout that they have on these ranks, and by rows."""
    found = []
    for case in WANTED:
        found += [f"{case.__name__}: {problem}" for load_in in (load, load_rows) for problem in load_in(case, urls[case.__name__])]
    return found


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int], Saved]:
    """Each case on each number of ranks, saved in every way, once."""
    known: dict[tuple[Case, int], Saved] = {}

    def make(case: Case, world: int) -> Saved:
        if (case, world) not in known:
            folder = tmp_path_factory.mktemp(f"on{world}")
            told = ranks.run(world, save_all, str(folder))
            for each in WANTED:
                name = each.__name__
                urls = {w: str(folder / name / w) for w in WAYS}
                known[each, world] = Saved(urls=urls, reports={w: [t[name][w] for t in told] for w in WAYS})
        return known[case, world]

    return make


PLACES = [pytest.param(case, world, marks=pytest.mark.slow if world == 2 else ()) for case in WANTED for world in (1, 2, 3, 4)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("case", "world"), PLACES)
def test_every_reader_finds_the_same_bytes(saved: Callable[[Case, int], Saved], case: Case, world: int, way: str) -> None:
    url = saved(case, world).urls[way]
    wanted = {name: described(tensor) for name, tensor in WANTED[case]().items()}
    assert oracle.read(url) == wanted
    view = ckpt.open(url)
    assert {n: described(view[n].read()) for n in view} == wanted
    assert verify(url).problems == ()


@pytest.mark.parametrize(
    ("saver", "loader"), [(4, 3), (1, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((3, 2), (2, 4), (1, 3), (4, 1)))]
)
def test_loads_into_other_layouts(ranks: Ranks, saved: Callable[[Case, int], Saved], saver: int, loader: int) -> None:
    urls = {case.__name__: list(saved(case, saver).urls.values()) for case in WANTED}
    assert ranks.run(loader, load_all, urls) == [[]] * loader


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
@pytest.mark.parametrize("case", [zero, hsdp, over_rows, stages])
def test_merged_grids_are_regular_and_coarser(saved: Callable[[Case, int], Saved], case: Case, world: int) -> None:
    made = saved(case, world)
    merged, boxes = index(made.urls["merged"]), index(made.urls["boxes"])
    irregular = {n for n, cuts in merged.cuts.items() if cuts is None}
    assert irregular <= {"few rows", "wide", "experts"}
    if (case, world) == (zero, 4):
        assert irregular == {"few rows", "wide"}
        assert {n for n, cuts in boxes.cuts.items() if cuts is None} == {n for n in ALL if math.prod(ALL[n][1])}
    assert {n for n in merged.chunks if merged.chunks[n] > boxes.chunks[n] and n not in irregular} == set()
    ranges = {zero: world, hsdp: world // 2 if world % 2 == 0 else 1, over_rows: world // 2, stages: world // (2 - world % 2)}[case]
    if ranges > 1:
        assert sum(merged.chunks.values()) < sum(boxes.chunks.values())
    assert all(r.sent_bytes == 0 for r in made.reports["boxes"])
    assert index(made.urls["lazy, coded"]) == merged


# ------------------------------------------------------------------------------------------------------------ what is sent


def save_each(folder: str, copies: int) -> dict[str, int]:
    """Bytes that this rank sends when it saves each of the large tensors alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = world // copies
    sent = {}
    for number, (name, (_, shape)) in enumerate(LARGE.items()):
        layout = Layout({"copies": copies, "dp": dp}, [(name, Flat("dp"), GlobalShape(shape))])
        sent[name] = ckpt.save(f"{folder}/{number}", {name: flat_part(whole(name), dp, rank % dp)}, layout=layout).sent_bytes
    return sent


@pytest.mark.parametrize(("world", "copies"), [(3, 1), (4, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 1), (4, 1)))])
def test_at_most_half_a_row_is_sent_at_each_boundary(ranks: Ranks, tmp_path: Path, world: int, copies: int) -> None:
    told = ranks.run(world, save_each, str(tmp_path), copies)
    boundaries = world // copies - 1
    for name, (dtype, shape) in LARGE.items():
        row = math.prod(shape[next((d for d, n in enumerate(shape) if n > 1), len(shape)) + 1 :]) * dtype.itemsize
        total = sum(sent[name] for sent in told)
        assert total <= boundaries * row / 2, f"{name}: {total} bytes, rows of {row}"
        if len(shape) == 1 or math.prod(shape) % (world // copies) == 0 == shape[0] % (world // copies):
            assert total == 0, name
    if world == 4 and copies == 1:
        assert {n for n in LARGE if any(sent[n] for sent in told)} >= {"rows", "deep", "bytes", "leading ones"}


# ------------------------------------------------------------------------------------------------------------ optimizers


SIZES = {"a": (301, 257), "b": (129, 311), "bias": (311,), "gain": (1,)}


class FlatModel(nn.Module):
    """A model whose parameters are this rank's ranges of whole ones."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        for name, shape in SIZES.items():
            values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + shape[0]))
            setattr(self, name, nn.Parameter(flat_part(values, world, rank)))


def trained(rank: int, world: int, steps: int = 2) -> tuple[FlatModel, torch.optim.Adam]:
    """Gradients are those of whole parameters, cut like them, so that all numbers of ranks train alike."""
    model = FlatModel(rank, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        for name, param in model.named_parameters():
            whole_grad = torch.randn(SIZES[name], generator=torch.Generator().manual_seed(100 * step + len(name)))
            param.grad = flat_part(whole_grad, world, rank)
        optimizer.step()
    return model, optimizer


def flat_layout(world: int) -> Layout:
    return Layout({"dp": world}, [(f"model.{n}", Flat("dp"), GlobalShape(shape)) for n, shape in SIZES.items()])


def save_trained(url: str, how: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = trained(rank, world)
    state = {"model": model, "optimizer": optimizer}
    if "capture" not in how:
        ckpt.save(url, state, layout=flat_layout(world), **how)
        return
    handle = ckpt.save_async(url, state, layout=flat_layout(world), **how)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    handle.result()


def load_trained(urls: list[str]) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    right, right_optimizer = trained(rank, world)
    problems = []
    for url in urls:
        model, optimizer = trained(rank, world, steps=0)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float("nan"))
        ckpt.load(url, {"model": model, "optimizer": optimizer}, layout=flat_layout(world))
        for (name, a), b in zip(model.named_parameters(), right.parameters(), strict=True):
            mine, other = optimizer.state[a], right_optimizer.state[b]
            problems += [] if same(a.data, b.data) else [f"{url}: {name}"]
            problems += [f"{url}: {name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq") if not same(mine[key], other[key])]
    return problems


@pytest.mark.parametrize(("saver", "loader"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_optimizer_state_beside_flat_parameters(ranks: Ranks, tmp_path: Path, saver: int, loader: int) -> None:
    urls = []
    for way in ("merged", "boxes", "lazy, coded"):
        urls.append(str(tmp_path / way))
        ranks.run(saver, save_trained, urls[-1], WAYS[way])
    assert ranks.run(loader, load_trained, urls) == [[]] * loader
    contents = [oracle.read(url) for url in urls]
    assert contents[0] == contents[1] == contents[2]
    model, optimizer = trained(0, 1)
    for name, param in model.named_parameters():
        assert contents[0][f"model.{name}"] == described(param.detach().reshape(SIZES[name]))
        moments = optimizer.state[param]
        assert contents[0][f"optimizer.state.model.{name}.exp_avg"] == described(moments["exp_avg"].reshape(SIZES[name]))
    cuts = index(urls[0]).cuts
    assert cuts["optimizer.state.model.a.exp_avg"] is not None
    assert index(urls[1]).cuts["optimizer.state.model.a.exp_avg"] is None


# ------------------------------------------------------------------------------------------------------------ damage


def edges_of(url: str) -> list[tuple[Path, int]]:
    """The first and the last byte of each stored chunk of ``rows``: whole rows, of which some came from another rank."""
    found = []
    for path in Path(url, "data").iterdir():
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8:start]).items():
            if key.startswith("rows"):
                a, b = entry["data_offsets"]
                found += [(path, start + a), (path, start + b - 1)]
    return found


@pytest.mark.parametrize("way", ["merged", "lazy, coded"])
def test_a_damaged_byte_of_a_merged_chunk_is_found(saved: Callable[[Case, int], Saved], way: str) -> None:
    url = saved(zero, 3).urls[way]
    edges = edges_of(url)
    assert len(edges) == 6
    for path, at in edges:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        try:
            (problem,) = verify(url).problems
            assert problem.tensor == "rows"
            with pytest.raises(CorruptError, match="rows"):
                ckpt.load(url, {"rows": torch.zeros(301, 257)}, only="rows", strict=False)
        finally:
            data[at] ^= 1
            path.write_bytes(data)
    assert verify(url).problems == ()


# ------------------------------------------------------------------------------------------------------------ death


def rows_of(rank: int, world: int, fill: float) -> tuple[Parts, Layout]:
    shape = (301, 257)
    layout = Layout({"dp": world}, [("w", Flat("dp"), GlobalShape(shape))])
    return {"w": flat_part(torch.full(shape, fill), world, rank)}, layout


def save_and_die(url: str, lost: int, background: bool) -> tuple[str, float, str]:
    """A good save, and one in which a rank is killed when the exchange begins. What it raised, and after how many seconds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state, layout = rows_of(rank, world, 1.0)
    assert sum(t[0] for t in gathered(ckpt.save(url, state, layout=layout).sent_bytes)) > 0
    dist.barrier()
    if rank == lost:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Peers.exchange = die  # type: ignore[method-assign]
    state, layout = rows_of(rank, world, 2.0)
    began = time.monotonic()
    try:
        if background:
            ckpt.save_async(url, state, layout=layout, job=ckpt.Job(timeout=6)).result()
        else:
            ckpt.save(url, state, layout=layout, job=ckpt.Job(timeout=6))
    except CkptError as err:
        return type(err).__name__, time.monotonic() - began, str(err)
    return "nothing", time.monotonic() - began, ""


def gathered(value: int) -> list[tuple[int]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (value,))
    return everyone


@pytest.mark.alone
def test_a_rank_that_dies_in_the_exchange(ranks: Ranks, tmp_path: Path) -> None:
    def check(lost: int, background: bool) -> None:
        url = f"{tmp_path}/{lost}-{background}"
        found = ranks.run(3, save_and_die, url, lost, background, timeout=60, allow_death=True)
        assert isinstance(found[lost], Lost)
        for rank, told in enumerate(found):
            if rank != lost:
                error, seconds, text = told
                assert error in (DeadlineError.__name__, RankFailedError.__name__), told
                assert f"rank {lost}" in text or any(f"rank {other}" in text for other in range(3) if other != rank)
                assert seconds < 30, told
        assert f"rank {lost}" in " ".join(told[2] for rank, told in enumerate(found) if rank != lost)
        assert torch.equal(ckpt.open(url)["w"].read(), torch.ones(301, 257)), "what was committed before is not what is there"
        assert verify(url).problems == ()

    at_once(check, itertools.product((0, 1, 2), (False, True)))


# ------------------------------------------------------------------------------------------------------------ disagreement


def disagree(url: str, options: dict[str, Any], background: bool) -> tuple[str, str, str, bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    state, layout = rows_of(rank, world, 1.0)
    ckpt.save(url, state, layout=layout)
    state, layout = rows_of(rank, world, 2.0)
    mine = options if rank == 1 else {}
    try:
        if background:
            ckpt.save_async(url, state, layout=layout, **mine).result()
        else:
            ckpt.save(url, state, layout=layout, **mine)
        error, text = "nothing", ""
    except CkptError as err:
        error, text = type(err).__name__, str(err)
    intact = torch.equal(ckpt.open(url)["w"].read(), torch.ones(301, 257))
    dist.barrier()
    ckpt.save(url, rows_of(rank, world, 3.0)[0], layout=layout)
    again = "ok" if torch.equal(ckpt.open(url)["w"].read(), torch.full((301, 257), 3.0)) else "lost"
    return error, text, again, intact


DIFFER: list[dict[str, Any]] = [{"merge_flat_shards": False}, {"codec": "zstd"}, {"merge_flat_shards": False, "codec": "planes-zstd"}]


def disagree_each_way(folder: str) -> list[tuple[str, str, str, bool]]:
    """For each of ``DIFFER``, in the foreground and in the background."""
    return [disagree(f"{folder}/{n}-{b}", options, b) for n, options in enumerate(DIFFER) for b in (False, True)]


def test_options_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    each_way = zip(*ranks.run(3, disagree_each_way, str(tmp_path)), strict=True)
    for (options, background), found in zip(itertools.product(DIFFER, (False, True)), each_way, strict=True):
        about = f"{options}, {background = }"
        assert [(error, again, intact) for error, _, again, intact in found] == [(ConsistencyError.__name__, "ok", True)] * 3, about
        for (_, text, *_), (key, value) in itertools.product(found, options.items()):
            assert f"{key}={value}" in text and "rank 1" in text, about
