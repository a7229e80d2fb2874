"""What requests send: memory, piece by piece. No requests.

The standard library gives a socket one time-out for all that it is handed at once. Handed a whole part, that would end every upload over a
slow line, however steadily it goes on; so a body is handed over in pieces, each with a time-out of its own.
"""

from __future__ import annotations

from collections.abc import Callable

PIECE = 256 << 10
"""Bytes that have to be taken by the network before a time-out is over."""


class Body:
    """A file of these bytes for one try, as botocore takes it: it is never copied. ``sent`` is told how many bytes were taken out of it,
    which are more than there are if they are hashed before they are sent."""

    def __init__(self, data: memoryview | bytes, sent: Callable[[int], None]) -> None:
        self._view = memoryview(data)
        self._at = 0
        self._taken = 0
        self._sent = sent

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, size: int = -1) -> memoryview | bytes:
        """The next piece; its length does not depend on ``size``: who sends asks for 16 KiB at a time, a call of the system for each."""
        del size
        piece = self._view[self._at : self._at + PIECE]
        self._at += piece.nbytes
        self._taken += piece.nbytes
        self._sent(self._taken)
        return piece if piece.nbytes else b""

    def seek(self, offset: int, whence: int = 0) -> int:
        """As for files."""
        self._at = offset + (0, self._at, self._view.nbytes)[whence]
        return self._at

    def tell(self) -> int:
        """As for files."""
        return self._at

    def getbuffer(self) -> memoryview:
        """All bytes."""
        return self._view
