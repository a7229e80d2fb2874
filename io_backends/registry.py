"""From a URL to the backend that serves it.

Backends outside this package are found by the entry-point group ``ckpt.io_backends``: the name of an entry point is a URL scheme, its
object is called with the URL, and with ``storage_options=`` where a program has configured some, and gives a Backend. Schemes that neither
has are served through fsspec, if it knows them; so is ``s3://`` with options that only s3fs can honour, and every URL with a file system.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from ckpt.errors import UsageError
from ckpt.needs import entry_points
from ckpt.text.urls import url_text

from .checks import check_path
from .memory import MemoryBackend
from .posix.backend import PosixBackend
from .protocol import Backend
from .storage_options import LOCAL, Configured, canonical, check_no_password, configured_for

log = logging.getLogger("ckpt")

_GROUP = "ckpt.io_backends"


def _s3(url: str, options: Mapping[str, Any]) -> Backend:
    from .fsspec.config import fsspec_config
    from .s3.backend import S3Backend  # late: botocore takes a while to import
    from .s3.options import PROTOCOLS, s3_options, without_equivalent

    options = {**fsspec_config(*PROTOCOLS), **options}
    if only_s3fs := without_equivalent(options):
        from .fsspec.backend import FsspecBackend

        if (names := ", ".join(only_s3fs)) not in _through_s3fs:
            _through_s3fs.add(names)
            log.warning("s3:// goes through s3fs, with its guarantees, since only that has the storage options %s", names)
        return FsspecBackend(url, options)
    return S3Backend(url, options=s3_options(options))


def _mem(url: str) -> Backend:
    # By its name, as an entry point is: few need it, and the daemon of a machine lies above this room.
    factory: Callable[[str], Backend] = resolve_name("ckpt.io_backends.mem.remote:open_memory")
    return factory(url)


_BUILT_IN: dict[str, Callable[[str], Backend]] = {"": PosixBackend, "file": PosixBackend, "memory": MemoryBackend, "mem": _mem}
_EXTRAS = f"other schemes need a package with an entry point in the group {_GROUP}, or one that fsspec knows"
_wrappers: list[Callable[[Backend], Backend]] = []
_wrappers_lock = threading.Lock()
_in_process: dict[str, Callable[[str], Backend]] = {}
"""Schemes whose URLs mean something in this process alone."""
_URLS_ALONE = frozenset({"mem", "memory", "s3", "gs"})
"""Schemes of which nobody means a directory, ``s3:bucket``."""
_through_s3fs: set[str] = set()
"""Options that the log was told of."""


def is_file_system(url: str) -> bool:
    """Whether a URL is a path of a file system, or of this machine's memory: what is read there need not be sent."""
    return _scheme(url) in LOCAL


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """Open the storage at ``url``: a plain path, or a URL of a known scheme. Nothing is read, made or checked yet.

    Raises:
        UsageError: not a str, not a URL or path, an unknown scheme, a password in the URL, or storage options that cannot be honoured.
    """
    url = url_text(url)
    scheme = _scheme(url)
    check_no_password(url)
    backend = _opened(scheme, scheme + url[len(scheme) :])
    with _wrappers_lock:
        wrappers = tuple(_wrappers)
    for wrapper in wrappers:
        backend = wrapper(backend)
    return backend


def absolute_url(url: str) -> str:
    """The same place from any working directory."""
    return url if _scheme(url) else PosixBackend(url).url


def real_url(url: str) -> str:
    """Where a URL leads, to be compared and not to be opened: equal for a path, ``file://`` and links to the same place, and for the names
    of one scheme."""
    scheme = _scheme(url)
    if scheme in ("", "file"):
        return os.path.realpath(PosixBackend(scheme + url[len(scheme) :]).url)
    return os.path.realpath(url.partition("://")[2]) if scheme == "local" else canonical(url)


def join_url(root: str | os.PathLike[str], *parts: str) -> str:
    """The URL of ``parts``, joined with ``/``, below ``root``; each part is a relative path.

    Raises:
        UsageError: ``root`` is no URL, or a part no path below a root.
    """
    root = url_text(root)
    _scheme(root)
    below = "/".join(check_path(part) for part in parts)
    return (root if root.endswith("/") else f"{root}/") + below if below else root


@contextmanager
def wrap_backends(wrapper: Callable[[Backend], Backend]) -> Iterator[None]:
    """Inside the block ``open_backend`` gives ``wrapper(backend)``, in all threads. Blocks nest: the inner one wraps last. For tests."""
    with _wrappers_lock:
        _wrappers.append(wrapper)
    try:
        yield
    finally:
        with _wrappers_lock:
            _wrappers.remove(wrapper)


def serve_scheme(scheme: str, opened: Callable[[str], Backend]) -> None:
    """From now on ``open_backend`` gives what ``opened`` makes of URLs of this scheme, in this process."""
    _in_process[scheme] = opened


def check_url(url: str) -> None:
    _scheme(url)


def _as_text(url: object) -> str:
    if hasattr(url, "storage_options"):  # universal_pathlib: str() alone would lose its options
        return "pass str(url), and once before ckpt.configure_storage(str(url), url.storage_options)"
    return "pass a URL or path as text, or a pathlib.Path"


def _scheme(url: str) -> str:
    """The scheme in lower case; empty for plain paths."""
    if not isinstance(url, str):
        raise UsageError(
            f"a URL is a str, not {type(url).__name__}",
            where=str(url),
            hint=_as_text(url),
        )
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


def _opened(scheme: str, url: str) -> Backend:
    configured = configured_for(url)
    if configured.filesystem is not None:
        from .fsspec.backend import FsspecBackend  # late: fsspec is slow to import

        return FsspecBackend(url, filesystem=configured.filesystem)
    if scheme in _BUILT_IN or scheme in _in_process:
        return (_BUILT_IN.get(scheme) or _in_process[scheme])(url)
    if scheme == "s3":
        return _s3(url, configured.options)
    points = entry_points(_GROUP)
    if scheme in points:
        return _of_another_package(points[scheme], url, configured)
    from .fsspec.backend import FsspecBackend
    from .fsspec.opening import known_to_fsspec

    if known_to_fsspec(scheme):
        return FsspecBackend(url, configured.options)
    known = ", ".join(sorted({*_BUILT_IN, "s3", *points} - {""}))
    raise UsageError(f"no storage backend for {scheme}:// (known: {known})", hint=_EXTRAS)


def _of_another_package(point: Any, url: str, configured: Configured) -> Backend:
    try:
        factory: Callable[..., Backend] = point.load()
    except ImportError as err:
        raise UsageError(f"the storage backend for {point.name}:// cannot be imported: {err}", hint=_EXTRAS) from err
    if not configured.options:
        return factory(url)
    if "storage_options" not in inspect.signature(factory).parameters:
        names = ", ".join(sorted(configured.options))
        raise UsageError(f"the storage backend for {point.name}:// takes no storage options: {names}", where=url)
    return factory(url, storage_options=dict(configured.options))
