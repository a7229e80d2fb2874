"""One thing that a killed process left behind, as ``orphans`` finds and removes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt.formats.conversion import record_path
from ckpt.io_backends.protocol import ObjectMeta, PendingUpload

Age = Callable[[Iterable[ObjectMeta], str | None], tuple[bool, str]]
"""Whether files, and those of a save of this id, were left alone for long enough, and how to say it."""

Kind = Literal["save", "temporary", "upload", "conversion", "export"]


class Place(NamedTuple):
    """A destination: a directory relative to the root, or empty, and the name of the only file if it is one."""

    directory: str
    name: str | None = None

    def path(self, inner: str) -> str:
        """A path below the directory, from the root."""
        return f"{self.directory}/{inner}".lstrip("/")

    @property
    def record(self) -> str:
        """Where a conversion or an export says what it writes here."""
        return self.path(record_path(self.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphan:
    """What one killed save, copy, conversion or export left at ``place``; or a ``temporary`` file, or a pending ``upload``.

    ``stages`` are removed one after another, so that nobody can open what is left wherever a removal is stopped. ``id`` is that of the
    save or conversion. ``ended``: a conversion whose checkpoint is there, and stays; only its record and marks are left.
    """

    what: Kind
    place: Place
    id: str | None = None
    stages: tuple[tuple[ObjectMeta, ...], ...] = ()
    upload: PendingUpload | None = None
    removable: bool
    reason: str
    ended: bool = False

    @property
    def entries(self) -> tuple[ObjectMeta, ...]:
        return tuple(e for stage in self.stages for e in stage)

    @property
    def path(self) -> str:
        """The directory of a save, the file or the object; empty for the root itself."""
        if self.place.name is not None:
            return self.place.path(self.place.name)
        return self.upload.path if self.upload else self.entries[0].path if self.what == "temporary" else self.place.directory

    @property
    def bytes(self) -> int:
        return sum(e.size for e in self.entries)
