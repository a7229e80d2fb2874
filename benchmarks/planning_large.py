"""The scenario ``plan-large``: one rank's planning of 405 billion parameters, flat over 16,384 ranks (ZeRO, FSDP1). Nothing is moved.

Per parameter a bfloat16 weight, a float32 master copy and two moments; shards are merged into whole rows. The second plan is that of the
next save of the same state, which finds the first one.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from ckpt.adapters.collect import Collected
from ckpt.dtypes import dtype
from ckpt.engine.save.plan import Plans, RankPlan
from ckpt.layout.mesh import Mesh
from ckpt.layout.placements import Flat
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Table

from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .planning import KEPT
from .pool import Pool, Rank
from .scenarios import Settings, Tell

LAYERS, HIDDEN, INNER, KEYS, WORDS = 126, 16384, 53248, 1024, 128256
RANKS = 16384
HIT = 10.0
"""Most milliseconds of a plan that is there already."""
LAYER = {
    "attention.wq": (HIDDEN, HIDDEN),
    "attention.wk": (KEYS, HIDDEN),
    "attention.wv": (KEYS, HIDDEN),
    "attention.wo": (HIDDEN, HIDDEN),
    "mlp.w1": (INNER, HIDDEN),
    "mlp.w2": (HIDDEN, INNER),
    "mlp.w3": (INNER, HIDDEN),
    "attention_norm": (HIDDEN,),
    "mlp_norm": (HIDDEN,),
}
OTHER = {"embedding": (WORDS, HIDDEN), "norm": (HIDDEN,), "output": (WORDS, HIDDEN)}


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Plan once, and once more; ``place`` is not used, and of ``settings`` only ``large_layers`` and ``large_ranks``."""
    del place
    found = pool.run(measure, on=1, layers=settings.large_layers, ranks=settings.large_ranks)[0]
    tell(f"plan-large: {found['first_cpu']:.2f} s CPU, then {1000 * found['second']:.1f} ms")
    rows = [
        ("first plan, CPU s", f"{found['first_cpu']:.2f}"),
        ("plan of the next save, ms", f"{1000 * found['second']:.2f}"),
        ("table sent to the leader, bytes", f"{found['table']:,}"),
        ("chunks of this rank", f"{found['chunks']:,}"),
        ("sent to other ranks, bytes", f"{found['sent']:,}"),
        ("written, bytes", f"{found['written']:,}"),
    ]
    return [
        Finding(
            scenario="plan-large",
            title=f"{found['tensors']:,} tensors, flat over {settings.large_ranks:,} ranks, as one rank plans them",
            columns=("", "ckpt"),
            rows=rows,
            figures=found,
            checks=(at_most("plan of the next save", 1000 * found["second"], HIT, "ms"),),
        )
    ]


def measure(rank: Rank, *, layers: int, ranks: int) -> dict[str, Any]:
    """Seconds and bytes of the plan of the rank in the middle."""
    plans, middle = Plans(), ranks // 2
    table = model(layers, ranks)

    def plan() -> RankPlan:
        return plans.plan(collected(table), rank=middle, position=middle, merge_flat_shards=True, codec=None)

    before = cpu_seconds()
    first = plan()
    first_cpu = cpu_seconds() - before
    # The next walk of the state finds equal values: the same objects, as the job's placements give them.
    began = time.perf_counter()
    again = plan()
    second = time.perf_counter() - began
    if again is not first or plans.hits != 1:
        raise ValueError("the second plan is not the first one")
    itemsizes = {t.name: t.dtype.itemsize for t in table}
    return {
        "tensors": len(table),
        "first_cpu": first_cpu,
        "second": second,
        "table": len(Table(tensors=tuple(table), aliases={}).to_bytes()),
        "chunks": len(first.chunks),
        "sent": sum((f.stop - f.start) * itemsizes[f.name] for f in first.sends),
        "written": first.nbytes,
    }


def collected(table: list[TensorSpec]) -> Collected:
    """What the planner looks at of a state that was walked."""
    shard_table = SimpleNamespace(tensors={t.name: SimpleNamespace(info=t) for t in table}, aliases={}, own=frozenset())
    return cast(Collected, SimpleNamespace(shard_table=shard_table))


def model(layers: int, ranks: int) -> list[TensorSpec]:
    """All tensors of the state."""
    layout = TensorLayout(Mesh(("dp",), (ranks,)), (Flat("dp"),))
    names = {f"layers.{i}.{part}": shape for i in range(layers) for part, shape in LAYER.items()} | OTHER
    return [TensorSpec(stored.format(name), dtype(kind), shape, layout) for name, shape in names.items() for stored, kind in KEPT]
