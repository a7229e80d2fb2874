"""An object that several processes send parts of: one upload, whose id is the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckpt.concurrency.workers import run_tasks
from ckpt.errors import UsageError
from ckpt.io_backends.shared import check_total

from .checksums import Checks, ConfirmedPart
from .client import LANES
from .probing import part_checks_of
from .reading import Key
from .requests import check_free
from .writer import S3Writer


class S3SharedObject(S3Writer):
    """See ``SharedObject``. ``token`` is None in the process that begins it."""

    def __init__(self, key: Key, size: int, part: int, *, conditional: bool, token: str | None) -> None:
        super().__init__(key, size, part, conditional=conditional, single=False)
        self.part_size = part
        self._began = token is None
        if token is None:
            self._id = self._started()
        else:
            self._id = self._join(token)

    def _join(self, token: str) -> str:
        """Which checksums the parts have was said when the upload began; if it was CRC-32, all of them need it."""
        way, self._mark, self._upload = token.split(" ", 2)
        self._checks = Checks(way="crc32") if way == "crc32" else part_checks_of(self._key)
        return self._upload

    @property
    def token(self) -> str:
        """With it other processes join."""
        return f"{self._checks.way} {self._mark} {self._id}"

    def _put(self, offset: int, views: list[memoryview]) -> None:
        length = sum(view.nbytes for view in views)
        if offset % self._part or (length % self._part and offset + length != self._size) or len(views) != 1:
            raise UsageError(f"these are no whole parts of {self._part} bytes: {length} at {offset}", where=self._key.where)
        run_tasks([partial(self._send_whole, p) for p in self._places(offset, views)], LANES, "ckpt-s3-write")

    def flush(self) -> dict[str, str]:
        """See ``SharedObject.flush``: the parts that this process sent, by number from 0."""
        return {str(number): part.text for number, part in self._parts.items()}

    def complete(self, receipts: Sequence[Mapping[str, str]], *, replace: bool) -> None:
        """See ``SharedObject.complete``."""
        parts = {int(number): ConfirmedPart.of_text(text) for receipt in receipts for number, text in receipt.items()}
        check_total(sum(self._length(number) for number in parts), self._size, self._key.where)
        if sum(len(receipt) for receipt in receipts) != len(parts):
            raise UsageError("two processes sent the same part", where=self._key.where)
        self._parts = parts
        if replace:
            self._condition = {}
        else:
            check_free(self._key)  # some stores know no conditions for uploads: then this question has to do
        self._state = "failed"  # until it did not
        try:
            self._complete()
        finally:
            self._perhaps_there = self._perhaps_there and not replace  # what is there may be what was there before
        self._state = "committed"

    def abort(self) -> None:
        """See ``SharedObject.abort``."""
        if self._began:
            super().abort()
        else:
            self.close()

    def close(self) -> None:
        """See ``SharedObject.close``."""
        if self._state == "open":
            self._state = "aborted"
