"""A pickle machine that builds data and stand-ins only (the opcodes are those of Python's ``pickletools``, protocols 0 to 5).

Invariants: nothing that the pickle names is imported, looked up or called; memory and time grow with the length of the pickle, and with
nothing that it claims; whatever the bytes are, the outcome is a value, a CorruptError or a FormatError.

The value is made of None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, ``Global``, ``Persistent`` and
``Made``. It may contain itself, and be nested to any depth: whoever walks it has to count.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from ckpt.errors import CkptError, FormatError

from .machine import Machine
from .opcodes import HANDLERS

MAX_PICKLE = 1 << 30
"""Bytes of a pickle that is read: building its objects takes up to some hundred times as much memory."""
_BINGET, _LONG_BINGET, _MEMOIZE = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.MEMOIZE[0]


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
        return _run(machine)
    except CkptError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as err:
        machine.fail(f"{type(err).__name__}: {err}", err)


def _run(machine: Machine) -> Any:
    """Everything up to STOP. What comes after it is not looked at."""
    data, handlers, memo, at = machine.data, HANDLERS, machine.memo, 0
    while not machine.done:
        op = data[at]
        if op == _BINGET:  # the most common opcodes by far: half of those of DCP's metadata
            machine.stack.append(memo[data[at + 1]])
            at += 2
        elif op == _LONG_BINGET and at + 5 <= len(data):
            machine.stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
            at += 5
        elif op == _MEMOIZE:
            memo[len(memo)] = machine.stack[-1]
            at += 1
        else:
            machine.at = at + 1
            handler = handlers.get(op)
            if handler is None:
                machine.fail(f"no opcode has the number {op}")
            handler(machine)
            at = machine.at
    if len(machine.stack) != 1 or machine.marks:
        machine.fail("it ends with more or less than one value")
    return machine.stack[0]
