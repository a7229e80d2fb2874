"""What a checkpoint consists of, by kind and by layer, from the names of its tensors alone. Pure.

Names are the user's own, so kinds are guesses from words that everybody uses. The default is ``model`` for floating-point tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.catalog import TensorEntry

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
    kinds = [KindSize(kind=kind, bytes=nbytes, tensors=count) for kind, (nbytes, count) in by_kind.items()]
    layers = [LayerSize(kind=kind, layer=layer, bytes=nbytes, tensors=n) for (kind, layer), (nbytes, n) in by_layer.items()]
    return _few_states(kinds), _few_layers(layers)


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


def _few_states(kinds: list[KindSize]) -> tuple[KindSize, ...]:
    """Who writes names of its own for each parameter must not get a row for each."""
    ordered = sorted(kinds, key=lambda k: (-k.bytes, k.kind))
    rest = [k for k in ordered if k.kind.startswith(OPTIMIZER)][_STATES:]
    if not rest:
        return tuple(ordered)
    more = KindSize(kind=f"{OPTIMIZER}{len(rest):,} more", bytes=sum(k.bytes for k in rest), tensors=sum(k.tensors for k in rest))
    return tuple(sorted([*(k for k in ordered if k not in rest), more], key=lambda k: (-k.bytes, k.kind)))


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
