"""The jobs of the scenario ``scale``: models of hundreds of billions of parameters on thousands of ranks, by the tensors that each kind of
rank has. Nothing is allocated.

Per parameter a bfloat16 weight, a float32 master copy and two moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckpt.dtypes import dtype
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Shard, window_sizes
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec

LAYERS, HIDDEN, INNER, KEYS, WORDS = 126, 16384, 53248, 1024, 128256
DENSE = {
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
KEPT = (("model.{}.weight", "bfloat16"), *((f"optim.state.{{}}.weight.{k}", "float32") for k in ("master", "exp_avg", "exp_avg_sq")))
ROWS = ("attention.wo", "mlp.w2")
"""Cut along the second dimension by tensor parallelism."""
MOE_LAYERS, MOE_HIDDEN, MOE_INNER, EXPERTS = 61, 7168, 2048, 256
MOE = {
    "attention.q_a": (1536, MOE_HIDDEN),
    "attention.q_b": (24576, 1536),
    "attention.kv_a": (576, MOE_HIDDEN),
    "attention.kv_b": (32768, 512),
    "attention.o": (MOE_HIDDEN, 16384),
    "attention.q_norm": (1536,),
    "attention.kv_norm": (512,),
    "norm_1": (MOE_HIDDEN,),
    "norm_2": (MOE_HIDDEN,),
    "router": (EXPERTS, MOE_HIDDEN),
    "shared.gate": (MOE_INNER, MOE_HIDDEN),
    "shared.up": (MOE_INNER, MOE_HIDDEN),
    "shared.down": (MOE_HIDDEN, MOE_INNER),
}
EXPERT = {"gate": (MOE_INNER, MOE_HIDDEN), "up": (MOE_INNER, MOE_HIDDEN), "down": (MOE_HIDDEN, MOE_INNER)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """``kinds`` are ranks that have the same tensors, and these."""

    name: str
    ranks: int
    kinds: Sequence[tuple[Sequence[int], Callable[[], list[TensorSpec]]]]

    @property
    def middle(self) -> tuple[int, list[TensorSpec]]:
        """A rank in the middle, and its tensors."""
        ranks, tensors = self.kinds[len(self.kinds) // 2]
        return ranks[len(ranks) // 2], tensors()


def _with_states(shapes: Mapping[str, tuple[int, ...]], layout_of: Callable[[str], TensorLayout]) -> list[TensorSpec]:
    layouts = {name: layout_of(name) for name in shapes}
    return [TensorSpec(stored.format(name), dtype(kind), shape, layouts[name]) for name, shape in shapes.items() for stored, kind in KEPT]


def _dense(layers: Sequence[int], layers_in_all: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"layers.{i}.{part}": shape for i in layers for part, shape in DENSE.items()}
    if 0 in layers:
        shapes["embedding"] = OTHER["embedding"]
    if layers_in_all - 1 in layers:
        shapes |= {name: OTHER[name] for name in ("norm", "output")}
    return shapes


def one_layout(name: str, ranks: int, layers: int, layout: TensorLayout) -> Job:
    """Every rank has every dense tensor, in one layout."""
    return Job(name=name, ranks=ranks, kinds=[(range(ranks), lambda: _with_states(_dense(range(layers), layers), lambda _: layout))])


def fsdp(ranks: int, layers: int = LAYERS, mark: str = "") -> Job:
    """FSDP2: the first dimension over all ranks. ``mark`` makes its mesh another one than that of a job before: nothing is known of it."""
    layout = TensorLayout(Mesh((f"dp{mark}",), (ranks,)), (Shard(0, f"dp{mark}"),))
    return one_layout("FSDP2", ranks, layers, layout)


def hsdp(ranks: int, layers: int = LAYERS, mark: str = "") -> Job:
    """Replicas of shards over 256 ranks."""
    mesh = Mesh((f"rep{mark}", "dp"), (max(ranks // 256, 1), min(ranks, 256)))
    return one_layout("HSDP", ranks, layers, TensorLayout(mesh, (Shard(0, "dp"),)))


def zero(ranks: int, layers: int = LAYERS, mark: str = "") -> Job:
    """Flat ranges over all ranks."""
    return one_layout("flat", ranks, layers, TensorLayout(Mesh((f"dp{mark}",), (ranks,)), (Flat(f"dp{mark}"),)))


def fsdp1(ranks: int, layers: int = LAYERS, mark: str = "") -> Job:
    """FSDP version 1 with ``use_orig_params``: a flat parameter for each layer, of which each original parameter is a window. Of the
    optimizer's states, only ranks that have elements take part."""
    mesh = Mesh((f"dp{mark}",), (ranks,))
    units = [{name: s for name, s in _dense([i], layers).items() if name.startswith("layers.")} for i in range(layers)] + [OTHER]
    tensors: list[TensorSpec] = []
    for unit in units:
        sizes = [math.prod(shape) for shape in unit.values()]
        each = -(-sum(sizes) // ranks)
        for (name, shape), size, end in zip(unit.items(), sizes, accumulate(sizes), strict=True):
            weight = TensorLayout(mesh, (Flat(f"dp{mark}", window_sizes(each, end - size, size, ranks)),))
            state = TensorLayout(mesh, weight.splits, weight.filled())
            tensors += [
                TensorSpec(stored.format(name), dtype(kind), shape, state if "optim" in stored else weight) for stored, kind in KEPT
            ]
    return Job(name="FSDP1", ranks=ranks, kinds=[(range(ranks), lambda: tensors)])


def three_d(ranks: int, layers: int = LAYERS, mark: str = "", tp: int = 8, pp: int = 16) -> Job:
    """FSDP2 over tensor parallelism, in pipeline stages."""
    dp = ranks // (tp * pp)
    mesh = Mesh((f"pp{mark}", "dp", "tp"), (pp, dp, tp))
    of_stage = [range(layers * s // pp, layers * (s + 1) // pp) for s in range(pp)]

    def stage(number: int) -> list[TensorSpec]:
        def layout_of(name: str) -> TensorLayout:
            part = name.split(".", 2)[-1]
            cut: tuple[Split, ...] = (Shard(0, "dp"),)
            if not part.endswith("norm"):
                cut = (Shard(1 if part in ROWS else 0, "tp"), Shard(0, "dp"))
            return TensorLayout(mesh, cut, ((f"pp{mark}", (number,)),))

        return _with_states(_dense(of_stage[number], layers), layout_of)

    size = dp * tp
    return Job(name="FSDP2 x TP8 x PP16", ranks=ranks, kinds=[(range(s * size, (s + 1) * size), lambda s=s: stage(s)) for s in range(pp)])


def experts(ranks: int, layers: int = MOE_LAYERS, mark: str = "", ep: int = 64) -> Job:
    """A tensor for each expert, ``ep`` groups of ranks that have some of them each; all else over all ranks."""
    everywhere = TensorLayout(Mesh((f"dp{mark}",), (ranks,)), (Shard(0, f"dp{mark}"),))
    dense = _moe_dense(layers)

    def group(number: int) -> list[TensorSpec]:
        mine = TensorLayout(Mesh((f"edp{mark}",), (ranks // ep,), tuple(range(number, ranks, ep))), (Shard(0, f"edp{mark}"),))
        owned = _moe_experts(layers, range(number * EXPERTS // ep, (number + 1) * EXPERTS // ep))
        return _with_states(dense, lambda _: everywhere) + _with_states(owned, lambda _: mine)

    return Job(name=f"EP{ep}", ranks=ranks, kinds=[(range(k, ranks, ep), lambda k=k: group(k)) for k in range(ep)])


def every_expert(ranks: int, layers: int = MOE_LAYERS, mark: str = "") -> Job:
    """The same tensors, all of them on all ranks."""
    layout = TensorLayout(Mesh((f"dp{mark}",), (ranks,)), (Shard(0, f"dp{mark}"),))
    shapes = _moe_dense(layers) | _moe_experts(layers, range(EXPERTS))
    return Job(name="all experts", ranks=ranks, kinds=[(range(ranks), lambda: _with_states(shapes, lambda _: layout))])


def _moe_dense(layers: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"layers.{i}.{part}": shape for i in range(layers) for part, shape in MOE.items()}
    return shapes | {"embedding": (129280, MOE_HIDDEN), "norm": (MOE_HIDDEN,), "output": (129280, MOE_HIDDEN)}


def _moe_experts(layers: int, numbers: Sequence[int]) -> dict[str, tuple[int, ...]]:
    first = min(3, layers - 1)  # the first layers are dense
    return {f"layers.{i}.experts.{e}.{part}": shape for i in range(first, layers) for e in numbers for part, shape in EXPERT.items()}
