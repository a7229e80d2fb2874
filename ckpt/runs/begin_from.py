"""Where a run begins that has no checkpoint of its own yet: a checkpoint of DCP, Megatron, DeepSpeed or of another run; and what a restore
says of where the state came from."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ckpt import units
from ckpt.errors import UsageError
from ckpt.formats.native.paths import step_number
from ckpt.formats.registry import open_catalog
from ckpt.plan import tree
from ckpt.settings import sources as checked_sources
from ckpt.text import url_text

from .save_schedule import check_step

_COUNTERS = ("step", "global_step", "global_steps", "iteration")
"""Names by which training loops keep the number of their steps in the state."""


@dataclass(frozen=True, slots=True)
class BeginFrom:
    """A checkpoint to begin a run from, for :meth:`ckpt.Checkpointer.restore`. Any format that ``ckpt.load`` reads.

    Args:
        url: path or URL of the checkpoint.
        step: the training step that it was saved after. By default the number at the end of its path (``step-7``, ``iter_0001000``,
            ``global_step3``, ``checkpoint-500``, ``500``), or else a whole number that its state has as ``step``, ``global_step``,
            ``global_steps`` or ``iteration``.
        only, rename, strict, cast, sources: as for :func:`ckpt.load`, for this checkpoint alone. What is not given is as
            ``restore`` was given it.
    """

    url: str | os.PathLike[str]
    step: int | None = None
    only: str | Sequence[str] | None = None
    rename: Mapping[str, str] | None = None
    strict: bool | None = None
    cast: bool | None = None
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | BeginFrom) -> BeginFrom:
        """A URL alone stands for itself with no options.

        Raises:
            UsageError: it is neither, or the step is no whole number.
        """
        origin = given if isinstance(given, BeginFrom) else cls(given)
        if not isinstance(origin.url, str | os.PathLike):
            raise UsageError(f"begin_from= takes a path, a URL or a ckpt.BeginFrom, not {given!r}")
        if origin.step is not None:
            check_step(origin.step)
        return origin

    @property
    def location(self) -> str:
        """The text of ``url``."""
        return url_text(self.url)

    @property
    def load_options(self) -> dict[str, Any]:
        """The options of ``ckpt.load`` that were given."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("url", "step")}
        return {name: value for name, value in values.items() if value is not None}

    def find_step(self) -> int:
        """The step that the checkpoint was saved after.

        Raises:
            UsageError: neither its path nor its state tells.
            NotFoundError, FormatError, CorruptError: there is no checkpoint that can be read.
        """
        if self.step is not None:
            return self.step
        catalog = open_catalog(self.location, sources=checked_sources(self.sources))
        name = catalog.url.rstrip("/").rpartition("/")[2]  # not ours: of a directory above several, the catalog's is the latest of them
        number = step_number(name)
        if number is not None:
            return number
        counted = {key: value for key, value in tree.pairs_of(catalog.state) or () if key in _COUNTERS}
        steps = {value for value in counted.values() if isinstance(value, int) and not isinstance(value, bool) and value >= 0}
        if len(steps) != 1:
            what = f"its state has {counted}" if counted else "neither its path nor its state has a number"
            raise UsageError(
                f"which step this checkpoint was saved after is not clear: {what}",
                where=self.location,
                hint="give the number: restore(state, begin_from=ckpt.BeginFrom(url, step=…))",
            )
        return steps.pop()


# Where the state came from that a job goes on with.


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredFrom:
    """What :meth:`ckpt.Checkpointer.restore` has loaded; ``str`` of it says it in words.

    ``url``: a copy of it that any process can open; None if only this job can, since its files are spread over machines and the step is
    not at the root. ``sources``: the bytes of data files that this rank has read, by where they were: ``memory of this host``,
    ``disk of host b``, ``parity`` (computed from what other machines have), ``root``. Empty without a tier that is spread over machines.
    """

    step: int
    url: str | None
    sources: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        where = self.url if self.url is not None else f"step {self.step}, which only this job can open"
        if not self.sources:
            return where
        return f"{where}: {', '.join(f'{place} {units.size(nbytes)}' for place, nbytes in self.sources.items())}"


def merged_sources(sources: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of several tiers, the nearest first, by place; what was computed from parity and the root last."""
    merged: Counter[str] = Counter()
    for places in sources:
        merged.update(places)
    last = {place: merged.pop(place) for place in ("parity", "root") if place in merged}
    return {**merged, **last}
