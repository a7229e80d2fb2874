"""Arguments that are True or False. Text such as "no" would otherwise count as True."""

from __future__ import annotations

from ckpt.errors import UsageError


def check_flags(**given: object) -> None:
    """
    Raises:
        UsageError: one is neither True nor False.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}= is True or False, not {value!r}")
