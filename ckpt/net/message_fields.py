"""Whether a message from elsewhere has the members that it must have, each of its kind. What comes later need not look again.

A kind is a class (``int`` takes no bool), ``None``, or a function that says whether a value is right;
``[kind]`` a list of any length, ``(kind, kind)`` a list of just these, ``{"name": kind}`` a mapping that has at least these members, and
``{str: kind}`` one of any names; ``Either(kind, kind)`` one of several.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import Any

from ckpt.errors import FormatError

Kind = Any


class Either(tuple[Kind, ...]):
    """One of these kinds."""

    __slots__ = ()

    def __new__(cls, *kinds: Kind) -> Either:
        return super().__new__(cls, kinds)


class WrongMemberError(ValueError):
    """What is wrong; :func:`checked` makes an error of it that says where it came from."""


def checked(message: Any, kind: Kind, what: str, where: str, hint: str = "use the same release of ckpt at both ends") -> Any:
    """The message, which is of this kind; ``what`` it should be."""
    try:
        check(message, kind)
    except WrongMemberError as err:
        raise FormatError(f"what came is no {what}: {err}", where=where, hint=hint) from None
    return message


def check(value: Any, kind: Kind, at: str = "it") -> None:
    """Raise WrongMemberError unless ``value``, which stands ``at``, is of this kind."""
    if isinstance(kind, Either):
        right = any(_is(value, each) for each in kind)
    elif isinstance(kind, tuple | list):
        right = isinstance(value, list | tuple) and (isinstance(kind, list) or len(value) == len(kind))
        for n, each in enumerate(value if right else ()):
            check(each, kind[0] if isinstance(kind, list) else kind[n], f"{at}[{n}]")
    elif isinstance(kind, Mapping):
        right = isinstance(value, Mapping)
        _check_members(value if right else {}, kind if right else {}, at)
    elif isinstance(kind, type):
        right = type(value) is kind
    else:
        right = value is None if kind is None else kind(value)
    if not right:
        raise WrongMemberError(f"{at} is {value!r:.80}")


def _is(value: Any, kind: Kind) -> bool:
    try:
        check(value, kind)
    except WrongMemberError:
        return False
    return True


def _check_members(value: Mapping[Any, Any], kinds: Mapping[Any, Kind], at: str) -> None:
    for name, kind in kinds.items():
        if name is str:
            for each, member in value.items():
                check(member, kind, f"{at}.{each!s:.40}")
        elif name not in value:
            raise WrongMemberError(f"{at} has no {name!r}")
        else:
            check(value[name], kind, f"{at}.{name}")


def is_count(value: object) -> bool:
    """A number from 0 on."""
    return type(value) is int and value >= 0


def is_seconds(value: object) -> bool:
    """A number, not the NaN or infinity that JSON of Python has."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def is_hex(value: object) -> bool:
    """A token or a digest."""
    return isinstance(value, str) and len(value) <= 64 and len(value) % 2 == 0 and all(c in "0123456789abcdef" for c in value)


def is_host(value: object) -> bool:
    """An address of a machine, in numbers."""
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 16


ADDRESSES: Kind = [(is_host, is_port)]
"""Where a process listens."""
