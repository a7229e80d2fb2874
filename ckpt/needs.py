"""Imports that wait until somebody asks: public names of a package, what other distributions bring, and libraries that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Around the import of a library that only one integration needs."""
    try:
        yield
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] != library:
            raise
        raise ImportError(f"this module needs {library}: pip install 'ckpt-toolkit[{extra}]'", name=library) from err


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
