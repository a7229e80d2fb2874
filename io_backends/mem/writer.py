"""A new object in the memory of this machine. Its bytes are put where they stay; those that lie there already are only counted."""

from __future__ import annotations

import numpy as np

from ckpt.io_backends.writer_base import WriterBase
from ckpt.memory.loan import Loan


class MemWriter(WriterBase):
    """An object of the daemon while it is filled."""

    def __init__(self, loan: Loan, path: str) -> None:
        super().__init__(where=f"mem://{path}", size=loan.size)
        self._loan = loan
        self._path = path
        self._data = loan.data
        self._address = int(self._data.ctypes.data)

    def _put(self, offset: int, views: list[memoryview]) -> None:
        for view in views:
            source = np.frombuffer(view, dtype=np.uint8)
            if source.ctypes.data != self._address + offset:  # else whoever writes has put it here himself
                self._loan.open(offset, view.nbytes)
                self._data[offset : offset + view.nbytes] = source
            offset += view.nbytes

    def _make_durable(self) -> None:
        self._loan.put(self._path)

    def _discard(self, *, tried: bool) -> None:
        """Nothing has its name."""

    def _close(self) -> None:
        self._loan.close()
