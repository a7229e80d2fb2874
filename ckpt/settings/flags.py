"""Arguments that are True or False. Text such as "no" would otherwise count as True."""

from __future__ import annotations

from ckpt.errors import UsageError


def check_flags(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}= is True or False, not {value!r}")
