"""What a training checkpoint must be besides whole: its parts fit each other. Over names, so for every format. No torch.

* A weight is its master, cast to the weight's dtype (round to nearest even).
* All parameters of an optimizer made the same number of steps.
* What the checkpoint has several times is the same each time.
* Masters and moments are finite, second moments not negative, and after a step not all of a moment is zero.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.engine.structure import Problem
from ckpt.formats.external_elements import cast_bits, read_box, read_extent
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.plan.reads import pieces

from .element_differences import Elements, Raw, numbers

KIND = "semantic"
"""The kind of every problem that is found here."""

MASTERS = ("master", "fp32", "fp32_param")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq")
REMEDY = "ckpt convert --repair SRC DST --to native mends the states that Megatron-Core 0.15 to 0.19 displaced"
_LOW = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticReport:
    """What was checked, and what does not fit: problems name a tensor, and the first box of it that does not."""

    masters: int
    moments: int
    steps: int
    replicas: int
    problems: tuple[Problem, ...]
    remedy: str | None = None
    """What to do about masters that are not their weights, if it is known where they may come from."""


@dataclass(frozen=True, slots=True)
class _State:
    """One tensor of an optimizer's state: ``key`` of parameter ``param``."""

    entry: TensorEntry
    optimizer: str
    param: str
    key: str


def check_semantic(catalog: Catalog, *, threads: int | None = None) -> SemanticReport:
    """Check that weights, masters, moments and steps fit each other."""
    states = list(_states(catalog))
    elements = Elements(catalog)
    masters = _masters(catalog, states)
    moments = [s for s in states if s.key in MOMENTS]
    with _pool(threads) as pool:
        problems = [p for p in pool.map(lambda s: _check_master(elements, s), masters) if p is not None]
        remedy = REMEDY if problems and catalog.suspect is not None else None
        checked = list(pool.map(lambda s: _check_moment(elements, s), moments))
        replicas = catalog.replicas()
        problems += [p for p in pool.map(lambda r: _check_replica(catalog, *r), replicas) if p is not None]
    problems += [p for p, _ in checked if p is not None]
    steps = dict(_steps(catalog, elements, states))
    problems += _check_steps(steps)
    problems += _check_zeros(moments, [zero for _, zero in checked], steps)
    return SemanticReport(
        masters=len(masters), moments=len(moments), steps=len(steps), replicas=len(replicas), problems=tuple(problems), remedy=remedy
    )


def misfit_masters(catalog: Catalog, *, threads: int | None = None) -> tuple[int, Problem | None]:
    """How many masters can be compared with their weights, and the first that is found not to be its weight."""
    elements = Elements(catalog)
    masters = [s for s in _masters(catalog, _states(catalog)) if {s.entry.dtype.name, catalog.tensors[s.param].dtype.name} <= {*_LOW}]
    with _pool(threads) as pool:
        problems = pool.map(lambda s: _check_master(elements, s), masters)
        first = next((problem for problem in problems if problem is not None), None)
        pool.shutdown(wait=False, cancel_futures=True)
    return len(masters), first


def _masters(catalog: Catalog, states: Iterable[_State]) -> list[_State]:
    return [s for s in states if s.key in MASTERS and s.param in catalog.tensors]


def _pool(threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads or min(16, max(2, os.cpu_count() or 2)), thread_name_prefix="ckpt-semantic")


def _states(catalog: Catalog) -> Iterator[_State]:
    """Tensors of optimizers, whose names are ``<optimizer>.state.<parameter>.<key>``."""
    for name, entry in catalog.tensors.items():
        optimizer, state, rest = name.partition(".state.")
        param, _, key = rest.rpartition(".")
        if state and param and entry.rank is None:
            yield _State(entry, optimizer, param, key)


def _problem(state: _State, message: str, box: Box | None = None) -> Problem:
    return Problem(kind=KIND, tensor=state.entry.name, box=box, message=message)


# ---------------------------------------------------------------------------------------------------------------- masters


def _check_master(elements: Elements, state: _State) -> Problem | None:
    weight = elements.catalog.tensors[state.param]
    if weight.dtype.name not in _LOW or state.entry.dtype.name not in _LOW:
        return None
    shapes = [e.logical or e.shape for e in (weight, state.entry)]
    if shapes[0] != shapes[1]:
        return _problem(state, f"the weight {weight.name} has shape {list(shapes[0])}, the master {list(shapes[1])}")
    same = (state.entry.alias or state.entry.name) == (weight.alias or weight.name)
    wrong, first, odd, first_odd = 0, None, 0, None
    for box in _windows(state.entry):
        raw = elements.of_tensor(state.entry, box)
        not_finite = ~np.isfinite(numbers(raw, state.entry.dtype))
        odd += int(not_finite.sum())
        if first_odd is None and not_finite.any():
            first_odd = _element(not_finite, box)
        if same:
            continue
        master = rounded(raw, state.entry.dtype.name, weight.dtype.name)
        low = numbers(elements.of_tensor(weight, box), weight.dtype)
        differ = ~((master == low) | ((master != master) & (low != low)))
        wrong += int(differ.sum())
        if first is None and differ.any():
            first = _element(differ, box)
    if wrong:
        many = f"{wrong:,} of {weight.numel:,} elements"
        return _problem(state, f"the weight {weight.name} is not its master, cast to {weight.dtype.name}, in {many}", first)
    return _problem(state, f"{odd:,} elements are not finite", first_odd) if odd else None


def rounded(raw: Raw, kind: str, to: str) -> npt.NDArray[Any]:
    """Elements of one float dtype as those of another would be, as numbers of 64 bits."""
    bits = cast_bits(numbers(raw, DTYPES[kind]).astype(np.float32), to)
    assert bits is not None  # of _LOW
    return numbers(bits, DTYPES[to])


# --------------------------------------------------------------------------------------------------------------- replicas


def _check_replica(catalog: Catalog, name: str, box: Box, extent: Extent) -> Problem | None:
    """A further copy of a box of a tensor, in ``extent``."""
    entry = catalog.tensors[name]
    own = read_box(catalog, entry, box)
    differ = own != read_extent(catalog.backend, entry.dtype.name, extent, box.shape)
    if not differ.any():
        return None
    message = f"{int(differ.sum()):,} of {box.numel:,} elements differ from the copy in {extent.path}"
    return Problem(kind=KIND, tensor=name, box=_element(differ, box), message=message)


# ---------------------------------------------------------------------------------------------------------------- moments


def _check_moment(elements: Elements, state: _State) -> tuple[Problem | None, bool]:
    """What is wrong with a moment, and whether it is zero all over."""
    odd, negative, zero = 0, 0, True
    first: Box | None = None
    for box in _windows(state.entry):
        values = numbers(elements.of_tensor(state.entry, box), state.entry.dtype)
        not_finite = ~np.isfinite(values)
        below = values < 0 if state.key in NOT_NEGATIVE else np.zeros_like(not_finite)
        odd, negative = odd + int(not_finite.sum()), negative + int(below.sum())
        zero = zero and not values.any()
        if first is None and (wrong := not_finite | below).any():
            first = _element(wrong, box)
    if odd:
        return _problem(state, f"{odd:,} elements are not finite", first), zero
    if negative:
        return _problem(state, f"{negative:,} elements of a mean of squares are negative", first), zero
    return None, zero


def _check_zeros(moments: Sequence[_State], zeros: Sequence[bool], steps: dict[tuple[str, str], float]) -> Iterator[Problem]:
    """A moment that is zero for all parameters that made a step was never kept."""
    # Of single parameters it may be: some get no gradient.
    stepped: dict[tuple[str, str], list[bool]] = {}
    for state, zero in zip(moments, zeros, strict=True):
        if steps.get((state.optimizer, state.param), 0) > 0 and state.entry.numel:
            stepped.setdefault((state.optimizer, state.key), []).append(zero)
    for (optimizer, key), all_of in stepped.items():
        if all(all_of):
            yield Problem(
                kind=KIND, tensor=f"{optimizer}.state.*.{key}", message=f"zero for all {len(all_of):,} parameters, after steps were made"
            )


# ------------------------------------------------------------------------------------------------------------------ steps


def _steps(catalog: Catalog, elements: Elements, states: Sequence[_State]) -> Iterator[tuple[tuple[str, str], float]]:
    """The step of each parameter, by optimizer and parameter: a tensor of one element, or a value."""
    for state in states:
        if state.key == "step" and state.entry.numel == 1:
            raw = elements.of_tensor(state.entry, Box.whole(state.entry.shape))
            yield (state.optimizer, state.param), float(numbers(raw, state.entry.dtype).reshape(-1)[0])
    for path, node in tree.leaves(catalog.state) if catalog.state is not None else ():
        optimizer, separator, rest = path.partition(".state.")
        param, _, key = rest.rpartition(".")
        if separator and param and key == "step" and (value := _number(node)) is not None:
            yield (optimizer, param), value


def _number(node: Any) -> float | None:
    if type(node) in (int, float):
        return float(node)
    if tree.tag_of(node) != "$inline":
        return None
    from base64 import b64decode

    name, _, data = node["$inline"]
    raw = np.frombuffer(b64decode(data), f"<u{DTYPES[name].itemsize}")
    return float(numbers(raw, DTYPES[name])[0]) if raw.size == 1 else None


def _check_steps(steps: dict[tuple[str, str], float]) -> Iterator[Problem]:
    for optimizer in sorted({o for o, _ in steps}):
        counts = Counter(step for (o, _), step in steps.items() if o == optimizer)
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            other = next(p for (o, p), step in steps.items() if o == optimizer and step != usual)
            listed = ", ".join(f"{count:,} at {step:g}" for step, count in counts.most_common(4))
            yield Problem(
                kind=KIND, tensor=f"{optimizer}.state.{other}.step", message=f"the parameters made different numbers of steps: {listed}"
            )


def _windows(entry: TensorEntry) -> Iterator[Box]:
    box = Box.whole(entry.logical or entry.shape)
    return (p.box for p in pieces(box, box, settings.VALUE_BLOCK // entry.dtype.itemsize))


def _element(wrong: npt.NDArray[np.bool_], box: Box) -> Box:
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.ndim else ()
    return Box(tuple(o + int(i) for o, i in zip(box.offset, index, strict=True)), (1,) * len(box.shape))
