"""Every layout into every other: saved by each engine, loaded by all, compared bit for bit with what torch gathered before the save.

The engines: a plain save, a lazy one in the background with coded chunks while training goes on, and one past the page cache. Covers
weights, buffers, both moments of Adam, its step, parameter groups and per-rank values; targets start from another seed and are overwritten
with NaN before each load, once with the state of an optimizer that has stepped and once with that of a new one, which ranks read for each
other wherever they can.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.api.checked import raw
from tests.distributed.gathered import Full, Place, differences, differences_here, full_state, local_bytes, options, places, spoil
from tests.distributed.models import Trained, adamw
from tests.distributed.plain import build, world_size
from tests.distributed.ranks import Ranks
from tests.formats import oracle

DENSE = ("single", "ddp2", "fsdp2", "fsdp3", "fsdp4", "tp2", "fsdp2-tp2", "hsdp2x2", "pp2-tp2")
MOE = ("moe-single", "moe-fsdp2", "moe-fsdp3", "moe-ep2-dp2")
STEPS = 2
MODES = ("stepped", "new")
PLAIN = "plain"
SECOND = ("lazy", "direct")
"""Engines beside the plain one: a target loads what they saved with the state of an optimizer that has stepped. Past the page cache the
same bytes are written on another way, so one target loads what each layout saved there, and one process reads it."""


def after(source: str, family: Sequence[str]) -> str:
    """The target of what was saved past the page cache."""
    return family[(family.index(source) + 1) % len(family)]


def modes(source: str, target: str, *, every: bool) -> tuple[str, ...]:
    """How a checkpoint of a layout is loaded into another one. Unless it is to be ``every`` one: into the same layout each way, between two
    layouts one of the ways, so that each source and each target has all of them."""
    family = MOE if target in MOE else DENSE
    ways = (*MODES, "lazy")
    if not every and source != target:
        ways = (ways[(family.index(source) + family.index(target)) % len(ways)],)
    return (*ways, *(("direct",) if after(source, family) == target else ()))


def engine_of(mode: str) -> str:
    return PLAIN if mode in MODES else mode


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint, and what torch gathered on the ranks that saved it."""

    layout: str
    engine: str
    url: str
    full: Full
    options: dict[str, dict[str, Any]]
    initial: Full
    """The weights before training, gathered from the layout."""


# ------------------------------------------------------------------------------------------------------------ in a rank


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def rank_value(layout: str, rank: int) -> dict[str, Any]:
    """A random-number state and a position, of this layout and rank alone."""
    state = torch.Generator().manual_seed(1000 + 10 * len(layout) + rank).get_state()
    return {"generator": state, "position": [layout, rank]}


def pick(values: Sequence[Any], rank: int, world: int) -> Any:
    return values[(rank + world) % len(values)]


Told = tuple[Full, dict[str, dict[str, Any]], ckpt.SaveReport]


def save_source(layout: str, urls: dict[str, str]) -> tuple[Full, dict[str, Told]]:
    """Train a little, save, train on, save in the background while the next step runs, and at last past the page cache.

    Returns:
        The weights before training; by engine what was gathered before its save, the options of the parameters, and its report. Only the
        first rank tells what was gathered.
    """
    rank, _ = rank_and_world()
    which = build(layout, seed=1)
    initial = full_state(which)
    which.steps(STEPS)
    for group in which.optimizer.param_groups:
        group["lr"] *= 0.5
    state = {**which.state(), "step": STEPS, "done": (layout, 1.5, None), "rank": ckpt.PerRank(rank_value(layout, rank))}
    told: dict[str, Told] = {}
    told[PLAIN] = full_state(which), options(which), ckpt.save(urls[PLAIN], state, layout=which.layout)
    which.steps(1)
    full = full_state(which)
    handle = ckpt.save_async(urls["lazy"], state, capture="lazy", codec="planes-zstd", layout=which.layout)
    which.steps(1)
    told["lazy"] = full, options(which), handle.result()
    after = full_state(which)
    assert differences(after, full), "the step after the call changed nothing"
    with patch.dict(os.environ, CKPT_DIRECT="on"):
        told["direct"] = after, options(which), ckpt.save(urls["direct"], state, layout=which.layout)
    return (initial, told) if rank == 0 else ({}, {engine: ({}, *rest) for engine, (_, *rest) in told.items()})


def load_all(target: str, sources: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Problems of each load, by source layout and mode; ``sources`` are files with a source, and the mode of the load."""
    which = build(target, seed=2).steps(1)
    at = places(which)
    found = {}
    for path, mode in sources:
        source = source_in(path)
        spoil(which)
        if not found:
            seen = {problem.partition(":")[0] for problem in differences_here(which, at, source.full)}
            assert {name for name, place in at.items() if place.elements.numel()} <= seen, "spoiled tensors pass for loaded ones"
        if mode == "new":
            which.optimizer = adamw(which.model, fused=which.optimizer.defaults["fused"])
        try:
            found[source.layout, mode] = load_one(target, which, at, source, mode)
        except Exception as err:  # noqa: BLE001  the test of this pair fails with it; the other pairs go on
            found[source.layout, mode] = [f"{type(err).__name__}: {err}"]
    return found


@cache
def source_in(path: str) -> Source:
    """Read once for all targets of a rank; nothing changes it."""
    return torch.load(path, weights_only=False)


def load_one(target: str, which: Trained, at: Mapping[str, Place], source: Source, mode: str) -> list[str]:
    rank, world = rank_and_world()
    state = {**which.state(), "step": 0, "done": None, "rank": ckpt.PerRank(None, reshard=pick)}
    report = ckpt.load(source.url, state, layout=which.layout, read=ckpt.ReadOptions(exchange=True if mode == "new" else None))
    problems = differences(full_state(which), source.full) if which.parts else differences_here(which, at, source.full)
    problems += [f"options of {n}: {o} is not {source.options[n]}" for n, o in options(which).items() if o != source.options[n]]
    if (state["step"], state["done"]) != (STEPS, (source.layout, 1.5, None)):
        problems.append(f"plain values are {state['step']}, {state['done']}")
    saved = world_size(source.layout)
    wanted = rank_value(source.layout, rank if saved == world else (rank + world) % saved)
    value = state["rank"].value
    if value["position"] != wanted["position"] or not torch.equal(value["generator"], wanted["generator"]):
        problems.append(f"the per-rank value is that of {value['position']}, should be that of {wanted['position']}")
    own = len(wanted["generator"]) * (1 if saved == world else saved)
    return problems + report_problems(report, local_bytes(which) + own, coded=source.engine == "lazy")


def report_problems(report: ckpt.LoadReport, needed: int, *, coded: bool) -> list[str]:
    problems = []
    if report.missing or report.unexpected or report.renamed or report.cast:
        problems.append(f"report: missing {report.missing}, unexpected {report.unexpected}, renamed {report.renamed}, cast {report.cast}")
    if report.bytes_needed != needed:
        problems.append(f"report: {report.bytes_needed} bytes needed, the state has {needed}")
    if (report.bytes_read + report.bytes_received < needed and not coded) or report.bytes_unverified:
        came = f"{report.bytes_read} bytes read, {report.bytes_unverified} of them not verified, {report.bytes_received} received"
        problems.append(f"report: {came}, for {needed}")
    return problems


# ------------------------------------------------------------------------------------------------------------ the tests


@dataclass(eq=False)
class Matrix:
    """Saves all sources and loads all targets of one number of ranks in one launch, when the first test asks."""

    ranks: Ranks
    folder: Path
    every: bool
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)
    loaded: dict[str, dict[tuple[str, str], list[str]]] = field(default_factory=dict)
    reports: dict[tuple[str, str], list[ckpt.SaveReport]] = field(default_factory=dict)

    def of_as_many_ranks(self, layout: str, call: Callable[..., Any], *args: Callable[[str], Any]) -> list[tuple[str, list[Any]]]:
        """What ``call`` gives on each rank for each layout of as many ranks as ``layout`` has; ``args`` are made of the layout."""
        size = world_size(layout)
        layouts = [name for name in (*DENSE, *MOE) if world_size(name) == size]
        calls = [(call, name, *(arg(name) for arg in args)) for name in layouts]
        return list(zip(layouts, self.ranks.run_in_turn(size, calls, timeout=240, process_group=size > 1), strict=True))

    def source(self, layout: str, engine: str = PLAIN) -> Source:
        if (layout, engine) not in self.sources:
            for name, told in self.of_as_many_ranks(layout, save_source, self.urls):
                for way, url in self.urls(name).items():
                    mine = [by_engine[way] for _, by_engine in told]
                    self.reports[name, way] = [report for *_, report in mine]
                    everyone = {n: o for _, of_rank, _ in mine for n, o in of_rank.items()}
                    made = Source(layout=name, engine=way, url=url, initial=told[0][0], full=mine[0][0], options=everyone)
                    self.sources[name, way] = made
                    torch.save(made, self.file(name, way))
        return self.sources[layout, engine]

    def urls(self, layout: str) -> dict[str, str]:
        return {engine: str(self.folder / engine / layout) for engine in (PLAIN, *SECOND)}

    def file(self, layout: str, engine: str) -> Path:
        return self.folder / f"{layout}-{engine}.pt"

    def files(self, target: str) -> list[tuple[str, str]]:
        """Of what is loaded into a target, each with the mode of the load."""
        family = MOE if target in MOE else DENSE
        pairs = [(layout, mode) for layout in family for mode in modes(layout, target, every=self.every)]
        return [(str(self.file(self.source(layout, engine_of(mode)).layout, engine_of(mode))), mode) for layout, mode in pairs]

    def problems(self, source: str, target: str, mode: str) -> list[str]:
        if target not in self.loaded:
            for name, by_rank in self.of_as_many_ranks(target, load_all, self.files):
                merged = self.loaded.setdefault(name, {})
                for rank, by_pair in enumerate(by_rank):
                    for pair, problems in by_pair.items():
                        merged.setdefault(pair, []).extend(f"rank {rank}: {p}" for p in problems)
        return self.loaded[target][source, mode]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(ranks, tmp_path_factory.mktemp("matrix"), every=request.config.getoption("--slow"))


@pytest.mark.parametrize(
    ("source", "target", "mode"),
    [
        pytest.param(a, b, mode, marks=() if mode in modes(a, b, every=False) else pytest.mark.slow)
        for family in (DENSE, MOE)
        for b in family
        for a in family
        for mode in modes(a, b, every=True)
    ],
)
def test_pair(matrix: Matrix, source: str, target: str, mode: str) -> None:
    assert matrix.problems(source, target, mode) == []


@pytest.mark.parametrize("engine", [PLAIN, *SECOND])
@pytest.mark.parametrize("layout", DENSE + MOE)
def test_one_process_reads_the_same_tensors(matrix: Matrix, layout: str, engine: str) -> None:
    source = matrix.source(layout, engine)
    view = ckpt.open(source.url)
    assert differences({n: view[n].read() for n in view if "@rank" not in n}, source.full) == []
    assert view.state()["step"] == STEPS
    for rank in range(world_size(layout)):
        wanted = rank_value(layout, rank)
        found = view.per_rank("rank", rank)
        assert found["position"] == wanted["position"]
        assert torch.equal(found["generator"].read(), wanted["generator"])
    stored = oracle.read(source.url)
    assert {n: data for n, (_, _, data) in stored.items() if "@rank" not in n} == {n: raw(t) for n, t in source.full.items()}
    record = json.loads(Path(source.url, "checkpoint.json").read_bytes())
    assert record["features"] == (["codecs"] if engine == "lazy" else [])


@pytest.mark.parametrize("layout", DENSE + MOE)
def test_the_oracle(matrix: Matrix, layout: str) -> None:
    """Before training, what is gathered is the model that the seed gives; training then changes every float of it."""
    source = matrix.source(layout)
    base = matrix.source("moe-single" if layout in MOE else "single")
    assert differences(source.initial, base.initial) == []
    assert source.full.keys() == base.full.keys()
    assert len([n for n in source.full if n.startswith("optimizer.")]) == 3 * len([n for n in source.initial if not _is_buffer(n)])
    assert [n for n, t in source.initial.items() if torch.equal(t, source.full[n])] == []


def _is_buffer(name: str) -> bool:
    return name.endswith((".mean", ".seen"))


@pytest.mark.parametrize("engine", [PLAIN, *SECOND])
@pytest.mark.parametrize("layout", DENSE + MOE)
def test_the_save_report(matrix: Matrix, layout: str, engine: str) -> None:
    source = matrix.source(layout, engine)
    reports = matrix.reports[layout, engine]
    own = world_size(layout) * rank_value(layout, 0)["generator"].nbytes
    assert {r.tensor_bytes for r in reports} == {sum(t.nbytes for t in source.full.values()) + own}
    files = [p.stat().st_size for p in (Path(source.url) / "data").iterdir()]
    assert sorted(r.rank_bytes for r in reports) == sorted(files)
    assert len({r.id for r in reports}) == 1
