"""One model in many layouts, and the oracle of the tests of live states: every part is sliced by hand out of full tensors.

Nothing here asks ckpt where a part lies. A ``Job`` gives each of its ranks the parts that a framework would give it, under the names that
the rank uses; ``layout`` only tells ckpt what was done. Sizes do not divide: 42 rows of a vocabulary that jobs pad differently, 22 features
over three and four ranks, 5 rows over four, a parameter of one element, two key-value heads over four ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt import Flat, GlobalShape, Interleaved, OnMesh, Padded, Replicate, Shard, Uneven

LAYERS, EXPERTS = 4, 4

Parts = dict[str, torch.Tensor]
Shape = tuple[int, ...]
VOCABULARIES = ("embedding.weight", "head.weight")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model: rows of the vocabulary, features, rows of all query heads and of all key or value heads, and so on."""

    vocabulary: int = 42
    hidden: int = 8
    features: int = 22
    queries: int = 16
    keys: int = 4
    few: int = 5
    expert: int = 6

    @classmethod
    def times(cls, factor: int) -> Sizes:
        return cls(**{f.name: factor * f.default for f in fields(cls)})  # type: ignore[operator]

    def shapes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Every parameter of the model in one piece. Even layers have dense attention, odd ones a fused one, gates and experts."""
        half, full, hidden = torch.bfloat16, torch.float32, self.hidden
        rows: dict[str, tuple[Shape, torch.dtype]] = dict.fromkeys(VOCABULARIES, ((self.vocabulary, hidden), half))
        rows["last.weight"] = ((hidden,), full)
        for n in range(LAYERS):
            here: dict[str, tuple[Shape, torch.dtype]] = {"norm.weight": ((hidden,), full)}
            if n % 2 == 0:
                heads = {"q": self.queries, "k": self.keys, "v": self.keys}
                here |= {f"attention.{p}.weight": ((k, hidden), half) for p, k in heads.items()}
                here |= {"attention.proj.weight": ((hidden, self.queries), half), "few.weight": ((self.few, hidden), full)}
                here["scale"] = ((1,), full)
            else:
                here["attention.qkv.weight"] = ((self.queries + 2 * self.keys, hidden), half)
                here["mlp.fc1.weight"] = ((2 * self.features, hidden), half)
                here |= {"mlp.fc2.weight": ((hidden, self.features), half), "router.weight": ((EXPERTS, hidden), full)}
                here |= {f"experts.{e}.w1.weight": ((self.expert, hidden), half) for e in range(EXPERTS)}
            rows |= {f"layers.{n}.{name}": shape for name, shape in here.items()}
        return rows

    def fused(self, name: str) -> tuple[int, ...] | None:
        """The groups of rows that a fused parameter is made of."""
        groups = {".qkv.weight": (self.queries, self.keys, self.keys), ".fc1.weight": (self.features, self.features)}
        return next((sizes for end, sizes in groups.items() if name.endswith(end)), None)


SMALL = Sizes()


def numbers(shape: Shape, dtype: torch.dtype, *seed: int) -> torch.Tensor:
    """Any bits but those of NaNs that are signalling, which a cast may quieten."""
    values = np.random.default_rng(seed).standard_normal(math.prod(shape), dtype=np.float32).reshape(shape)
    return torch.from_numpy(values).to(dtype)


def whole(seed: int) -> Parts:
    """The full tensors that a seed gives: weights and, by ``name.key``, both moments of AdamW."""
    tensors: Parts = {}
    for number, (name, (shape, dtype)) in enumerate(SMALL.shapes().items()):
        tensors[name] = numbers(shape, dtype, seed, number, 0)
        tensors |= {f"{name}.{key}": numbers(shape, torch.float32, seed, number, i) for i, key in ((1, "exp_avg"), (2, "exp_avg_sq"))}
    return tensors


def part(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """Part ``index`` of ``count`` along a dimension, of ``ceil(size / count)`` elements as long as there are some."""
    each = -(-tensor.shape[dim] // count)
    first = min(index * each, tensor.shape[dim])
    return tensor.narrow(dim, first, min(each, tensor.shape[dim] - first))


def fused(tensor: torch.Tensor, sizes: tuple[int, ...], count: int, index: int) -> torch.Tensor:
    """A rank's part of each group of rows, one below the other."""
    return torch.cat([part(group, 0, count, index) for group in tensor.split(sizes)])


CUTS = {".q.weight": 0, ".k.weight": 0, ".v.weight": 0, ".proj.weight": 1, ".fc2.weight": 1, "few.weight": 0}
"""End of a parameter's name → the dimension that tensor parallelism cuts."""


def parameter(name: str) -> str:
    return name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job whose tensors are plain and know nothing of their place. Ranks of a stage are numbered tp first, then dp; experts are spread
    over a mesh of their own. ``keys``: over how many ranks key-value heads are spread, if not over all. ``padded``: rows of the vocabulary.
    ``flat``: ranks of dp have contiguous ranges of what tensor parallelism leaves (fused tensors stay whole), ``lopsided``: of lengths that
    are as different as can be."""

    pp: int = 1
    vpp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    keys: int | None = None
    padded: int = SMALL.vocabulary
    sizes: Sizes = SMALL
    flat: bool = False
    lopsided: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    # ---- by hand

    def parts(self, rank: int, full: Mapping[str, torch.Tensor], padding: float = 0.0) -> Parts:
        """What a rank has of full tensors: the name that it uses → its part; rows that pad the vocabulary have one value."""
        each = self.dp * self.tp
        stage, expert = rank // each, rank % each % self.ep
        own: Parts = {}
        for chunk in range(self.vpp):
            span = LAYERS // (self.pp * self.vpp)
            first = (chunk * self.pp + stage) * span
            for name, tensor in full.items():
                layer, number = re.match(r"layers\.(\d+)\.", name), re.search(r"experts\.(\d+)\.", name)
                if layer is None:
                    ends = (stage, chunk) == ((0, 0) if name.startswith("embedding.") else (self.pp - 1, self.vpp - 1))
                    if not ends:
                        continue
                elif not first <= int(layer[1]) < first + span:
                    continue
                if number is not None and int(number[1]) // (EXPERTS // self.ep) != expert:
                    continue
                own[self._local_name(name, chunk, first, expert)] = self._part(name, tensor, rank, padding).clone()
        return own

    def _local_name(self, name: str, chunk: int, first: int, expert: int) -> str:
        name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - first}", name)
        name = re.sub(r"experts\.(\d+)", lambda m: f"experts.{int(m[1]) - expert * (EXPERTS // self.ep)}", name)
        return f"{chunk}.{name}" if self.vpp > 1 else name

    def _part(self, name: str, tensor: torch.Tensor, rank: int, padding: float) -> torch.Tensor:
        tp, dp, owner = rank % self.tp, rank // self.tp % self.dp, parameter(name)
        cut = self._cut(owner)
        sizes = self.sizes.fused(owner)
        if owner in VOCABULARIES:
            rows = torch.full((self.padded - len(tensor), tensor.shape[1]), padding, dtype=tensor.dtype)
            tensor = torch.cat([tensor, rows])
        if sizes is not None:
            return fused(tensor, sizes, self.tp, tp)
        if cut is not None:
            spread = self.keys if self.keys and owner.endswith((".k.weight", ".v.weight")) else self.tp
            tensor = part(tensor, cut, spread, tp * spread // self.tp)
        if not self.flat:
            return tensor
        elements = tensor.reshape(-1)
        lengths = self._lengths(len(elements))
        return elements[sum(lengths[:dp]) : sum(lengths[: dp + 1])]

    def _cut(self, name: str) -> int | None:
        """Which dimension of a parameter tensor parallelism cuts. Parts of flat ranges are of one length, so what is uneven stays whole."""
        if name in VOCABULARIES:
            return 0
        uneven = self.flat and name.endswith("few.weight")
        return None if uneven else next((dim for end, dim in CUTS.items() if name.endswith(end)), None)

    def _lengths(self, count: int) -> list[int]:
        """Of the ranges of ``count`` elements over dp."""
        if self.lopsided:
            return [count - count // 3 if i == 1 else count // 3 if i == self.dp - 1 else 0 for i in range(self.dp)]
        each = -(-count // self.dp)
        return [max(0, min(each, count - i * each)) for i in range(self.dp)]

    # ---- what ckpt is told

    def layout(self, first: int) -> ckpt.Layout:
        """For ranks ``first``, ``first + 1``, …"""
        ranks = tuple(range(first, first + self.world))
        each = self.dp * self.tp
        meshes = {"expert": ckpt.Mesh(("pp", "edp", "ep"), (self.pp, each // self.ep, self.ep), ranks)}
        if self.keys:
            meshes["keys"] = ckpt.Mesh(("pp", "dp", "kv", "copies"), (self.pp, self.dp, self.keys, self.tp // self.keys), ranks)
        numbered: list[Any] = []
        if self.ep > 1:
            numbered.append(ckpt.experts("experts.{n}", count=EXPERTS, ranks=self.ep, mesh="expert"))
        if self.vpp > 1:
            layers = ckpt.pipeline("{chunk}.layers.{n}", layers=LAYERS, stages=self.pp, virtual=self.vpp)
            outside = ("embedding", "last", "head")
            numbered += [layers, *(ckpt.Numbered(pattern=f"{{chunk}}.{o}", to=o, over="pp", ids=layers.ids) for o in outside)]
        elif self.pp > 1:
            numbered.append(ckpt.pipeline("layers.{n}", layers=LAYERS, stages=self.pp))
        mesh = ckpt.Mesh(("pp", "dp", "tp"), (self.pp, self.dp, self.tp), ranks)
        return ckpt.Layout(mesh, list(self._rules()), numbered=numbered, meshes=meshes)

    def _rules(self) -> Iterator[tuple[Any, ...]]:
        """One for each parameter, of whatever number."""
        for name, (shape, _) in self.sizes.shapes().items():
            padding: tuple[Any, ...] = ()
            if name in VOCABULARIES:
                shape, padding = (self.padded, shape[1]), (Padded(0, self.sizes.vocabulary),)
            yield (re.sub(r"^layers\.\d+|^", "*", re.sub(r"experts\.\d+", "experts.*", name)), *self._placements(name, shape), *padding)

    def _placements(self, name: str, shape: Shape) -> tuple[Any, ...]:
        cut = self._cut(name)
        if groups := self.sizes.fused(name):
            return (Interleaved(0, "tp", groups=groups),)
        if self.flat:
            split = () if cut is None else (Shard(cut, "tp"),)
            count = math.prod(shape) if cut is None else math.prod(shape) // self.tp
            return (*split, Flat("dp", sizes=tuple(self._lengths(count))) if self.lopsided else Flat("dp"), GlobalShape(shape))
        if self.ep > 1 and ".experts." in name:
            return (Replicate(), OnMesh("expert"))
        if self.keys and name.endswith((".k.weight", ".v.weight")):
            return (Shard(0, "kv"), OnMesh("keys"))
        return (Replicate(),) if cut is None else (Shard(cut, "tp"), Uneven(cut, shape[cut]))


@dataclass(frozen=True, kw_only=True)
class Torch:
    """Torch's own layouts: DTensors of FSDP2 over ``dp``, of tensor parallelism over ``tp`` and, before both, copies. ``replicas``: plain
    tensors that are equal on all ranks. Tensor parallelism of torch cuts fused tensors like others."""

    copies: int = 1
    dp: int = 1
    tp: int = 1
    replicas: int = 1
    sizes: Sizes = SMALL

    @property
    def world(self) -> int:
        return self.copies * self.dp * self.tp * self.replicas

    @property
    def mesh(self) -> dict[str, int]:
        """Names and sizes of the dimensions that it has; none for plain tensors."""
        return {name: size for name in ("copies", "dp", "tp") if (size := getattr(self, name)) > 1}

    def dim(self, name: str) -> int | None:
        """Which dimension of a parameter tensor parallelism cuts."""
        cut = next((dim for end, dim in CUTS.items() if name.endswith(end)), None)
        return 0 if name in VOCABULARIES or self.sizes.fused(name) else cut

    def parts(self, rank: int, full: Mapping[str, torch.Tensor], padding: float = 0.0) -> Parts:
        tp, dp = rank % self.tp, rank // self.tp % self.dp
        own: Parts = {}
        for name, tensor in full.items():
            if self.tp > 1 and (dim := self.dim(parameter(name))) is not None:
                tensor = part(tensor, dim, self.tp, tp)
            own[name] = (part(tensor, 0, self.dp, dp) if self.dp > 1 else tensor).clone()
        return own


LAYOUTS: dict[str, Job | Torch] = {
    "single": Torch(),
    "copies2": Torch(replicas=2),
    "fsdp2": Torch(dp=2),
    "fsdp3": Torch(dp=3),
    "fsdp4": Torch(dp=4),
    "tp2": Torch(tp=2),
    "fsdp2-tp2": Torch(dp=2, tp=2),
    "hsdp2x2": Torch(copies=2, dp=2),
    "pp2-tp2": Job(pp=2, tp=2, padded=48),
    "pp4": Job(pp=4),
    "pp2-vpp2-tp2-ep2": Job(pp=2, vpp=2, dp=2, tp=2, ep=2, padded=48),
    "tp4-ep4": Job(tp=4, ep=4, padded=44),
    "tp3-uneven": Job(tp=3),
    "engine-tp4": Job(tp=4, keys=2, padded=64),
    "engine-tp2-ep2": Job(tp=2, ep=2, padded=64),
    "zero3": Job(dp=3, flat=True),
    "zero3-tp2": Job(dp=3, tp=2, flat=True, lopsided=True, padded=48),
}
