"""Imports that wait until somebody asks: public names of a package, and what other distributions bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def attribute(reference: str) -> Any:
    """What ``module:name`` means."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def late_names(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names are imported when they are asked for: ``where`` has the module of each, relative
    (``.registry``) or absolute, and after a colon its name there, if that is another one. ``.name:`` is the module itself."""

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, colon, other = where[name].partition(":")
        imported = import_module(module, package)
        return imported if colon and not other else getattr(imported, other or name)

    return get


def entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of installed distributions in this group, by name."""
    from importlib import metadata  # slow to import, and seldom needed

    return {point.name: point for point in sorted(metadata.entry_points(group=group), key=lambda point: point.name)}
