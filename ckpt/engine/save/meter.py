"""How far one rank is with one save, in bytes of its tensors."""

from __future__ import annotations

import socket
import threading

from ckpt.tracing.progress import BEGIN, CAPTURE, WRITE, RankSign, printable_host


class SaveMeter:
    """Counts bytes. Threads of the save add to it; ``ckpt watch``, a handle and a progress callback read it.

    It refers to nothing of the save, so whoever reads it does not keep the state's memory.
    """

    def __init__(self) -> None:
        self.phase = BEGIN
        self.total = 0
        """Bytes of this rank's chunks, as they are in memory."""
        self.staged = False
        """Whether they are captured before they are written."""
        self.captured = 0
        self.written = 0
        self.saved = 0
        """Bytes that a codec has made unnecessary to write."""
        self.host = printable_host(socket.gethostname())
        self._lock = threading.Lock()

    def add(self, *, captured: int = 0, written: int = 0, saved: int = 0) -> None:
        """So many bytes more."""
        with self._lock:
            self.captured += captured
            self.written += written
            self.saved += saved

    @property
    def done(self) -> int:
        """Bytes of the state that need no more work of this rank's writers."""
        return min(self.written + self.saved, self.total)

    def sign(self, count: int) -> RankSign:
        """What this rank says of itself in its sign number ``count``."""
        phase, done = self.phase, self.done if self.phase != BEGIN else 0
        if phase >= WRITE and not done and self.staged and self.captured < self.total:
            phase, done = CAPTURE, self.captured
        return RankSign(count=count, phase=phase, done=done, total=self.total, host=self.host)
