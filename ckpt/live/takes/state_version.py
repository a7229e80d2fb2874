"""Which version the state of a sink is."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.live.pieces.dense import FIRST, NOT_KEPT, TORN
from ckpt.live.versions import Version


@dataclass(eq=False)
class StateVersion:
    """``version``: the last one that was taken, None before the first. ``torn`` says that the state is none, and why: a take that changes
    it goes on, or broke off."""

    version: Version | None = None
    torn: str | None = None
    _name: str | None = None
    _shows_changes: bool = False

    @property
    def base(self) -> str | None:
        """How holders call the version that the state is; None if it is none,"""
        return self._name if self.torn is None else None

    @property
    def no_base(self) -> str:
        """and why then."""
        return FIRST if self.version is None and self.torn is None else TORN

    @property
    def delta_base(self) -> str | None:
        """``base``, where the source can tell what changed since."""
        return self.base if self._shows_changes else None

    def mixed_with(self, version: Version) -> str:
        """What a state is that is on the way to a version."""
        was = "what was there before" if self.version is None or self.torn is not None else str(self.version)
        return f"the state is a mix of {was} and {version}, as a take broke off"

    def become(self, version: Version, name: str, why_whole: str | None) -> None:
        """All of a version is in the state of this rank; others may still be on the way. ``name`` is that of its manifest, ``why_whole``
        as of ``PlannedTake``."""
        self.version, self._name = version, name
        self._shows_changes = why_whole in (None, FIRST, TORN, NOT_KEPT)
