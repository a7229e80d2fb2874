"""ckpt inside of other libraries' training loops. Each module needs the library that it is for; none is imported by ``import ckpt``.

``from ckpt.integrations import name`` also finds integrations of other distributions: entry points of the group ``ckpt.integrations``.
"""

from __future__ import annotations

from pkgutil import iter_modules
from typing import Any

from ckpt.needs import plugin

OWN = frozenset(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    given = None if name in OWN or name.startswith("_") else plugin("ckpt.integrations", name, object)
    if given is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return given
