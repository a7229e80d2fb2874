"""What the daemon says of an object, and where its files are. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class MemoryObject:
    """An object in the memory of a machine."""

    path: str
    size: int
    """Bytes."""
    digest: str | None
    """XXH3-128 of all its bytes, in hex, if somebody gave or asked for it."""
    version: str
    """Another one for each object that was ever put."""
    modified: float
    """When it was put: seconds since 1970 by the machine's clock."""

    def row(self) -> list[Any]:
        return [self.path, self.size, self.digest, self.version, self.modified]

    @classmethod
    def of(cls, row: Any) -> MemoryObject:
        path, size, digest, version, modified = row
        return cls(str(path), int(size), None if digest is None else str(digest), str(version), float(modified))
