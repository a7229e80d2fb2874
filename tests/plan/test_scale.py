"""What the plan and the index cost for jobs that no test machine can run: bytes of an index, CPU seconds of one rank."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import ckpt.layout.tensor_layout as layout_module
from benchmarks import scale_jobs, scale_load, scale_save
from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.formats.native.datafiles.datafile import ChunkSpec, plan_data_files
from ckpt.formats.native.index import decode_index, encode_index
from ckpt.layout.mesh import Mesh
from ckpt.layout.placements import Flat, Interleaved, Shard, Split
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan import flat, flat_fragments, ownership
from ckpt.plan.flat_fragments import fragments
from ckpt.plan.overlap import overlapping_chunks
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.plan.tables import Table, join_tables

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
RANKS = 64


def decoder(layers: int, hidden: int, ffn: int, vocab: int, kv: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama-style model."""
    found: list[tuple[str, tuple[int, ...]]] = [("embed", (vocab, hidden)), ("norm", (hidden,)), ("head", (vocab, hidden))]
    block = {
        "wq": (hidden, hidden),
        "wk": (kv, hidden),
        "wv": (kv, hidden),
        "wo": (hidden, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
    }
    block |= {"down": (hidden, ffn)}
    for i in range(layers):
        found += [(f"layers.{i}.{name}", shape) for name, shape in block.items()]
        found += [(f"layers.{i}.ln_{n}", (hidden,)) for n in (1, 2)]
    return found


def adam(model: Sequence[tuple[str, tuple[int, ...]]], layout: TensorLayout) -> list[TensorSpec]:
    """A bf16 weight and two fp32 moments for each tensor."""
    weights = [TensorSpec(f"model.{name}.weight", BF16, shape, layout) for name, shape in model]
    moments = [TensorSpec(f"optim.{name}.weight.{m}", F32, shape, layout) for m in ("exp_avg", "exp_avg_sq") for name, shape in model]
    return weights + moments


def data_file(rank: int) -> DataFile:
    """A row as a save writes it: nothing about its size or digest can be guessed, so neither can be compressed away."""
    digest = hashlib.md5(str(rank).encode(), usedforsecurity=False)
    size = int.from_bytes(digest.digest()[:4], "little")
    return DataFile(
        path=f"data/{'x7' * 8}-{rank:05}.safetensors", size=size + (1 << 24), header=4096 * 12, digest=digest.hexdigest(), rank=rank
    )


def forget() -> None:
    """Make the next plan pay for everything again."""
    for cache in (ownership._assignment, ownership._assignment_of_rows, flat_fragments._moves, flat_fragments._place):
        cache.cache_clear()
    for cache in (layout_module.flat_blocks, flat.whole_grid, flat.row_grid):
        cache.cache_clear()
    for cache in (layout_module._axes, layout_module._tiling, layout_module._pieces):
        cache.cache_clear()
    gc.collect()


def contents_of(tensors: Sequence[TensorSpec], owned: dict[str, ChunkAssignment], ranks: int) -> Contents:
    """What the leader of a save with one file per rank writes; tensors that are cut and dealt alike share a grid."""
    files = [data_file(r) for r in range(ranks)]
    grids: dict[int, Grid] = {}
    entries = []
    for t in tensors:
        mine = owned[t.name]
        grid = grids.setdefault(id(mine), Grid(cuts=mine.cuts, boxes=mine.boxes, files=mine.owners.astype(np.int32)))
        entries.append(TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, grid=grid))
    return Contents(tensors=tuple(entries), files=tuple(files), state={"step": 1})


def different(values: Sequence[int]) -> list[int]:
    """Sizes near the given ones, none of which 64 divides."""
    return [v + 1 if (v + 1) % RANKS else v + 2 for v in values]


FSDP = TensorLayout(Mesh.of({"dp": RANKS}), (Shard(0, "dp"),))
DDP = TensorLayout(Mesh.of({"dp": RANKS}))
ZERO = TensorLayout(Mesh.of({"dp": RANKS}), (Flat("dp"),))
EVEN = decoder(148, 2048, 8192, 32768, 512)
ODD = decoder(148, *different([2048, 8192, 32768, 512]))


@pytest.mark.parametrize("model", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("layout", [FSDP, DDP, ZERO], ids=["fsdp", "ddp", "zero"])
def test_an_index_of_4000_tensors_on_64_ranks_is_below_1_mb(layout: TensorLayout, model: list[tuple[str, tuple[int, ...]]]) -> None:
    tensors = adam(model, layout)
    assert len(tensors) == 4005
    owned = assign(tensors)
    contents = contents_of(tensors, owned, RANKS)
    index = encode_index(contents)
    sizes = {name: len(data) for name, data in index.items()}
    chunks = sum(len(o.owners) for o in owned.values())
    grids = len({id(o) for o in owned.values()})
    print(f"{len(tensors)} tensors, {chunks} chunks, {grids} grids, {sum(sizes.values())} bytes: {sizes}")
    assert sum(sizes.values()) < 1_000_000
    again = decode_index(index, "x")
    assert len(again.tensors) == len(tensors)
    assert sum(len(t.grid) for t in again.tensors) == chunks


def test_fsdp_has_a_grid_per_shape() -> None:
    tensors = adam(EVEN, FSDP)
    owned = assign(tensors)
    cut_alike = {(t.shape, t.dtype.itemsize) for t in tensors}
    assert len({id(o) for o in owned.values()}) <= len(cut_alike) < 20


# ------------------------------------------------------------------------------------------------------- Llama 3 405B on 16,384 ranks


TP, PP, DP = 8, 16, 128
LAYERS, HIDDEN, FFN, VOCAB, KV = 126, 16_384, 53_248, 128_256, 1024
CUTS: dict[str, tuple[Split, ...]] = {
    "embed": (Shard(0, "tp"),),
    "head": (Shard(0, "tp"),),
    "wo": (Shard(1, "tp"),),
    "down": (Shard(1, "tp"),),
    "qkv": (Interleaved(0, "tp", (HIDDEN, KV, KV)),),
    "gate_up": (Interleaved(0, "tp", 2),),
}


def stage_tensors(stage: int, zero: Split | None) -> list[TensorSpec]:
    """One pipeline stage of the model with bf16 weights and two fp32 moments, which ``zero`` cuts over the data-parallel ranks too."""
    mesh = Mesh.of({"pp": PP, "dp": DP, "tp": TP})
    at = (("pp", (stage,)),)
    shapes = {"qkv": (HIDDEN + 2 * KV, HIDDEN), "wo": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
    shapes |= {"ln_1": (HIDDEN,), "ln_2": (HIDDEN,)}
    first, last = stage * LAYERS // PP, (stage + 1) * LAYERS // PP
    found = [(f"layers.{i}.{part}", part, shape) for i in range(first, last) for part, shape in shapes.items()]
    found += [("embed", "embed", (VOCAB, HIDDEN))] if stage == 0 else []
    found += [("head", "head", (VOCAB, HIDDEN)), ("norm", "ln_1", (HIDDEN,))] if stage == PP - 1 else []
    tensors = []
    for name, part, shape in found:
        splits = CUTS.get(part, ())
        tensors.append(TensorSpec(f"model.{name}", BF16, shape, TensorLayout(mesh, splits, at)))
        kept = splits if zero is None or (isinstance(zero, Flat) and any(isinstance(s, Interleaved) for s in splits)) else (*splits, zero)
        tensors += [TensorSpec(f"optim.{name}.{m}", F32, shape, TensorLayout(mesh, kept, at)) for m in ("exp_avg", "exp_avg_sq")]
    return tensors


def plan_one_rank(tensors: Sequence[TensorSpec], rank: int, *, merge: bool = False) -> tuple[int, int, int]:
    """All that a rank computes before its first byte is written, and before its first byte is read back; chunks, bytes and fragments."""
    owned = assign(tensors, merge_flat_shards=merge)
    sends, receives = fragments(tensors, owned, rank)
    specs = [
        ChunkSpec(name=t.name, box=owned[t.name].box(i), shape=t.shape, dtype=t.dtype)
        for t in tensors
        for i in owned[t.name].written_by(rank)
    ]
    plans = plan_data_files(specs, id="0" * 16, rank=rank)
    assert sum(len(p) for p in plans) == len(specs)
    Table(tensors=tuple(tensors), aliases={}).to_bytes()
    needed = 0
    for t in tensors:
        grid = Grid(cuts=owned[t.name].cuts, boxes=owned[t.name].boxes, files=owned[t.name].owners)
        for piece in t.layout.pieces(t.shape, rank):
            needed += sum(copy.box.numel for copy in overlapping_chunks(grid, piece.box)) * t.dtype.itemsize
    assert needed == sum(p.box.numel * t.dtype.itemsize for t in tensors for p in t.layout.pieces(t.shape, rank))
    return len(specs), sum(s.nbytes for s in specs), len(sends) + len(receives)


@pytest.mark.parametrize("merge", [pytest.param(False, marks=pytest.mark.slow), True], ids=["boxes", "merge"])
@pytest.mark.parametrize("zero", [None, Shard(0, "dp"), Flat("dp")], ids=["replicated", "sharded", "flat"])
def test_one_rank_of_16384_plans_within_seconds(zero: Split | None, merge: bool) -> None:
    rank = (3 * DP + 77) * TP + 5
    tensors = stage_tensors(3, zero)
    forget()
    began = time.process_time()
    chunks, size, moves = plan_one_rank(tensors, rank, merge=merge)
    seconds = time.process_time() - began
    print(f"{len(tensors)} tensors of a stage, {chunks} chunks of this rank, {size / 1e6:.1f} MB, {moves} fragments: {seconds:.2f} CPU s")
    assert seconds < 5


@pytest.mark.parametrize("merge", [pytest.param(False, marks=pytest.mark.slow), True], ids=["boxes", "merge"])
@pytest.mark.parametrize("zero", [Shard(0, "dp"), Flat("dp")], ids=["sharded", "flat"])
def test_the_leader_of_16384_ranks_joins_the_tables_of_all_stages(zero: Split, merge: bool) -> None:
    """One table per stage; the index of it all stays a few megabytes where a row per chunk would be hundreds."""
    tables, everything = [], []
    for stage in range(PP):
        tensors = stage_tensors(stage, zero)
        everything += tensors
        tables.append((range(stage * DP * TP, (stage + 1) * DP * TP), Table(tensors=tuple(tensors), aliases={})))
    seconds, size = lead(tables, everything, PP * DP * TP, merge=merge)
    assert len(everything) == 3 * (LAYERS * 6 + 3)
    assert size < 2_000_000
    assert seconds < 30


def lead(tables: Sequence[tuple[Sequence[int], Table]], tensors: Sequence[TensorSpec], ranks: int, *, merge: bool) -> tuple[float, int]:
    """CPU seconds and bytes of the index, of all that the leader does about tensors."""
    forget()
    began = time.process_time()
    joined = join_tables(tables, merge_flat_shards=merge)
    index = encode_index(contents_of(tensors, joined.assignments, ranks))
    seconds = time.process_time() - began
    chunks = sum(len(o.owners) for o in joined.assignments.values())
    grids = len({id(o) for o in joined.assignments.values()})
    merged = sum(o.merged for o in joined.assignments.values())
    sizes = {name: len(data) for name, data in index.items()}
    size = sum(sizes.values())
    print(f"{len(tensors)} tensors, {merged} merged, {chunks} chunks, {grids} grids, {size / 1e6:.2f} MB, {seconds:.1f} CPU s: {sizes}")
    return seconds, size


# ------------------------------------------------------------------------------------------------------ Llama 3 405B, flat over all ranks


def flat_model(ranks: int, copies: int = 1, *, fused: bool = False) -> list[TensorSpec]:
    """Every tensor of the model is cut into ``ranks / copies`` flat ranges, of which there are ``copies`` replicas."""
    layout = TensorLayout(Mesh.of({"rep": copies, "dp": ranks // copies}), (Flat("dp"),))
    model = decoder(LAYERS, HIDDEN, FFN, VOCAB, KV)
    if fused:
        parts = {"wq": ("qkv", (HIDDEN + 2 * KV, HIDDEN)), "gate": ("gate_up", (2 * FFN, HIDDEN)), "wk": None, "wv": None, "up": None}
        model = [
            (name.replace(kind, new[0]), new[1]) if new else (name, shape)
            for name, shape in model
            for kind in [name.rpartition(".")[2]]
            for new in [parts.get(kind, (kind, shape))]
            if new is not None
        ]
    return adam(model, layout)


JOBS = {
    "1024": (1024, 1, False),
    "16384": (16_384, 1, False),
    "16384 fused": (16_384, 1, True),
    "16384 in 128 copies": (16_384, 128, False),
}
EACH_JOB = [pytest.param(job, marks=[pytest.mark.slow] if job in ("1024", "16384 in 128 copies") else []) for job in JOBS]


@pytest.mark.parametrize("job", EACH_JOB)
def test_one_rank_of_a_flat_model(job: str) -> None:
    ranks, copies, fused = JOBS[job]
    tensors = flat_model(ranks, copies, fused=fused)
    forget()
    began = time.process_time()
    chunks, size, moves = plan_one_rank(tensors, ranks // 2 + 5, merge=True)
    seconds = time.process_time() - began
    print(f"{len(tensors)} tensors, {chunks} chunks of this rank, {size / 1e6:.1f} MB, {moves} fragments: {seconds:.2f} CPU s")
    assert moves <= 4 * len(tensors)
    assert seconds < 5


@pytest.mark.parametrize("job", EACH_JOB)
def test_the_leader_of_a_flat_model(job: str) -> None:
    ranks, copies, fused = JOBS[job]
    tensors = flat_model(ranks, copies, fused=fused)
    seconds, size = lead([(range(ranks), Table(tensors=tuple(tensors), aliases={}))], tensors, ranks, merge=True)
    assert size < 2_000_000
    assert seconds < 20


# ------------------------------------------------------------------------------------------- nothing grows with the square of the ranks

FEW, MANY = 1024, 8192
GROWTH = 1.1
"""Most exponent with which work may grow with the ranks. What grew with their square took minutes."""
NOISE = 0.3
"""CPU seconds, about ten times what this work takes at 1,024 ranks."""


def growth(cost: Callable[[int], float]) -> None:
    few, many = cost(FEW), cost(MANY)
    print(f"{few:.3f} CPU s at {FEW:,} ranks, {many:.3f} at {MANY:,}")
    assert many <= (few + NOISE) * (MANY / FEW) ** GROWTH
    assert many < 5


RANK = {
    "FSDP1": scale_jobs.fsdp1,
    "FSDP2": scale_jobs.fsdp,
    "HSDP": scale_jobs.hsdp,
    "flat": scale_jobs.zero,
    "3-D": scale_jobs.three_d,
    "EP64": scale_jobs.experts,
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in ("HSDP", "FSDP2") else []) for kind in RANK])
def test_a_ranks_plan_grows_with_the_ranks_at_most(kind: str) -> None:
    def cost(ranks: int) -> float:
        forget()
        found = scale_save.plan(RANK[kind](ranks, 16 if kind == "3-D" else 4))
        assert found["second"] < 0.1
        return found["first"]

    growth(cost)


@pytest.mark.parametrize("wanted", ["tensor_parallel", pytest.param("replicated", marks=pytest.mark.slow), "hsdp"])
def test_what_a_rank_shares_grows_with_the_ranks_at_most(wanted: str) -> None:
    """Also where thousands of ranks want each chunk."""
    growth(lambda ranks: scale_load.share_seconds(1, scale_load.flat(ranks), getattr(scale_load, wanted)(ranks)))


@pytest.mark.parametrize("kind", ["3-D", pytest.param("EP64", marks=pytest.mark.slow), "own"])
def test_the_leaders_work_grows_with_the_ranks_at_most(kind: str) -> None:
    """Checks, index, commit and spans of the first two saves."""
    indexes, later = {}, {}

    def cost(ranks: int) -> float:
        forget()
        job = scale_jobs.fsdp(ranks, 4) if kind == "own" else RANK[kind](ranks, 16 if kind == "3-D" else 4)
        found = scale_save.lead(job, own=2 * (kind == "own"), spans=8)
        indexes[ranks], later[ranks] = found["index"], found["all_1"]
        return found["all_0"]

    growth(cost)
    growth(later.__getitem__)
    assert indexes[MANY] < 3_000_000


def test_groups_of_experts_do_not_make_the_leader_compare_them_with_each_other() -> None:
    """The work for one more group is that of its tensors: 16 and 64 groups of 256 experts have the same tensors in all."""
    costs = {}
    for groups in (16, 64):
        forget()
        found = scale_save.lead(scale_jobs.experts(4096, 4, ep=groups), spans=1)
        costs[groups], told = found["check_0"], found["tables"]
    print(costs, told)
    assert costs[64] < 2 * costs[16] + NOISE
    assert told < 1_500_000


@pytest.mark.parametrize("splits", [(Flat("dp"),), (Shard(0, "tp"), Flat("dp")), (Interleaved(0, "tp", 2), Shard(0, "dp"))], ids=str)
def test_a_tiling_grows_with_the_ranks_at_most(splits: tuple[Split, ...]) -> None:
    """Of ranks that are listed one by one, too."""

    def cost(ranks: int) -> float:
        forget()
        layout = TensorLayout(Mesh(("dp", "tp"), (ranks // 8, 8), tuple(range(0, 2 * ranks, 2))), splits)
        began = time.process_time()
        layout.tiling((53_248, 16_384))
        assert len(layout.pieces((53_248, 16_384), ranks)) > 0
        return time.process_time() - began

    growth(cost)


def test_planning_and_leading_grow_with_the_tensors_at_most() -> None:
    few, many = 4, 32
    costs: dict[int, list[float]] = {}
    for layers in (few, many):
        forget()
        led = scale_save.lead(scale_jobs.experts(512, layers, ep=8), spans=1)
        forget()
        costs[layers] = [scale_save.plan(scale_jobs.every_expert(512, layers))["first"], led["check_0"], led["commit_0"]]
    print(costs)
    experts = (many - 3) / (few - 3)  # the first three layers have none
    assert all(after <= (before + NOISE / 10) * experts**GROWTH for before, after in zip(costs[few], costs[many], strict=True))
