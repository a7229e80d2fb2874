"""What the storages behind checkpoints that are only read have in common. No torch."""

from __future__ import annotations

from typing import NoReturn

from ckpt.errors import AccessError
from ckpt.io_backends.protocol import Backend, Writer


class ReadOnly(Backend):
    """A storage that refuses every change; ``why`` says what it is."""

    why: str

    def create(self, path: str, size: int) -> Writer:
        """Refused."""
        self._refuse(path)

    def publish(self, path: str, data: bytes, *, replaces: bytes | None) -> None:
        """Refused."""
        self._refuse(path)

    def delete(self, path: str) -> None:
        """Refused."""
        self._refuse(path)

    def prepare(self) -> None:
        """Refused."""
        self._refuse("")

    def _refuse(self, path: str) -> NoReturn:
        raise AccessError(f"{self.why}: {path}", where=self.url, hint="write to a URL of its own")
