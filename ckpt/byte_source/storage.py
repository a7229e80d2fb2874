"""Objects of a storage as a source of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.catalog import Catalog
from ckpt.io_backends.protocol import Backend, IOHints

from .port import ByteSource, Update


@dataclass(frozen=True, slots=True)
class StorageSource:
    """See ``ByteSource``; ``backend`` has the objects."""

    backend: Backend

    @property
    def url(self) -> str:
        return self.backend.url

    @property
    def io_hints(self) -> IOHints:
        return self.backend.io_hints

    def read_into(self, path: str, offset: int, buffer: memoryview, update: Update | None = None) -> None:
        """See ``ByteSource.read_into``."""
        if update is None:
            self.backend.read_into(path, offset, buffer)
        else:
            self.backend.read_hashed(path, offset, buffer, update)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """See ``ByteSource.evict``."""
        self.backend.evict(path, offset, length)


def source_of(catalog: Catalog) -> ByteSource:
    """Where the extents of a stored checkpoint lie."""
    return StorageSource(catalog.backend)
