"""What a plan costs: a mixture of experts of 10¹² parameters, from 256 ranks to 128, one rank's share.

61 layers, 384 experts of three matrices each: 70,700 tensors. Source: 16 pipeline stages × TP 8 × DP 2, experts over 16 ranks of a stage.
Target: TP 8 × DP 16, experts over 64 ranks × TP 2. No tensor has memory; tables are joined and checked as a reshard does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.concurrency import gc_paused
from ckpt.dtypes import DTYPES
from ckpt.live.holdings import LiveCatalog
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Table, join_tables
from ckpt.plan.transfers import TransferPlan, Want, plan_transfers

HIDDEN, WIDE = 7168, 2048
STAGES = 16
DENSE = {
    "q": (1536, HIDDEN),
    "qb": (12288, 1536),
    "kv": (576, HIDDEN),
    "kvb": (16384, 512),
    "o": (HIDDEN, 8192),
    "norm": (HIDDEN,),
    "norm2": (HIDDEN,),
}
CUT = {"qb": 0, "kvb": 0, "o": 1}
KIND = DTYPES["bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks ``source`` first, in pipeline stages, then ``target``, a multiple of 128; as many ``experts`` in each layer."""

    source: int = 256
    target: int = 128
    layers: int = 61
    experts: int = 384
    expert_ranks: int = 384
    """Ranks of a stage, at most, that divide its experts."""

    @property
    def receivers(self) -> range:
        return range(self.source, self.source + self.target)

    def stage_ranks(self, stage: int) -> list[int]:
        each = self.source // STAGES
        return list(range(each * stage, each * (stage + 1)))

    def source_tensors(self) -> list[list[TensorSpec]]:
        """By stage: what its ranks have."""
        each = self.source // STAGES
        parallel = min(each, self.experts, self.expert_ranks)
        dense = Mesh(("pp", "dp", "tp"), (STAGES, each // 8, 8), range(self.source))
        folded = Mesh(("pp", "edp", "ep"), (STAGES, each // parallel, parallel), range(self.source))
        by_stage: list[list[TensorSpec]] = []
        for stage in range(STAGES):
            tensors = []
            here = (("pp", (stage,)),)
            layouts = {dim: TensorLayout(dense, () if dim is None else (Shard(dim, "tp"),), here) for dim in (None, 0, 1)}
            owners = [n * parallel // self.experts for n in range(self.experts)]
            expert = [TensorLayout(folded, (), (*here, ("ep", (owner,)))) for owner in owners]
            for layer in range(stage * self.layers // STAGES, (stage + 1) * self.layers // STAGES):
                tensors += [TensorSpec(f"layers.{layer}.{n}", KIND, s, layouts[CUT.get(n)]) for n, s in DENSE.items()]
                for n in range(self.experts):
                    for name, shape in (("gate", (WIDE, HIDDEN)), ("up", (WIDE, HIDDEN)), ("down", (HIDDEN, WIDE))):
                        tensors.append(TensorSpec(f"layers.{layer}.experts.{n}.{name}", KIND, shape, expert[n]))
            by_stage.append(tensors)
        return by_stage

    def target_layout(self, name: str, rank: int) -> TensorLayout | None:
        """Where a tensor lies on the receivers; None if this one has nothing of it."""
        kind = name.rpartition(".")[2]
        if ".experts." not in name:
            return self._layout(("dp", "tp"), (self.target // 8, 8), (CUT[kind], "tp") if kind in CUT else None, None)
        number = int(name.split(".")[3])
        if number * 64 // self.experts != (rank - self.source) // 2 % 64:
            return None
        sizes = self.target // 128, 64, 2
        return self._layout(("edp", "ep", "etp"), sizes, (1 if kind == "down" else 0, "etp"), number * 64 // self.experts)

    def _layout(self, names: tuple[str, ...], sizes: tuple[int, ...], cut: tuple[int, str] | None, at: int | None) -> TensorLayout:
        key = self, names, cut, at
        if key not in _known:
            splits = () if cut is None else (Shard(*cut),)
            _known[key] = TensorLayout(Mesh(names, sizes, self.receivers), splits, () if at is None else (("ep", (at,)),))
        return _known[key]

    def wants_of(self, catalog: LiveCatalog, rank: int) -> list[Want]:
        wants = []
        for name, entry in catalog.tensors.items():
            layout = self.target_layout(name, rank)
            if layout is not None:
                boxes = tuple(p.box for p in layout.pieces(entry.shape, rank))
                wants.append(Want(name, catalog.number(entry), KIND.itemsize, entry.grid, catalog.holders(entry), boxes))
        return wants


_known: dict[object, TensorLayout] = {}


def measured(what: str, work: Callable[[], Any], into: dict[str, float]) -> Any:
    with gc_paused():  # as a reshard does
        began = time.process_time()
        result = work()
        into[what] = time.process_time() - began
    return result


def planned(job: Job) -> dict[str, float]:
    """CPU seconds of what one receiver does before the first byte comes: with all tables, which it has as bytes."""
    seconds: dict[str, float] = {}
    packed = [Table(tensors=tuple(tensors), aliases={}).to_bytes() for tensors in job.source_tensors()]
    tables = measured("read the tables", lambda: [Table.from_bytes(data) for data in packed], seconds)
    ranks = [job.stage_ranks(stage) for stage in range(STAGES)]
    joined = measured("join and check them", lambda: join_tables(list(zip(ranks, tables, strict=True)), stored=False), seconds)
    catalog = measured("make the catalog", lambda: LiveCatalog.of(joined, {}, url="live", world_size=job.source), seconds)
    first = job.source + 5
    wants = measured("say what is wanted", lambda: job.wants_of(catalog, first), seconds)
    plan: TransferPlan = measured("plan the transfers", lambda: plan_transfers(wants, rank=first), seconds)
    measured("pack the lists", lambda: [share.requests.packed for share in plan.shares.values()], seconds)
    return seconds
