"""Which experts of a mixture-of-experts model a save writes: some of each layer, in turns (MoC-System, arXiv 2408.04307)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckpt.errors import UsageError

EXPERT = "{expert}"
"""Stands for the number of an expert in a glob of names."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, kw_only=True)
class PartialExperts:
    """A save writes ``per_save`` of the ``experts`` experts of each layer, in turns, with what an optimizer has for them. Of the others it
    keeps the bytes that an earlier save wrote, **although they have changed since**: such a checkpoint is not what the job had at any
    moment (docs/guides/smaller-saves.md).

    ``names``: a glob of their tensors with ``*`` and ``?``, in which ``{expert}`` stands for the number of the expert in its layer,
    counted from 0. The layer is the last number before it. After ``period`` saves every expert was written.

    ``stacked``: a glob of tensors that have all experts of a layer, ``[experts, …]``, and that ``names`` does not match; None: there are
    none. A save writes the rows of its experts. The layer is the last number in what the first ``*`` stands for. A single number, such as
    an optimizer's step, is written by every save.

    ``whole_every``: every so many saves one writes everything and refers to nothing, so that older ones can be removed; by default
    ``2 * period``. So do the first save of a process, and the one after a save that failed.
    """

    experts: int
    per_save: int
    names: str = f"*.experts.{EXPERT}.*"
    whole_every: int | None = None
    stacked: str | None = "*.experts.*"

    def __post_init__(self) -> None:
        numbers = {"experts": self.experts, "per_save": self.per_save}
        numbers |= {"whole_every": self.whole_every} if self.whole_every is not None else {}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise UsageError(f"PartialExperts({name}=) is a number, at least 1, not {number!r}", hint=_EXAMPLE)
        if self.per_save > self.experts:
            raise UsageError(f"a save cannot write {self.per_save} of {self.experts} experts", hint=_EXAMPLE)
        if not isinstance(self.names, str) or self.names.count(EXPERT) != 1:
            hint = f"stacked={self.names!r} is for tensors that have all experts of a layer" if isinstance(self.names, str) else _EXAMPLE
            raise UsageError(f"PartialExperts(names=) is a glob with one {EXPERT}, not {self.names!r}", hint=hint)
        if self.stacked is not None and (not isinstance(self.stacked, str) or EXPERT in self.stacked):
            raise UsageError(f"PartialExperts(stacked=) is a glob without {EXPERT}, or None, not {self.stacked!r}", hint=_EXAMPLE)

    @property
    def period(self) -> int:
        """So many saves write every expert once."""
        return -(-self.experts // self.per_save)

    def is_whole(self, since: int) -> bool:
        """Whether a save writes everything that comes ``since`` saves after one that did."""
        return since >= (2 * self.period if self.whole_every is None else self.whole_every)

    def place(self, name: str) -> tuple[int, int] | None:
        """Layer and number of the expert that a tensor belongs to; None if it belongs to none.

        Raises:
            UsageError: the number is not below ``experts``.
        """
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        number = int(match["expert"])
        if number >= self.experts:
            raise UsageError(f"tensor {name} is of expert {number}, and PartialExperts(experts={self.experts})", hint="give all of a layer")
        return _layer(match["before"]), number

    def stack(self, name: str, shape: Sequence[int]) -> int | None:
        """The layer whose experts are the rows of a tensor; None if it is not made of experts, or of a single number.

        Raises:
            UsageError: its name says that it is, and its shape is another one.
        """
        match = self._stacked_pattern.fullmatch(name) if self._stacked_pattern is not None else None
        if match is None or math.prod(shape) == 1:
            return None
        if not shape or shape[0] != self.experts:
            raise UsageError(
                f"tensor {name} of shape {list(shape)} is one of PartialExperts(stacked={self.stacked!r}), and its rows are not the "
                f"{self.experts} experts of a layer",
                hint="experts= is how many a layer has; every save writes what neither names= nor stacked= matches",
            )
        return _layer(match["before"] or "")

    def is_written(self, place: tuple[int, int], turn: int) -> bool:
        """Whether a save writes an expert; ``turn`` counts the saves between it and one that wrote all."""
        # Every ``period``-th expert: neighbours, which are on one rank, are written in different saves. Layers are shifted against each
        # other, so that with one expert on a rank the ranks share each save's work.
        layer, number = place
        return (number + layer) % self.period == turn % self.period

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        before, after = self.names.split(EXPERT)
        return re.compile(f"(?P<before>{_regex(before)})(?P<expert>[0-9]+){_regex(after)}", re.DOTALL)

    @cached_property
    def _stacked_pattern(self) -> re.Pattern[str] | None:
        if self.stacked is None:
            return None
        before, star, after = self.stacked.partition("*")
        return re.compile(f"{_regex(before)}(?P<before>{_regex(star)}){_regex(after)}", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class StaleExperts:
    """Experts that a save does not write. ``names``: tensors of one of them; ``rows``: of each tensor that has all experts of a layer, the
    rows of those, perhaps none. ``has_experts``: whether the state has tensors of experts."""

    names: frozenset[str] = frozenset()
    rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    has_experts: bool = False

    def __bool__(self) -> bool:
        return bool(self.names) or any(self.rows.values())

    def covers(self, name: str, offset: Sequence[int]) -> bool:
        """Whether the save does not write a chunk, which begins at ``offset`` of its tensor."""
        return name in self.names or (name in self.rows and offset[0] in self.rows[name])


NO_EXPERTS = StaleExperts()


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """Which experts one save writes. ``turn``: how many saves lie between it and the last one that wrote all; None: it writes all."""

    experts: PartialExperts
    turn: int | None = None

    def text(self) -> str:
        """As ranks compare it."""
        return f"{self.experts} turn={self.turn}"

    def stale(self, shapes: Mapping[str, Sequence[int]]) -> StaleExperts:
        """What the save does not write of tensors with these global shapes.

        Raises:
            UsageError: a tensor is not made of experts, as its name says.
        """
        names, rows, has_experts = set[str](), dict[str, frozenset[int]](), False
        for name, shape in shapes.items():
            place = self.experts.place(name)
            layer = self.experts.stack(name, shape) if place is None else None
            if layer is not None:
                rows[name] = self._rows(layer)
            elif place is not None and self._is_stale(place):
                names.add(name)
            has_experts = has_experts or place is not None or layer is not None
        return StaleExperts(names=frozenset(names), rows=rows, has_experts=has_experts)

    def _rows(self, layer: int) -> frozenset[int]:
        return frozenset(number for number in range(self.experts.experts) if self._is_stale((layer, number)))

    def _is_stale(self, place: tuple[int, int]) -> bool:
        return self.turn is not None and not self.experts.is_written(place, self.turn)


_EXAMPLE = 'PartialExperts(names="*.experts.{expert}.*", experts=64, per_save=8)'


def _layer(before: str) -> int:
    """The last number of a name's beginning."""
    numbers = _NUMBER.findall(before)
    return int(numbers[-1]) if numbers else 0


def _regex(glob: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in glob)
