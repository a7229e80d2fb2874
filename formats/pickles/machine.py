"""The state of reading one pickle, and how its bytes are taken: what the handlers in ``opcodes`` change.

Invariants: nothing that the pickle names is imported, looked up or called; memory and time grow with the length of the pickle.
"""

from __future__ import annotations

import codecs
from typing import Any, NoReturn

from ckpt.errors import CorruptError, FormatError

from .stand_ins import GlobalName, Keys

MAX_NAME = 512
"""Characters of a module's or a class's name."""


class Machine:
    """The state of reading one pickle. The handlers in ``opcodes`` change it."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.done = False
        self.keys = Keys()
        self._globals: dict[tuple[str, str], GlobalName] = {}

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise CorruptError(
            f"this is not a pickle that can be read: {what}, at byte {self.at:,}",
            where=self.where,
            hint="the file is damaged, or was made to do harm: get it again from where it was written",
        ) from cause

    def refuse(self, what: str) -> NoReturn:
        raise FormatError(f"the pickle needs {what}", where=self.where, hint="save it again with `torch.save` or protocol 2 of pickle")

    def take(self, length: int) -> bytes:
        """The next bytes."""
        end = self.at + length
        if length < 0 or end > len(self.data):
            self.fail(f"{length:,} bytes are announced and {len(self.data) - self.at:,} are left")
        data = self.data[self.at : end]
        self.at = end
        return data

    def number(self, length: int) -> int:
        """The next bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(length), "little")

    def line(self) -> bytes:
        """The bytes up to the end of the line, which is skipped."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def text_line(self) -> str:
        return codecs.decode(self.line(), "utf-8")

    def items(self) -> list[Any]:
        """All that was pushed since the last mark, which goes."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def global_name(self, module: object, name: object) -> GlobalName:
        """The stand-in for a name."""
        if type(module) is not str or type(name) is not str or not 0 < len(name) <= MAX_NAME or len(module) > MAX_NAME:
            self.fail("the name of a class or function is no name")
        known = self._globals.get((module, name))
        if known is None:
            if not (module + name).isprintable():
                self.fail("the name of a class or function cannot be printed")
            known = self._globals[module, name] = GlobalName(_MODULES.get(module, module), name)
        return known


_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Python 2 names of modules."""
