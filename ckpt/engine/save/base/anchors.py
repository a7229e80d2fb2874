"""What chunks of a save are stored as differences from: the same chunks of the base, where these are stored whole (docs/format.md §15).

    chunk to be written ──► the base has name, box, dtype and shape? ──no──► written as without a base
                                 │ yes, and its chunk is no difference itself
                            read it, check its digest ──► XOR, byte planes ──► more than 10 % smaller? ──no──► written as without a base
                                                                                   │ yes
                                                            the difference, and a row for the file that has the anchor

Reads are of the storage and of one chunk a thread: to keep the anchor in memory would take as much memory as the state.
"""

from __future__ import annotations

import logging
import threading

from ckpt.byte_source.chunk import ChunkName
from ckpt.byte_source.digest_reader import DigestReader
from ckpt.catalog import DataFile
from ckpt.engine.save.plan import RankPlan
from ckpt.errors import CkptError
from ckpt.formats.native.datafiles.references import check_not_replaced

from .base_chunks import Base

log = logging.getLogger("ckpt")

SMALLEST = 16 << 10
"""Bytes of the smallest chunk that is worth a read of its anchor: the read of a smaller one takes longer than writing it."""


class AnchorChunks:
    """Reads the anchors of chunks that are to be written. Thread-safe. ``required``: that one cannot be read is an error; else all that
    follows is written without anchors, and the log says why."""

    def __init__(self, base: Base, own_name: str, *, required: bool) -> None:
        """``own_name``: the directory of the save in its run."""
        self._base = base
        self._own_name = own_name
        self._required = required
        self._reader = DigestReader(base.source)
        self._lock = threading.Lock()
        self._usable = True
        if not base.reusable:
            # Whoever removes checkpoints looks for those that refer to them only where the record says so.
            self._give_up("it was saved without reusable=True, so nothing may refer to it")

    def read(self, plan: RankPlan, number: int) -> tuple[memoryview, DataFile] | None:
        """The bytes of a chunk's anchor, in memory that this thread may overwrite until it asks again, and the file that has it; None if it
        has none."""
        spec = plan.specs[number]
        if not self._usable or spec.nbytes < SMALLEST:
            return None
        try:
            anchor = self._base.whole(plan, number)
            if anchor is None:
                return None
            extent, file = anchor
            check_not_replaced([file.path], self._base.name, self._own_name)
            return self._reader.read_decoded(ChunkName(spec.name, spec.box, extent), spec.nbytes, spec.dtype.itemsize), file
        except CkptError as err:
            if self._required:
                raise
            self._give_up(str(err))
            return None

    def _give_up(self, why: str) -> None:
        with self._lock:
            known, self._usable = not self._usable, False
        if not known:
            log.warning("no chunk is stored as its difference from %s: %s", self._base.url, why)
