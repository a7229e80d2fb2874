"""Terms of a translation: how tensors of one naming convention make a tensor of another, and the way back.

A term has one or several patterns on the left, one on the right, and steps between them: ``concat``, ``interleave``, ``stack``,
``transpose``, ``rotary``, ``pad``. In a pattern ``{layer}`` stands for a number; a number that a step goes ``over`` is on the left alone.
No elements are touched: what comes out are views (ckpt/plan/views.py).
"""

# One term, there and back. ``left = [q, k, v]``, ``right = qkv``, one step ``interleave`` in groups:
#
#     rightwards   names of the left are grouped by their numbers    {layer: 7} -> [layers.7.q, layers.7.k, layers.7.v]
#                  each becomes a view of itself                     rows = [[q, k, v]]
#                  steps, first to last, join views                  rows = [[q0 k0 v0 q1 k1 v1 ...]]
#                  the last view gets the right name                 layers.7.qkv
#     leftwards    the same list of steps, last to first, each undone: split, unstack, transpose back, strip the padding
#
# With ``over = "expert"``, ``rows`` has one list for each expert, and ``stack`` or ``concat`` makes them one. Every step can be undone
# from shapes and the model's numbers alone, which is why ``interleave`` needs ``sizes``, and ``concat`` over a number its ``count``.

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from ckpt.errors import UsageError
from ckpt.plan import views
from ckpt.plan.views import LogicalTensor

Kind = Literal["concat", "interleave", "stack", "transpose", "rotary", "pad"]
Number = int | str
"""A number, or the name of one: ``"query_groups"``."""


class Dimensions(dict[str, int]):
    """Numbers of a model by name: what its configuration says of it."""

    def of(self, number: Number | None) -> int:
        if number is None:
            raise UsageError("a step of the translation lacks a number")
        if isinstance(number, int):
            return number
        if number not in self:
            raise UsageError(
                f"the translation needs the number {number!r} of the model, which is not given", hint=f"give it: --set {number}=…"
            )
        return self[number]


@dataclass(frozen=True, kw_only=True, slots=True)
class TermStep:
    """One step from left to right.

    ``concat``, ``interleave``: the patterns' tensors along ``axis``; ``sizes`` are theirs along it (equal if absent), needed on the way
    back. With ``over``, ``concat`` and ``stack`` put together what differs in that number alone; ``count`` says for the way back of a
    ``concat`` how many these are. ``transpose``: ``order`` of the axes. ``rotary``: each of ``groups`` heads from halves to pairs. ``pad``:
    from ``real`` elements to ``to``, with zeros.
    """

    kind: Kind
    axis: int = 0
    over: str | None = None
    groups: Number = 1
    sizes: tuple[Number, ...] | None = None
    count: Number | None = None
    order: tuple[int, ...] = ()
    real: Number | None = None
    to: Number | None = None

    def __post_init__(self) -> None:
        padded = self.real is not None and self.to is not None
        wanted = {"stack": self.over, "transpose": self.order, "interleave": self.sizes, "pad": padded}
        if not wanted.get(self.kind, True):
            needs = {"stack": "over", "transpose": "order", "interleave": "groups and sizes", "pad": "real and to"}[self.kind]
            raise UsageError(f"a step {self.kind!r} needs {needs}")
        if self.kind == "concat" and self.over is not None and self.count is None:
            raise UsageError("a step 'concat' over a number needs its count, for the way back")
        if self.over is not None and self.kind not in ("concat", "stack"):
            raise UsageError(f"a step {self.kind!r} does not go over a number")

    def asks(self, *, rightwards: bool) -> set[str]:
        """Names of the numbers of the model that it takes on the way to one side."""
        asked: list[Number | None] = [self.groups] if self.kind in ("interleave", "rotary") else []
        asked += [self.to if rightwards else self.real, *(() if rightwards else (self.count, *(self.sizes or ())))]
        return {number for number in asked if isinstance(number, str)}


class MatchedTensor(NamedTuple):
    """A name that fits a pattern: the pattern's place on its side, and the numbers in the name."""

    place: int
    numbers: tuple[tuple[str, int], ...]


Rows = list[list[LogicalTensor]]
"""A list of the patterns' views for each value of the number that a step goes over; the steps join them to one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """``left`` and ``right`` are patterns of names. ``optional``: no fault if no name fits, as for biases that some models have.
    ``beside``: on the way to the right only for names beside which this one is there, too: layers with experts may be told differently."""

    left: tuple[str, ...]
    right: str
    steps: tuple[TermStep, ...] = ()
    optional: bool = False
    beside: str | None = None

    def __post_init__(self) -> None:
        over = [s.over for s in self.steps if s.over is not None]
        numbers = [set(numbers_of(p)) for p in self.left]
        if len(over) > 1:
            raise UsageError(f"{self}: at most one step goes over a number")
        if any(n != numbers[0] for n in numbers) or numbers[0] != {*numbers_of(self.right), *over}:
            raise UsageError(f"{self}: the sides have different numbers")
        if self.beside is not None and not numbers[0] >= set(numbers_of(self.beside)):
            raise UsageError(f"{self}: beside has other numbers than the left side")
        if len(self.left) > 1 and not any(s.kind in ("concat", "interleave") and s.over is None for s in self.steps):
            raise UsageError(f"{self}: several patterns need a step that puts them together")

    def __str__(self) -> str:
        return f"{' + '.join(self.left)} → {self.right}"

    def takes(self, matched: MatchedTensor, names: Container[str]) -> bool:
        """Whether a name of the left that fits one of the patterns is meant."""
        return self.beside is None or name_of(self.beside, dict(matched.numbers)) in names

    @property
    def over(self) -> str | None:
        return next((s.over for s in self.steps if s.over is not None), None)

    def rightwards(
        self, matched: Mapping[str, MatchedTensor], shape_of: Callable[[str], Sequence[int]], numbers: Dimensions
    ) -> dict[str, LogicalTensor]:
        """The right side's tensors as views of the left side's."""
        made = {}
        for key, names in _grouped(matched, self.over).items():
            target = name_of(self.right, dict(key))
            count = 1 + max(i for i, _ in names)
            lost = [(i, p) for i in range(count) for p in range(len(self.left)) if (i, p) not in names]
            if lost:
                i, p = lost[0]
                more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
                where = f", number {i}" if self.over else ""
                raise UsageError(
                    f"{target!r} needs {self.left[p]!r}{where}{more}, which is not there, beside {sorted(names.values())[0]!r}"
                )
            rows = [[names[i, p] for p in range(len(self.left))] for i in range(count)]
            made[target] = self._joined([[views.whole(name, shape_of(name)) for name in row] for row in rows], numbers, target)
        return made

    def leftwards(
        self, matched: Mapping[str, MatchedTensor], shape_of: Callable[[str], Sequence[int]], numbers: Dimensions
    ) -> dict[str, LogicalTensor]:
        """The left side's tensors as views of the right side's. Errors as for :meth:`rightwards`."""
        made = {}
        for name, (_, at) in matched.items():
            rows: Rows = [[views.whole(name, shape_of(name))]]
            try:
                for step in reversed(self.steps):
                    rows = _backward(step, rows, len(self.left), numbers)
            except UsageError as err:
                raise UsageError(f"{name!r} cannot be taken apart: {err.message}", hint=err.hint) from err
            for i, row in enumerate(rows):
                own = dict(at) if self.over is None else {**dict(at), self.over: i}
                made.update({name_of(pattern, own): view for pattern, view in zip(self.left, row, strict=True)})
        return made

    def _joined(self, rows: Rows, numbers: Dimensions, target: str) -> LogicalTensor:
        try:
            for step in self.steps:
                rows = _forward(step, rows, numbers)
        except UsageError as err:
            raise UsageError(f"{target!r} cannot be made: {err.message}", hint=err.hint) from err
        ((view,),) = rows
        return view


# -------------------------------------------------------------------------------------------------------------- steps


def _forward(step: TermStep, rows: Rows, numbers: Dimensions) -> Rows:
    if step.kind == "transpose":
        return [[views.transpose(v, step.order) for v in row] for row in rows]
    if step.kind == "pad":
        return [[_padded(v, step, numbers) for v in row] for row in rows]
    if step.kind == "rotary":
        return [[_paired(v, step.axis, numbers.of(step.groups)) for v in row] for row in rows]
    if step.kind == "interleave":
        return [[views.interleave(row, step.axis, numbers.of(step.groups))] for row in rows]
    if step.over is None:
        return [[views.concat(row, step.axis)] for row in rows]
    put = views.stack if step.kind == "stack" else views.concat
    return [[put(column, step.axis) for column in zip(*rows, strict=True)]]


def _padded(view: LogicalTensor, step: TermStep, numbers: Dimensions) -> LogicalTensor:
    real = step.real if isinstance(step.real, int) else numbers.get(step.real or "")
    own = view.shape[step.axis : step.axis + 1]
    if real is not None and own and own[0] < real:
        raise UsageError(f"axis {step.axis} of shape {list(view.shape)} has fewer than the {real} elements that are not padding")
    return views.padded(view, step.axis, numbers.of(step.to))


def _backward(step: TermStep, rows: Rows, patterns: int, numbers: Dimensions) -> Rows:
    if step.kind == "transpose":
        order = sorted(range(len(step.order)), key=step.order.__getitem__)
        return [[views.transpose(v, order) for v in row] for row in rows]
    if step.kind == "pad":
        return [[_stripped(v, step.axis, numbers.of(step.real)) for v in row] for row in rows]
    if step.kind == "rotary":
        return [[_halved(v, step.axis, numbers.of(step.groups)) for v in row] for row in rows]
    if step.over is not None:
        return [list(row) for row in zip(*[_numbered(step, v, numbers) for v in rows[0]], strict=True)]
    if step.kind == "interleave":
        sizes = [numbers.of(s) for s in step.sizes or ()]
        return [views.deinterleave(v, step.axis, numbers.of(step.groups), sizes) for (v,) in rows]
    given = None if step.sizes is None else [numbers.of(s) for s in step.sizes]
    return [views.split(v, step.axis, given or _equal_parts(v, step.axis, patterns)) for (v,) in rows]


def _paired(view: LogicalTensor, axis: int, heads: int) -> LogicalTensor:
    """Rows of each head from first half, second half to pairs: the two ways to store what rotary embeddings turn (transformers,
    convert_llama_weights_to_hf.py, ``permute``)."""
    halves = views.split(view, axis, _equal_parts(view, axis, 2 * heads))
    pairs = [views.interleave(halves[i : i + 2], axis, halves[i].shape[axis]) for i in range(0, len(halves), 2)]
    return views.concat(pairs, axis)


def _halved(view: LogicalTensor, axis: int, heads: int) -> LogicalTensor:
    parts = views.split(view, axis, _equal_parts(view, axis, heads))
    halves = [_equal_parts(part, axis, 2) for part in parts]
    return views.concat([h for p, s in zip(parts, halves, strict=True) for h in views.deinterleave(p, axis, s[0], s)], axis)


def _numbered(step: TermStep, view: LogicalTensor, numbers: Dimensions) -> list[LogicalTensor]:
    if step.kind == "stack":
        return views.unstack(view, step.axis)
    return views.split(view, step.axis, _equal_parts(view, step.axis, numbers.of(step.count)))


def _equal_parts(view: LogicalTensor, axis: int, parts: int) -> list[int]:
    if not 0 <= axis < len(view.shape) or parts < 1 or view.shape[axis] % parts:
        raise UsageError(f"axis {axis} of shape {list(view.shape)} cannot be cut in {parts} equal parts")
    return [view.shape[axis] // parts] * parts


def _stripped(view: LogicalTensor, axis: int, real: int) -> LogicalTensor:
    if not 0 <= axis < len(view.shape) or view.shape[axis] < real:
        raise UsageError(f"axis {axis} of shape {list(view.shape)} has not {real} elements")
    return views.split(view, axis, [real, view.shape[axis] - real])[0]


# ----------------------------------------------------------------------------------------------------------- patterns

_NUMBER = re.compile(r"\{(\w+)\}|(\d+)")


def numbers_of(pattern: str) -> list[str]:
    """The names of the numbers in a pattern."""
    return re.findall(r"\{(\w+)\}", pattern)


def name_of(pattern: str, numbers: Mapping[str, int]) -> str:
    """The name that a pattern gives with these numbers."""
    return re.sub(r"\{(\w+)\}", lambda m: str(numbers[m[1]]), pattern)


class Patterns:
    """Finds the pattern that a name fits, among many: names and patterns that differ in numbers alone have one key."""

    def __init__(self, patterns: Iterable[tuple[str, int, int]]) -> None:
        """``patterns``: each with the number of its term and its place there."""
        self._by_key: dict[str, list[tuple[list[str], int, int]]] = {}
        for pattern, term, place in patterns:
            parts = [f"{{{m[1]}}}" if m[1] else m[2] for m in _NUMBER.finditer(pattern)]
            self._by_key.setdefault(_NUMBER.sub("#", pattern), []).append((parts, term, place))

    def find(self, name: str) -> list[tuple[int, MatchedTensor]]:
        """Number of the term and what was found in the name, for each pattern that it fits."""
        digits = re.findall(r"\d+", name)
        matches = []
        for parts, term, place in self._by_key.get(re.sub(r"\d+", "#", name), []):
            at = _read(parts, digits)
            if at is not None:
                matches.append((term, MatchedTensor(place, at)))
        return matches


def _read(parts: Sequence[str], texts: Sequence[str]) -> tuple[tuple[str, int], ...] | None:
    """Numbers by name, or None if a number that the pattern has itself is another one."""
    at: dict[str, int] = {}
    for part, digits in zip(parts, texts, strict=True):
        if not part.startswith("{"):
            if part != digits:
                return None
        elif digits != str(int(digits)) or at.setdefault(part[1:-1], int(digits)) != int(digits):
            return None  # layers.03 is not layers.3, and {n} is one number wherever it stands
    return tuple(sorted(at.items()))


def _grouped(matched: Mapping[str, MatchedTensor], over: str | None) -> dict[tuple[tuple[str, int], ...], dict[tuple[int, int], str]]:
    """Names by their numbers without ``over``, then by that number and the pattern's place."""
    rows = []
    for name, (place, at) in matched.items():
        key = tuple(pair for pair in at if pair[0] != over)
        rows.append((key, (dict(at).get(over or "", 0), place), name))
    rows.sort()
    return {key: {at: name for _, at, name in group} for key, group in groupby(rows, key=lambda row: row[0])}
