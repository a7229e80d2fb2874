"""A pickle machine that builds data and stand-ins only (the opcodes are those of Python's ``pickletools``, protocols 0 to 5).

Invariants: nothing that the pickle names is imported, looked up or called; memory and time grow with the length of the pickle, and with
nothing that it claims; whatever the bytes are, the outcome is a value, a CorruptError or a FormatError.

The value is made of None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, ``Global``, ``Persistent`` and
``Made``. It may contain itself, and be nested to any depth: whoever walks it has to count.
"""

from __future__ import annotations

import codecs
import pickle
import struct
from typing import Any, NoReturn

from ckpt.errors import CkptError, CorruptError, FormatError

from .opcodes import HANDLERS
from .stand_ins import Global, Keys

MAX_PICKLE = 1 << 30
"""Bytes of a pickle that is read: building its objects takes up to some hundred times as much memory."""
MAX_NAME = 512
"""Characters of a module's or a class's name."""


def load_pickle(data: bytes, where: str) -> Any:
    """The value of a pickle, with stand-ins for all that is not plain data.

    Raises:
        CorruptError: these bytes are no pickle, or one that no pickler writes.
        FormatError: a pickle that needs more than itself: extension codes, buffers kept apart, a newer protocol; or one that is too long.
    """
    if len(data) > MAX_PICKLE:
        raise FormatError(f"a pickle of {len(data):,} bytes is longer than the {MAX_PICKLE:,} that are read", where=where)
    machine = Machine(data, where)
    try:
        return machine.run()
    except CkptError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as err:
        machine.fail(f"{type(err).__name__}: {err}", err)


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
        self._globals: dict[tuple[str, str], Global] = {}

    def run(self) -> Any:
        """Everything up to STOP. What comes after it is not looked at."""
        data, handlers, memo, at = self.data, HANDLERS, self.memo, 0
        while not self.done:
            op = data[at]
            if op == _BINGET:  # the most common opcodes by far: half of those of DCP's metadata
                self.stack.append(memo[data[at + 1]])
                at += 2
            elif op == _LONG_BINGET and at + 5 <= len(data):
                self.stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif op == _MEMOIZE:
                memo[len(memo)] = self.stack[-1]
                at += 1
            else:
                self.at = at + 1
                handler = handlers.get(op)
                if handler is None:
                    self.fail(f"no opcode has the number {op}")
                handler(self)
                at = self.at
        if len(self.stack) != 1 or self.marks:
            self.fail("it ends with more or less than one value")
        return self.stack[0]

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
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, length: int) -> int:
        """The next bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(length), "little")

    def line(self) -> bytes:
        """The bytes up to the end of the line, which is skipped."""
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end]
        self.at = end + 1
        return found

    def text_line(self) -> str:
        return codecs.decode(self.line(), "utf-8")

    def items(self) -> list[Any]:
        """All that was pushed since the last mark, which goes."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def found_global(self, module: object, name: object) -> Global:
        """The stand-in for a name."""
        if type(module) is not str or type(name) is not str or not 0 < len(name) <= MAX_NAME or len(module) > MAX_NAME:
            self.fail("the name of a class or function is no name")
        found = self._globals.get((module, name))
        if found is None:
            if not (module + name).isprintable():
                self.fail("the name of a class or function cannot be printed")
            found = self._globals[module, name] = Global(_MODULES.get(module, module), name)
        return found


_BINGET, _LONG_BINGET, _MEMOIZE = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.MEMOIZE[0]
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Python 2 names of modules."""
