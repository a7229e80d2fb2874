"""ckpt inside of other libraries' training loops. Each module needs the library that it is for; none is imported by ``import ckpt``.

``from ckpt.integrations import name`` also finds integrations of other distributions: entry points of the group ``ckpt.integrations``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pkgutil import iter_modules
from typing import Any

from ckpt.errors import UsageError
from ckpt.needs import plugin

OWN = frozenset(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    given = None if name in OWN or name.startswith("_") else plugin("ckpt.integrations", name, object)
    if given is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return given


def replace_methods(of: Any, adapter: Any, names: Sequence[str]) -> dict[str, Any]:
    """Have methods of a library's object be those of ``adapter``, which have no underscore in front. Gives the object's own, which an
    earlier adapter of the kind has in ``_own``."""
    own = {name: getattr(of, name) for name in names}
    for name in names:
        before: Any = getattr(own[name], "__self__", None)
        own[name] = before._own[name] if type(before) is type(adapter) else own[name]
        setattr(of, name, getattr(adapter, name.removeprefix("_")))
    return own


def refuse(integration: str, problems: Mapping[str, object]) -> None:
    """Raise UsageError with the first of ``problems`` that there is."""
    for what, is_so in problems.items():
        if is_so:
            raise UsageError(f"ckpt.integrations.{integration} does not go with {what}")


def refuse_arguments(given: Iterable[str]) -> None:
    """Raise UsageError for the first argument of a library's method that a save or load of ckpt does not have."""
    for name in given:
        raise UsageError(f"the argument {name!r} is not one of this method", hint="give options of ckpt to use()")
