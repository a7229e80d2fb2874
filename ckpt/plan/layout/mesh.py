"""A mesh: named parallel dimensions over the ranks of a job; and names whose numbers count along one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ckpt.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named parallel dimensions and their sizes; the last dimension's ranks are neighbours.

    ``ranks`` lists the global ranks in row-major order of the mesh; left out, they are 0, 1, 2, …
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: range | tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names) or min(self.sizes, default=1) < 1:
            hint = "each dimension has a name of its own, and a size of at least 1"
            raise LayoutError(f"not a mesh: names {self.names}, sizes {self.sizes}", hint=hint)
        size = math.prod(self.sizes)
        first = self.ranks[0] if self.ranks else 0
        is_range = isinstance(self.ranks, range) and self.ranks.step == 1  # a leader makes one mesh for each table: no look at each rank
        if not self.ranks or is_range or all(r == first + i for i, r in enumerate(self.ranks)):
            # A range hashes and searches in constant time; a tuple of 16,384 ranks does not.
            object.__setattr__(self, "ranks", range(first, first + (len(self.ranks) or size)))
            different = len(self.ranks)
        else:
            object.__setattr__(self, "ranks", tuple(self.ranks))
            different = len(set(self.ranks))
        if len(self.ranks) != size or different != size:
            raise LayoutError(f"mesh {self} needs {size} different ranks, got {self.ranks}")

    @classmethod
    def of(cls, sizes: Mapping[str, int] | Mesh) -> Mesh:
        """A mesh from ``{"pp": 2, "tp": 2}``."""
        return sizes if isinstance(sizes, Mesh) else cls(tuple(sizes), tuple(int(n) for n in sizes.values()))

    @classmethod
    def flat(cls, ranks: Sequence[int]) -> Mesh:
        """One dimension, ``ranks``, over these ranks."""
        return cls(("ranks",), (len(ranks),), tuple(ranks))

    def axis(self, name: str) -> int:
        """The number of a dimension, from 0.

        Raises:
            LayoutError: the mesh has none of this name.
        """
        if name not in self.names:
            raise LayoutError(f"the mesh has no dimension {name!r}", hint=f"its dimensions are {', '.join(self.names)}")
        return self.names.index(name)

    def size(self, name: str) -> int:
        """How many coordinates a dimension has."""
        return self.sizes[self.axis(name)]

    def array(self) -> npt.NDArray[np.int64]:
        """The ranks, in the shape of the mesh."""
        ranks = self.ranks
        flat = np.arange(ranks.start, ranks.stop, dtype=np.int64) if isinstance(ranks, range) else np.array(ranks, dtype=np.int64)
        return flat.reshape(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Place of a rank in the mesh, or None if it is not in it."""
        if isinstance(self.ranks, range):
            number = rank - self.ranks.start if rank in self.ranks else None
        else:  # a tuple would be searched from its start for each rank of it
            number = _numbers(self.ranks).get(rank)
        if number is None:
            return None
        where = []
        for size in reversed(self.sizes):
            number, at = divmod(number, size)
            where.append(at)
        return tuple(reversed(where))

    def place(self, rank: int) -> tuple[int, ...]:
        """Place of a rank in the mesh.

        Raises:
            LayoutError: it is not in it.
        """
        where = self.coordinate(rank)
        if where is None:
            raise LayoutError(f"rank {rank} is not in the mesh {self}")
        return where

    def is_slice_of(self, wide: Mesh, rank: int) -> bool:
        """Whether it is what is left of ``wide`` when the dimensions that it lacks are fixed at the rank's coordinates."""
        return _is_slice(self, wide, rank)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{n}: {s}" for n, s in zip(self.names, self.sizes, strict=True)) + "}"


@lru_cache(maxsize=1024)
def _is_slice(mesh: Mesh, wide: Mesh, rank: int) -> bool:
    where = wide.coordinate(rank)
    if where is None or not set(mesh.names) <= set(wide.names):
        return False
    left = wide.array()[tuple(slice(None) if name in mesh.names else at for name, at in zip(wide.names, where, strict=True))]
    kept = [name for name in wide.names if name in mesh.names]
    return bool(np.array_equal(left.transpose([kept.index(name) for name in mesh.names]), mesh.array()))


def coordinates(meshes: Iterable[Mesh], rank: int) -> dict[str, int]:
    """Where a rank is in each dimension of these meshes that has more than one coordinate; of dimensions of one name the first counts."""
    by_name: dict[str, int] = {}
    for mesh in meshes:
        for name, size, at in zip(mesh.names, mesh.sizes, mesh.coordinate(rank) or (), strict=False):
            if size > 1:
                by_name.setdefault(name, at)
    return by_name


@lru_cache(maxsize=256)
def _numbers(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: number for number, rank in enumerate(ranks)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    """Names with a local number that is not the global one: layers of a pipeline stage, experts of an expert-parallel rank.

    ``pattern`` is a part of the name in which ``{n}`` stands for the number and ``{chunk}``, if there, for the model chunk of a virtual
    pipeline; ``to`` is what it becomes. ``ids[coordinate][chunk][local]`` is the global number. With ``stack`` the numbered
    tensors are stored as one tensor with a new dimension ``stack``; ``{n}`` and the dot after it then vanish from the name.
    """

    pattern: str
    to: str
    over: str
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    stack: int | None = None
    mesh: str | None = None
    stage: bool = False
    """True for a pipeline: tensors without a number then live on the stages that have them."""

    def regex(self) -> re.Pattern[str]:
        """Finds the pattern in a name, between dots, with the numbers as groups ``n`` and ``chunk``."""
        text = re.escape(self.pattern).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{chunk\}", r"(?P<chunk>\d+)")
        return re.compile(r"(?<![^.])" + text + r"(?![^.])")

    def count(self) -> int:
        """How many numbered things there are in all."""
        return sum(len(chunk) for coordinate in self.ids for chunk in coordinate)


def pipeline(
    pattern: str, *, layers: int, stages: int, virtual: int = 1, over: str = "pp", to: str | None = None, stack: int | None = None
) -> Numbered:
    """Layers over pipeline stages: contiguous blocks, or with ``virtual`` chunks per stage Megatron's interleaved order.

    ``pattern`` is such as ``"layers.{n}"`` or ``"{chunk}.layers.{n}"``. Chunk v of stage p has layers ``v·L/V + p·L/(V·P)`` and following
    (megatron/core/transformer/transformer_block.py, get_num_layers_to_build and the layer offset).
    """
    per, rest = divmod(layers, stages * virtual)
    if rest:
        raise LayoutError(f"{layers} layers do not divide into {stages} stages of {virtual} chunks", hint="give Numbered(ids=...) yourself")
    ids = tuple(
        tuple(tuple(range(v * stages * per + p * per, v * stages * per + (p + 1) * per)) for v in range(virtual)) for p in range(stages)
    )
    target = to if to is not None else pattern.replace("{chunk}.", "")
    return Numbered(pattern=pattern, to=target, over=over, ids=ids, stack=stack, stage=True)


def experts(
    pattern: str, *, count: int, ranks: int, over: str = "ep", to: str | None = None, stack: int | None = None, mesh: str | None = None
) -> Numbered:
    """Experts over expert-parallel ranks, contiguous blocks: ``pattern`` is such as ``"experts.{n}"``."""
    per, rest = divmod(count, ranks)
    if rest:
        raise LayoutError(f"{count} experts do not divide over {ranks} ranks", hint="give Numbered(ids=...) yourself")
    ids = tuple((tuple(range(r * per, (r + 1) * per)),) for r in range(ranks))
    return Numbered(pattern=pattern, to=pattern if to is None else to, over=over, ids=ids, stack=stack, mesh=mesh)
