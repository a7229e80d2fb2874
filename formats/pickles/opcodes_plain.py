"""What the opcodes of a pickle that push plain data do: numbers, text and bytes of a length that the pickle has."""

from __future__ import annotations

import codecs
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from .machine import Machine

MAX_DIGITS = 4300
"""Decimal digits of an integer, as in Python itself: longer ones take quadratic time."""
_MAX_LONG = 1786  # bytes of the largest such integer

Handler = Callable[[Machine], None]


def push(value: Any, m: Machine) -> None:
    """Push a value that the opcode itself is."""
    m.stack.append(value)


def _int_line(m: Machine) -> None:
    text = m.line()
    m.stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else decimal(m, text))


def _long_line(m: Machine) -> None:
    m.stack.append(decimal(m, m.line().removesuffix(b"L")))


def decimal(m: Machine, text: bytes) -> int:
    """A number in digits."""
    if len(text) > MAX_DIGITS:
        m.fail(f"an integer of {len(text):,} digits")
    return int(text)


def _byte(m: Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _two_bytes(m: Machine) -> None:
    m.stack.append(m.data[m.at] | m.data[m.at + 1] << 8)
    m.at += 2


def _binint(m: Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _long(length: int, m: Machine) -> None:
    size = m.number(length)
    if size > _MAX_LONG:
        m.fail(f"an integer of {size:,} bytes")
    m.stack.append(int.from_bytes(m.take(size), "little", signed=True))


def _float_line(m: Machine) -> None:
    m.stack.append(float(m.line()[:MAX_DIGITS]))


def _binfloat(m: Machine) -> None:
    m.stack.append(struct.unpack(">d", m.take(8))[0])


def _string_line(m: Machine) -> None:
    text = m.line().strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        m.fail("a string without quotes")
    m.stack.append(_old_string(codecs.escape_decode(text[1:-1])[0]))


def _old_string(data: bytes) -> str | bytes:
    """A ``str`` of Python 2: text, or bytes if it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _unicode_line(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


def _old_text(length: int, m: Machine) -> None:
    m.stack.append(_old_string(m.take(m.number(length))))


def _text(length: int, m: Machine) -> None:
    m.stack.append(m.take(m.number(length)).decode("utf-8", "surrogatepass"))


def _bytes(length: int, m: Machine) -> None:
    m.stack.append(m.take(m.number(length)))


def _bytearray(m: Machine) -> None:
    m.stack.append(bytearray(m.take(m.number(8))))


PLAIN: dict[int, Handler] = {
    pickle.NONE[0]: partial(push, None),
    pickle.NEWTRUE[0]: partial(push, True),
    pickle.NEWFALSE[0]: partial(push, False),
    pickle.INT[0]: _int_line,
    pickle.LONG[0]: _long_line,
    pickle.BININT[0]: _binint,
    pickle.BININT1[0]: _byte,
    pickle.BININT2[0]: _two_bytes,
    pickle.LONG1[0]: partial(_long, 1),
    pickle.LONG4[0]: partial(_long, 4),
    pickle.FLOAT[0]: _float_line,
    pickle.BINFLOAT[0]: _binfloat,
    pickle.STRING[0]: _string_line,
    pickle.BINSTRING[0]: partial(_old_text, 4),
    pickle.SHORT_BINSTRING[0]: partial(_old_text, 1),
    pickle.UNICODE[0]: _unicode_line,
    pickle.SHORT_BINUNICODE[0]: partial(_text, 1),
    pickle.BINUNICODE[0]: partial(_text, 4),
    pickle.BINUNICODE8[0]: partial(_text, 8),
    pickle.SHORT_BINBYTES[0]: partial(_bytes, 1),
    pickle.BINBYTES[0]: partial(_bytes, 4),
    pickle.BINBYTES8[0]: partial(_bytes, 8),
    pickle.BYTEARRAY8[0]: _bytearray,
}
"""Opcode → what it does."""
