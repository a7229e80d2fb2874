"""What matching says of a checkpoint and a state, in the words of whoever called: a version and a state, or an old and a new state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import CkptError

_INSPECT = "`ckpt inspect` shows what is stored; "


@contextmanager
def worded(*, stored: str, state: str = "the state", layout: str = "layout=") -> Iterator[None]:
    """Errors name what is taken from as ``stored``, and what it goes into as ``state``; hints name the argument ``layout``.

    Matching is that of a load, with some twenty messages. To hand two nouns down to all of them would be more than to name the things
    once, where it is known what they are.
    """
    try:
        yield
    except CkptError as err:
        err.message = _worded(err.message, stored, state, layout)
        err.hint = None if err.hint is None else _worded(err.hint, stored, state, layout)
        raise


def _worded(text: str, stored: str, state: str, layout: str) -> str:
    text = re.sub(r"\bthe checkpoint\b", stored, text.replace(_INSPECT, ""))
    return re.sub(r"(?<![\w.])layout=", layout, re.sub(r"\bthe state\b", state, text))
