"""Imports that wait until somebody asks: public names of a package, what other distributions bring, and libraries that may be missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from os import listdir
from os.path import dirname
from sys import modules
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import warn

from .concurrency import gc_paused
from .errors import UsageError
from .errors import __all__ as error_names
from .settings import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Around the import of a library that only one integration needs."""
    try:
        yield
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] != library:
            raise
        raise ImportError(f"this module needs {library}: pip install 'ckpt-toolkit[{extra}]'", name=library) from err


def require_torch(what: str) -> None:
    """Raise UsageError unless PyTorch is installed, which ``what`` needs. Does not import it."""
    if find_spec("torch") is None:
        raise UsageError(f"{what} needs PyTorch, which is not installed", hint="pip install torch")


def warn_if_untried(distribution: str, tried: str) -> None:
    """Log a warning if the installed release of a library is none of those, beginning with ``tried``, that ckpt was tried with."""
    from importlib import metadata

    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = "unknown"
    if f"{version}.".startswith(f"{tried}."):
        return
    logging.getLogger("ckpt").warning("ckpt was tried with %s %s; version %s is installed", distribution, tried, version)


def attribute(reference: str) -> Any:
    """What ``module:name`` means."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def late_names(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names are imported when they are asked for: ``where`` has the module of each, relative
    (``.registry``) or absolute, and after a colon its name there, if that is another one. ``.name:`` is the module itself."""

    def get(name: str) -> Any:
        if name not in where:
            hint = f"; it is ckpt.errors.{name}" if name in error_names else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module, colon, other = where[name].partition(":")
        try:
            with gc_paused():  # each collection would walk through all of torch
                imported = import_module(module, package)
        except ModuleNotFoundError as err:
            if (err.name or "").partition(".")[0] == "torch":
                require_torch(f"{package}.{name}")
            raise
        value = imported if colon and not other else getattr(imported, other or name)
        vars(modules[package])[name] = value
        return value

    return get


# What other distributions bring. One rule for all groups: a plug-in is found by its entry point and imported when somebody asks for its
# name, so that a broken one hurts nobody who does not use it.

PLUGINS = {
    "ckpt.storage": ("storage backend", "ckpt.io_backends.registry:OWN"),
    "ckpt.formats": ("format", ""),
    "ckpt.targets": ("target", "ckpt.converters.target:OWN"),
    "ckpt.codecs": ("codec", "ckpt.formats.native.codecs:CODECS"),
    "ckpt.placements": ("placement", "ckpt.plan.layout.placements:SPLITS"),
    "ckpt.integrations": ("integration", "ckpt.integrations:OWN"),
}
"""Group of entry points → what each of its entries is, and where the names of ckpt's own are, which come first."""
_DISTRIBUTION = "ckpt-toolkit"
REINSTALL = f"pip uninstall ckpt {_DISTRIBUTION}, then pip install {_DISTRIBUTION}"
"""Both: the removal of one takes files of the other away."""


def plugin_names(group: str) -> list[str]:
    """What installed distributions have in a group, sorted. Imports none of it."""
    return sorted({point.name for point in _points(group)})


def plugin(group: str, name: str, kind: type[T]) -> T | None:
    """The plug-in of this name, a ``kind``; None if no installed distribution has one."""
    points = [point for point in _points(group) if point.name == name]
    if not points:
        return None
    what, owners = f"the {PLUGINS[group][0]} {name!r}", [_owner(point) for point in points]
    if len(points) > 1:
        raise UsageError(f"several distributions have {what}: {', '.join(sorted(owners))}", hint="uninstall all of them but one")
    point, owner = points[0], owners[0]
    if (wanted := _wanted_version(point)) is not None:
        hint = "install a release of it that was made for this version"
        raise UsageError(f"{what} of {owner} is for {_DISTRIBUTION}{wanted}; this is {__version__}", hint=hint)
    try:
        value = point.load()
    except Exception as err:  # whatever its module does when it is imported
        message = f"{what} of {owner} cannot be imported: {type(err).__name__}: {err}"
        raise UsageError(message, hint=f"uninstall or repair {owner.partition(' ')[0]}") from err
    if not isinstance(value, kind):
        message = f"{what} of {owner} is no {kind.__name__}: {point.value} is a {type(value).__name__}"
        raise UsageError(message, hint=f"CONTRIBUTING.md explains entries of the group {group}")
    return value


def installed_plugins() -> dict[str, list[str]]:
    """Distribution and version → what it adds, and what of it cannot be used since another one has its name. Imports none of it."""
    added: dict[str, list[str]] = {}
    for group, (what, own) in PLUGINS.items():
        points = _points(group)
        taken = [*(attribute(own) if points and own else ()), *(point.name for point in points)]
        for point in points:
            hidden = " (not usable: the name is taken)" if taken.count(point.name) > 1 else ""
            added.setdefault(_owner(point), []).append(f"{what} {point.name}{hidden}")
    return dict(sorted(added.items()))


def other_owners() -> list[str]:
    """Other installed distributions that have a module or a command ``ckpt``, so that one hides the other."""
    from importlib import metadata

    modules = metadata.packages_distributions().get("ckpt", [])
    commands = [point.dist.name for point in metadata.entry_points(group="console_scripts", name="ckpt") if point.dist is not None]
    return sorted({*modules, *commands} - {_DISTRIBUTION})


def warn_of_other_owners(init: str) -> None:
    """Warn if the distribution ``ckpt`` is installed beside ``init``. ``import ckpt`` looks, so names of files have to do."""
    try:
        names = listdir(dirname(dirname(init)))
    except OSError:  # an archive of modules, or a directory that may not be listed
        return
    others = [name for name in names if name.startswith("ckpt-") and name.endswith(".dist-info")]
    if others:
        other = others[0].removesuffix(".dist-info").replace("-", " ")
        warn(f"{other} is installed, too: its modules and those of {_DISTRIBUTION} replace each other\n  try: {REINSTALL}", stacklevel=3)


def _points(group: str) -> list[EntryPoint]:
    from importlib import metadata  # slow to import, and seldom needed

    return sorted(metadata.entry_points(group=group), key=lambda point: point.name)


def _owner(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _wanted_version(point: EntryPoint) -> str | None:
    """Which versions of ckpt its distribution requires, if this is none of them."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for requirement in map(Requirement, (None if point.dist is None else point.dist.requires) or ()):
        counts = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        fits = canonicalize_name(requirement.name) != _DISTRIBUTION or requirement.specifier.contains(__version__, prereleases=True)
        if counts and not fits:
            return str(requirement.specifier)
    return None
