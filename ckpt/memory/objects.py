"""What the daemon says of an object, and where its files are. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt.transport.members import is_count, is_seconds

ROW = (str, is_count, lambda unused: True, str, is_seconds)
"""What :meth:`MemoryObject.row` gives (``ckpt.transport.members``)."""


@dataclass(frozen=True, slots=True, order=True)
class MemoryObject:
    """An object in the memory of a machine."""

    path: str
    size: int
    """Bytes."""
    version: str
    """Another one for each object that was ever put."""
    modified: float
    """When it was put: seconds since 1970 by the machine's clock."""

    def row(self) -> list[Any]:
        # The third was a digest. It keeps its place, so that daemons and clients that still have one understand these rows.
        return [self.path, self.size, None, self.version, self.modified]

    @classmethod
    def of(cls, row: Any) -> MemoryObject:
        path, size, _, version, modified = row
        return cls(str(path), int(size), str(version), float(modified))
