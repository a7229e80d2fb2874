"""A part of a state: what a save takes of it, and how a load knows that a checkpoint is no whole one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckpt.settings.flags import check_flags
from ckpt.tree import Node

from .match import globs_of_only

LABEL = "ckpt-part"
"""The key of the state's root under which a part says what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """``only``: globs of names, as for a load; ``trainable``: without parameters that do not require a gradient."""

    only: tuple[str, ...] = ()
    trainable: bool = False

    @classmethod
    def of(cls, only: str | Sequence[str] | None, *, trainable: bool) -> StatePart | None:
        """What a caller asks for; None if it is the whole state."""
        check_flags(trainable=trainable)
        globs = globs_of_only(only)
        return cls(only=globs, trainable=trainable) if globs or trainable else None

    def wants(self, path: str) -> bool:
        return not self.only or any(fnmatchcase(path, glob) for glob in self.only)

    def to_node(self) -> Node:
        """As the state of a checkpoint says it."""
        return {"only": list(self.only), "trainable": self.trainable}

    def text(self) -> str:
        """As the arguments of a call."""
        globs = [repr(glob) for glob in self.only]
        only = [f"only={globs[0]}" if len(globs) == 1 else f"only=[{', '.join(globs)}]"] if globs else []
        return ", ".join([*only, *(["trainable=True"] if self.trainable else [])])


def part_in(state: Node) -> StatePart | None:
    """The part that a checkpoint with this state is; None if it is a whole one, or does not say it as we do."""
    label: Any = state.get(LABEL) if isinstance(state, Mapping) else None
    if not isinstance(label, Mapping) or not isinstance(label.get("only"), list):
        return None
    return StatePart(only=tuple(map(str, label["only"])), trainable=label.get("trainable") is True)
