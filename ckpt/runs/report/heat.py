"""Rank × phase: how long each rank was busy in each phase, as levels against the phase's median rank; and what a checkpoint consists of.
Pure.

With many ranks a cell is a block of neighbours, and shows the slowest of them: a mean would hide the one that is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ckpt.catalog import TensorEntry
from ckpt.telemetry.spans import WAITING, SpanTable

from .summary import SaveSummary, brief, floor_of

BOUNDS = (0.5, 0.8, 1.25, 1.5, 2.0, 3.0)
"""Ratios to the median between levels 0 … 6."""
MIDDLE = 2
"""The level of what is about the median."""

_COLUMNS = 48
_LABEL = 11
_SHADES = {"unicode": "···░▒▓█", "ascii": "...-+*#"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One rank of some in one phase: busy ``micros``, ``level`` against the median rank."""

    rank: int
    micros: int
    nbytes: int
    level: int


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """``rows`` by phase: a cell for each of ``groups``, None where none of these ranks has the phase. ``medians`` in microseconds."""

    groups: tuple[range | tuple[int, ...], ...]
    rows: Mapping[str, tuple[Cell | None, ...]]
    medians: Mapping[str, float]


def heat_map(
    save: SaveSummary, tables: Mapping[int, SpanTable], groups: Sequence[range | tuple[int, ...]], *, typical: bool = False
) -> HeatMap:
    """The phases in the order of ``save``, work before waiting; each cell is the slowest rank of one of ``groups``, or a ``typical`` one:
    the median."""
    floor = 1e6 * floor_of(save.seconds)
    names = sorted((phase.phase for phase in save.phases), key=lambda name: name in WAITING)
    rows: dict[str, tuple[Cell | None, ...]] = {}
    medians: dict[str, float] = {}
    for name in names:
        sums = {rank: table.sums[name] for rank, table in tables.items() if name in table.sums}
        middle = medians[name] = median(one.busy for one in sums.values())
        cells: list[Cell | None] = []
        for group in groups:
            busy = sorted((sums[rank].busy, -rank) for rank in group if rank in sums)
            if not busy:
                cells.append(None)
                continue
            rank = -busy[len(busy) // 2 if typical else -1][1]
            one = sums[rank]
            cells.append(Cell(rank=rank, micros=one.busy, nbytes=one.nbytes, level=level_of(one.busy, middle, floor)))
        rows[name] = tuple(cells)
    return HeatMap(groups=tuple(groups), rows=rows, medians=medians)


def level_of(value: float, middle: float, floor: float) -> int:
    """0 … 6: how a value compares with the median; what differs by less than ``floor`` is as the median."""
    if abs(value - middle) < floor:
        return MIDDLE
    return sum(value >= bound * middle for bound in BOUNDS)


def blocks(ranks: int, size: int) -> tuple[range, ...]:
    """Neighbouring ranks, ``size`` in each block but the last."""
    return tuple(range(first, min(first + size, ranks)) for first in range(0, ranks, size))


def terminal_lines(save: SaveSummary, tables: Mapping[int, SpanTable], encoding: str) -> Iterator[str]:
    """The heat map in 80 columns and without colours."""
    ranks = max(tables) + 1
    size = -(-ranks // _COLUMNS)
    heat = heat_map(save, tables, blocks(ranks, size))
    try:
        shades = _SHADES["unicode"]
        shades.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        shades = _SHADES["ascii"]
    title = f"ranks 0 to {ranks - 1}" + (f", {size} a column" if size > 1 else "")
    width = min(max(len(heat.groups), len(title)), _COLUMNS)
    yield f"{'PHASE':{_LABEL}}  {title:{width}}  SLOWEST"
    for name, cells in heat.rows.items():
        line = "".join(" " if cell is None else shades[cell.level] for cell in cells)
        worst = max((cell for cell in cells if cell is not None), key=lambda cell: (cell.micros, -cell.rank))
        yield f"{name[:_LABEL]:{_LABEL}}  {line:{width}}  {worst.rank}: {brief(worst.micros / 1e6)} s"
    bounds = zip(shades[MIDDLE + 1 :], BOUNDS[MIDDLE:], strict=True)
    yield f"{shades[MIDDLE]} about the median, or faster   {'   '.join(f'{shade} ≥ {bound:g} ×' for shade, bound in bounds)}"


# What a checkpoint consists of, by kind and by layer, from the names of its tensors alone. Pure.
#
# Names are the user's own, so kinds are guesses from words that everybody uses. The default is ``model`` for floating-point tensors.

MODEL, EMA, DATA, RNG, VALUES, OTHER = "model", "averaged weights", "data", "random numbers", "values", "other"
OPTIMIZER = "optimizer: "
"""Followed by the name of a state, such as ``exp_avg``."""

_OPTIMIZER = re.compile(r"(?:^|\.)\w*optim\w*\.(?:state\.)?(?P<rest>.+)", re.IGNORECASE)
_WORDS = (
    (RNG, re.compile(r"(?:^|[._])(?:rng|rngs|generators?|random)(?:[._]|$)", re.IGNORECASE)),
    (DATA, re.compile(r"(?:^|[._])(?:data|dataset|dataloader|loader|sampler)s?(?:[._]|$)", re.IGNORECASE)),
    (EMA, re.compile(r"(?:^|[._])(?:ema|swa|averaged)(?:[._]|$)", re.IGNORECASE)),
)
_STATES = 12
_LEAVES = 140
_SMALL = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSize:
    """Stored tensors of one kind; ``VALUES`` counts none."""

    kind: str
    bytes: int
    tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """Stored tensors of one kind and layer; an empty ``layer`` stands for ``tensors`` of many small ones."""

    kind: str
    layer: str
    bytes: int
    tensors: int


def kinds_of(entries: Iterable[TensorEntry], values: int) -> tuple[tuple[KindSize, ...], tuple[LayerSize, ...]]:
    """Bytes by kind, and by kind and layer, the largest first. ``values`` are the bytes of what is not a tensor.

    Aliases count nothing: their bytes are those of another tensor.
    """
    by_kind: dict[str, list[int]] = {}
    by_layer: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        if entry.alias is None:
            kind, path = _kind(entry)
            for sums in (by_kind.setdefault(kind, [0, 0]), by_layer.setdefault((kind.partition(":")[0], _layer(path)), [0, 0])):
                sums[0] += entry.nbytes
                sums[1] += 1
    if values:
        by_kind[VALUES] = [values, 0]
    ordered = sorted(by_kind, key=lambda kind: (-by_kind[kind][0], kind))
    more = [kind for kind in ordered if kind.startswith(OPTIMIZER)][_STATES:]  # of names of its own for each parameter
    if more:
        together = [by_kind.pop(kind) for kind in more]
        by_kind[f"{OPTIMIZER}{len(more):,} more"] = [sum(sums[0] for sums in together), sum(sums[1] for sums in together)]
    kinds = [KindSize(kind=kind, bytes=nbytes, tensors=count) for kind, (nbytes, count) in by_kind.items()]
    layers = [LayerSize(kind=kind, layer=layer, bytes=nbytes, tensors=n) for (kind, layer), (nbytes, n) in by_layer.items()]
    return tuple(sorted(kinds, key=lambda k: (-k.bytes, k.kind))), _few_layers(layers)


def _kind(entry: TensorEntry) -> tuple[str, str]:
    """The kind, and the path of what it belongs to: of an optimizer's state the parameter."""
    match = _OPTIMIZER.search(entry.name)
    if match is not None:
        parameter, _, state = match["rest"].rpartition(".")
        return OPTIMIZER + (state if parameter else "state"), parameter or match["rest"]
    kind = next((kind for kind, words in _WORDS if words.search(entry.name)), None)
    if kind is None:
        kind = MODEL if entry.dtype.name.startswith(("float", "bfloat", "complex")) else OTHER
    return kind, entry.name


def _layer(path: str) -> str:
    """Up to the first number, ``model.layers.3``; without one the first parts but the last."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[: min(3, max(len(parts) - 1, 1))])


def _few_layers(layers: list[LayerSize]) -> tuple[LayerSize, ...]:
    ordered = sorted(layers, key=lambda s: (-s.bytes, s.kind, s.layer))
    total = sum(s.bytes for s in ordered)
    shown = [s for s in ordered[:_LEAVES] if s.bytes >= _SMALL * total]
    rest: dict[str, list[int]] = {}
    for s in ordered[len(shown) :]:
        sums = rest.setdefault(s.kind, [0, 0])
        sums[0] += s.bytes
        sums[1] += s.tensors
    more = [LayerSize(kind=kind, layer="", bytes=nbytes, tensors=n) for kind, (nbytes, n) in rest.items() if nbytes]
    return tuple(sorted([*shown, *more], key=lambda s: (-s.bytes, s.kind, s.layer)))
