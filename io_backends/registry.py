"""From a URL to the backend that serves it, and what a program has configured for the storage below a URL.

Backends outside this package are found by the entry-point group ``ckpt.storage``: the name of an entry point is a URL scheme, its
object is called with the URL, and with ``storage_options=`` where a program has configured some, and gives a Backend. Schemes that neither
has are served through fsspec, if it knows them; so is ``s3://`` with options that only s3fs can honour, and every URL with a file system.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ckpt import settings
from ckpt.concurrency import ProcessLock
from ckpt.errors import UsageError
from ckpt.needs import plugin, plugin_names
from ckpt.text import parse_json, url_text

from .checks import check_path
from .inprocess import InProcessBackend
from .posix_backend import PosixBackend
from .protocol import Backend

# What a program has said about the storage below a URL: options of its file system, or the file system itself.
#
# URLs are plain text everywhere: in step lists, messages between ranks and the sources of virtual checkpoints. What belongs to a place and
# must not be written down, credentials above all, is therefore kept here, by the beginning of the URL, for as long as the process lives.
#
# Invariant: values of options are in no ``repr``, and nothing here is logged or stored.

LOCAL = ("", "file", "inprocess", "memory")
"""Schemes whose backends take no options."""
ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""Scheme → the one that means the same storage."""
_PASSWORD = re.compile(r"^(?!git)[^/]*://[^/@]*:[^/@]*@")
"""``github://org:repo@sha`` has none."""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """Options for the storage of a URL, as fsspec's file systems take them, or a file system."""

    options: Mapping[str, Any] = field(default_factory=dict)
    filesystem: Any = None

    def __repr__(self) -> str:
        return f"Configured(options={sorted(self.options)}, filesystem={type(self.filesystem).__name__})"


NOTHING = Configured()

_lock = ProcessLock()
_table: dict[str, Configured] = {}
_file: tuple[Any, dict[str, Configured]] = (None, {})
"""What ``CKPT_STORAGE_OPTIONS`` said, and which state of which file that was."""


def configure_storage(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, filesystem: Any = None) -> None:
    """Say how the storage at ``url`` and everything below it is reached. It holds in this process, for all calls, until it is set again.

    Of several URLs that fit, the longest decides, alone. Without options and file system, the settings of ``url`` are removed. Each
    rank calls it for itself. Nothing of it is stored, sent to other ranks or logged.

    Args:
        url: the beginning of the URLs that are meant: ``"s3://bucket/runs"``, ``"s3://bucket"``, or ``"s3://"`` for all buckets. ``s3a://``
            means the same storage as ``s3://``.
        storage_options: what the file system takes, as for ``fsspec.filesystem``, pandas or DCP: ``{"key": …, "secret": …,
            "endpoint_url": …}``, ``{"anon": True}``. They win over fsspec's configuration, and that over the environment.
        filesystem: an existing fsspec file system, which then does all the work.

    Raises:
        UsageError: ``url`` is a path, ``inprocess://`` or ``memory://``, which have no options; or both are given; or the file system is
            one for coroutines.
    """
    global _table
    url = url_text(url)
    if storage_options is not None and filesystem is not None:
        raise UsageError("storage_options and a file system at once", where=url, hint="give one; a file system has its options already")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise UsageError(f"storage_options is a dict, not {type(storage_options).__name__}", where=url, hint='such as {"anon": True}')
    if filesystem is not None and not hasattr(filesystem, "cat_file"):
        raise UsageError(f"{type(filesystem).__name__} is not an fsspec file system", where=url, hint="fsspec.filesystem(...) gives one")
    configured = Configured(options=_copied(storage_options or {}), filesystem=filesystem)
    key = _checked(url, configured)
    with _lock:
        others = {k: v for k, v in _table.items() if k != key}
        _table = {**others, key: configured} if configured.options or filesystem is not None else others


def _checked(url: str, configured: Configured) -> str:
    """The canonical form of a URL that may have these options."""
    key = canonical(url)
    check_no_password(url)
    scheme = key.partition("://")[0]
    if scheme in LOCAL and (configured.options or (configured.filesystem is not None and scheme != "memory")):
        raise UsageError(
            "paths, file://, inprocess:// and memory:// have no storage options", where=url, hint="give them for a URL, such as s3://bucket"
        )
    if getattr(configured.filesystem, "asynchronous", False) or configured.options.get("asynchronous"):
        raise UsageError("asynchronous: a file system for coroutines cannot be used", where=url, hint="make it without asynchronous=True")
    return key


def configured_for(url: str) -> Configured:
    """What was said of the longest URL that ``url`` lies below, by the program or else by the file."""
    path = settings.variable("CKPT_STORAGE_OPTIONS")
    table = {**_of_file(path), **_table} if path else _table
    if not table:
        return NOTHING
    scheme, _, place = canonical(url).partition("://")
    while True:
        known = table.get(f"{scheme}://{place}")
        if known is not None or not place:
            return known or NOTHING
        place = place.rpartition("/")[0]


def _of_file(path: str) -> dict[str, Configured]:
    """What the file says, read anew when it has changed."""
    global _file
    try:
        status = os.stat(path)
        state = (path, status.st_mtime_ns, status.st_size)
        if _file[0] != state:
            content = parse_json(Path(path).read_bytes())
            if not isinstance(content, dict) or not all(isinstance(options, dict) for options in content.values()):
                raise ValueError("it is not a JSON object of URLs, each with an object of options")
            by_url = {url: Configured(options=options) for url, options in content.items()}
            _file = (state, {_checked(url, configured): configured for url, configured in by_url.items()})
    except UsageError:
        raise
    except (OSError, ValueError) as err:  # the text of a JSONDecodeError has a place, and nothing of the content
        raise UsageError(f"{path} cannot be read: {err}", where="CKPT_STORAGE_OPTIONS", hint="docs/storage.md has an example") from err
    return _file[1]


def check_no_password(url: str) -> None:
    if _PASSWORD.match(url):
        shown = _PASSWORD.sub(lambda m: f"{m[0].partition('://')[0]}://…@", url)
        hint = "leave it out, and give it apart: ckpt.configure_storage(url, {'username': …, 'password': …})"
        raise UsageError("the URL holds a password, and URLs are logged", where=shown, hint=hint)


def canonical(url: str) -> str:
    """A URL with one name for its scheme, and without a slash at its end."""
    if not isinstance(url, str):
        raise UsageError(f"a URL is a str, not {type(url).__name__}", hint="pass str(path)")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return f"://{url}"
    scheme = scheme.lower()
    return f"{ALIASES.get(scheme, scheme)}://{rest.rstrip('/')}"


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller does to its dicts later changes nothing here."""
    return {str(k): _copied(v) if isinstance(v, Mapping) else v for k, v in options.items()}


log = logging.getLogger("ckpt")

_GROUP = "ckpt.storage"


def _s3(url: str, options: Mapping[str, Any]) -> Backend:
    from .fsspec_filesystem import fsspec_config
    from .s3_backend import S3Backend  # late: botocore takes a while to import
    from .s3_tries import PROTOCOLS, s3_options, without_equivalent

    options = {**fsspec_config(*PROTOCOLS), **options}
    if only_s3fs := without_equivalent(options):
        from .fsspec_backend import FsspecBackend

        if (names := ", ".join(only_s3fs)) not in _through_s3fs:
            _through_s3fs.add(names)
            log.warning("s3:// goes through s3fs, with its guarantees, since only that has the storage options %s", names)
        return FsspecBackend(url, options)
    return S3Backend(url, options=s3_options(options))


_BUILT_IN: dict[str, Callable[[str], Backend]] = {"": PosixBackend, "file": PosixBackend, "inprocess": InProcessBackend}
_BY_NAME = {"memory": "ckpt.nodes.memory_backend:open_memory", "spread": "ckpt.nodes.backend:open_spread"}
"""By their names, as entry points are: few need them, and what they open lies above this room."""
OWN = (*_BUILT_IN, *_BY_NAME, "s3")
_EXTRAS = f"other schemes need a package with an entry point in the group {_GROUP}, or one that fsspec knows"
_MEMORIES = "write memory:// for the memory of this machine, which a daemon keeps, or inprocess:// for that of this process alone"
_wrappers: list[Callable[[Backend], Backend]] = []
_URLS_ALONE = frozenset({"inprocess", "mem", "memory", "s3", "gs"})
"""Schemes of which nobody means a directory, ``s3:bucket``."""
_through_s3fs: set[str] = set()
"""Options that the log was told of."""


def is_file_system(url: str) -> bool:
    """Whether a URL is a path of a file system, or of this machine's memory: what is read there need not be sent."""
    return scheme_of(url) in LOCAL


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """Open the storage at ``url``: a plain path, or a URL of a known scheme. Nothing is read, made or checked yet.

    Raises:
        UsageError: not a str, not a URL or path, an unknown scheme, a password in the URL, or storage options that cannot be honoured.
    """
    url = url_text(url)
    scheme = scheme_of(url)
    check_no_password(url)
    url = scheme + url[len(scheme) :]
    configured = configured_for(url)
    own = _BUILT_IN.get(scheme) or (resolve_name(_BY_NAME[scheme]) if scheme in _BY_NAME else None)
    backend = own(url) if own is not None and configured.filesystem is None else _of_packages(scheme, url, configured)
    for wrapper in tuple(_wrappers):
        backend = wrapper(backend)
    return backend


def _of_packages(scheme: str, url: str, configured: Configured) -> Backend:
    """What it takes further packages to serve."""
    if configured.filesystem is not None:
        from .fsspec_backend import FsspecBackend  # late: fsspec is slow to import

        return FsspecBackend(url, filesystem=configured.filesystem)
    if scheme == "s3":
        return _s3(url, configured.options)
    plugged: Any = plugin(_GROUP, scheme, object)
    if plugged is not None:
        factory: Callable[..., Backend] = plugged
        if not configured.options:
            return factory(url)
        if "storage_options" not in inspect.signature(factory).parameters:
            names = ", ".join(sorted(configured.options))
            raise UsageError(f"the storage backend for {scheme}:// takes no storage options: {names}", where=url)
        return factory(url, storage_options=dict(configured.options))
    from .fsspec_backend import FsspecBackend
    from .fsspec_filesystem import known_to_fsspec

    if known_to_fsspec(scheme):
        return FsspecBackend(url, configured.options)
    known = ", ".join(sorted({*OWN, *plugin_names(_GROUP)} - {""}))
    hint = _MEMORIES if scheme == "mem" else _EXTRAS
    raise UsageError(f"no storage backend for {scheme}:// (known: {known})", hint=hint)


def open_below(root: str, prefix: str) -> Backend:
    """The place ``prefix`` below ``root``: empty, or ending in a slash."""
    return open_backend(join_url(root, prefix.rstrip("/")) if prefix else root)


def absolute_url(url: str) -> str:
    """The same place from any working directory."""
    return url if scheme_of(url) else PosixBackend(url).url


def real_url(url: str) -> str:
    """Where a URL leads, to be compared and not to be opened: equal for a path, ``file://`` and links to the same place, and for the names
    of one scheme."""
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        return os.path.realpath(PosixBackend(scheme + url[len(scheme) :]).url)
    return os.path.realpath(url.partition("://")[2]) if scheme == "local" else canonical(url)


def join_url(root: str | os.PathLike[str], *parts: str) -> str:
    """The URL of ``parts``, joined with ``/``, below ``root``; each part is a relative path.

    Raises:
        UsageError: ``root`` is no URL, or a part no path below a root.
    """
    root = url_text(root)
    scheme_of(root)
    below = "/".join(check_path(part) for part in parts)
    return (root if root.endswith("/") else f"{root}/") + below if below else root


@contextmanager
def wrap_backends(wrapper: Callable[[Backend], Backend]) -> Iterator[None]:
    """Inside the block ``open_backend`` gives ``wrapper(backend)``, in all threads. Blocks nest: the inner one wraps last. For tests."""
    _wrappers.append(wrapper)
    try:
        yield
    finally:
        _wrappers.remove(wrapper)


def _no_text(url: object) -> UsageError:
    what = f"a URL is a str, not {type(url).__name__}"
    if hasattr(url, "storage_options"):  # universal_pathlib: str() alone would lose its options
        hint = "pass str(url), and once before ckpt.configure_storage(str(url), url.storage_options)"
        return UsageError(what, where=str(url), hint=hint)
    # Not the value itself: who swaps the arguments gives the whole state, whose text may be many megabytes.
    return UsageError(what, hint="pass a URL or path as text, or a pathlib.Path; it comes first: save(url, state), load(url, state)")


def scheme_of(url: str) -> str:
    """The scheme in lower case; empty for plain paths."""
    if not isinstance(url, str):
        raise _no_text(url)
    if not url:
        raise UsageError("the URL is empty", hint="give the directory of a checkpoint or of a run")
    scheme, separator, _ = url.partition("://")
    if separator and "/" not in scheme:
        return scheme.lower()
    first, slash, _ = url.partition("/")
    if slash and first.endswith(":") and first != "file:":
        raise UsageError(f"{url!r} is a URL that lost a slash", hint=f"write {first}//…, or ./{first}/… for a directory of that name")
    if first.partition(":")[0] in _URLS_ALONE and ":" in first:
        scheme, _, rest = url.partition(":")
        raise UsageError(f"{url!r} is a URL without its slashes", hint=f"write {scheme}://{rest}, or ./{url} for a directory of that name")
    return ""
