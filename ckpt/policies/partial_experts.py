"""Which experts of a mixture-of-experts model a save writes: some of each layer, in turns (MoC-System, arXiv 2408.04307)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
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

    ``whole_every``: every so many saves one writes everything and refers to nothing, so that older ones can be removed; by default
    ``2 * period``. So do the first save of a process, and the one after a save that failed.
    """

    experts: int
    per_save: int
    names: str = f"*.experts.{EXPERT}.*"
    whole_every: int | None = None

    def __post_init__(self) -> None:
        numbers = {"experts": self.experts, "per_save": self.per_save}
        numbers |= {"whole_every": self.whole_every} if self.whole_every is not None else {}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise UsageError(f"PartialExperts({name}=) is a number, at least 1, not {number!r}", hint=_EXAMPLE)
        if self.per_save > self.experts:
            raise UsageError(f"a save cannot write {self.per_save} of {self.experts} experts", hint=_EXAMPLE)
        if not isinstance(self.names, str) or self.names.count(EXPERT) != 1:
            raise UsageError(f"PartialExperts(names=) is a glob with one {EXPERT}, not {self.names!r}", hint=_EXAMPLE)

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
        layers = _NUMBER.findall(match["before"])
        number = int(match["expert"])
        if number >= self.experts:
            raise UsageError(f"tensor {name} is of expert {number}, and PartialExperts(experts={self.experts})", hint="give all of a layer")
        return int(layers[-1]) if layers else 0, number

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


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """Which experts one save writes. ``turn``: how many saves lie between it and the last one that wrote all; None: it writes all."""

    experts: PartialExperts
    turn: int | None = None

    def text(self) -> str:
        """As ranks compare it."""
        return f"{self.experts} turn={self.turn}"

    def matches(self, names: Collection[str]) -> bool:
        """Whether any of these tensors is an expert's."""
        return any(self.experts.place(name) is not None for name in names)

    def stale(self, names: Collection[str]) -> frozenset[str]:
        """Which of these tensors the save does not write."""
        if self.turn is None:
            return frozenset()
        places = ((name, self.experts.place(name)) for name in names)
        return frozenset(name for name, place in places if place is not None and not self.experts.is_written(place, self.turn))


_EXAMPLE = 'PartialExperts(names="*.experts.{expert}.*", experts=64, per_save=8)'


def _regex(glob: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in glob)
