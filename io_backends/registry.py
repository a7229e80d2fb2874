"""From a URL to the backend that serves it.

Backends outside this package are found by the entry-point group ``ckpt.io_backends``: the name of an entry point is a URL scheme, its
object is called with the URL and gives a Backend. Schemes that neither has are served through fsspec, if it knows them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.errors import UsageError

from .checks import check_path
from .memory import MemoryBackend
from .posix import PosixBackend
from .protocol import Backend

_GROUP = "ckpt.io_backends"


def _s3(url: str) -> Backend:
    from .s3 import S3Backend  # late: botocore takes a while to import

    return S3Backend(url)


_LOCAL: dict[str, Callable[[str], Backend]] = {"": PosixBackend, "file": PosixBackend, "memory": MemoryBackend}
_BUILT_IN = {**_LOCAL, "s3": _s3}
_EXTRAS = f"other schemes need a package with an entry point in the group {_GROUP}, or one that fsspec knows"
_wrappers: list[Callable[[Backend], Backend]] = []
_wrappers_lock = threading.Lock()


def is_file_system(url: str) -> bool:
    """Whether a URL is a path of a file system, or of this process's memory: what is read there need not be sent."""
    return _scheme(url) in _LOCAL


def open_backend(url: str) -> Backend:
    """Open the storage at ``url``: a plain path, or a URL of a known scheme. Nothing is read, made or checked yet.

    Raises:
        UsageError: not a str, not a URL or path, or an unknown scheme.
    """
    scheme = _scheme(url)
    backend = _factory(scheme)(scheme + url[len(scheme) :])
    with _wrappers_lock:
        wrappers = tuple(_wrappers)
    for wrapper in wrappers:
        backend = wrapper(backend)
    return backend


def absolute_url(url: str) -> str:
    """The same place from any working directory.

    Raises:
        UsageError: it is no URL.
    """
    return url if _scheme(url) else os.path.abspath(url)


def join_url(root: str, *parts: str) -> str:
    """The URL of ``parts``, joined with ``/``, below ``root``; each part is a relative path.

    Raises:
        UsageError: ``root`` is no URL, or a part no path below a root.
    """
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


def check_url(url: str) -> None:
    """
    Raises:
        UsageError: it is no URL: a path object, empty, or one that lost a slash.
    """
    _scheme(url)


def _scheme(url: str) -> str:
    """The scheme in lower case; empty for plain paths."""
    if not isinstance(url, str):
        raise UsageError(
            f"a URL is a str, not {type(url).__name__}",
            where=str(url),
            hint="pass str(path); a Path would turn s3://bucket into s3:/bucket",
        )
    if not url:
        raise UsageError("the URL is empty", hint="give the directory of a checkpoint or of a run")
    scheme, separator, _ = url.partition("://")
    if separator and "/" not in scheme:
        return scheme.lower()
    first, slash, _ = url.partition("/")
    if slash and first.endswith(":") and first != "file:":
        raise UsageError(f"{url!r} is a URL that lost a slash", hint=f"write {first}//…, or ./{first}/… for a directory of that name")
    return ""


def _factory(scheme: str) -> Callable[[str], Backend]:
    found = _BUILT_IN.get(scheme)
    if found is not None:
        return found
    from importlib.metadata import entry_points  # late: it is slow to import, and plain paths need none of it

    points = {point.name: point for point in entry_points(group=_GROUP)}
    if scheme not in points:
        from .fsspec import FsspecBackend, known_to_fsspec  # late: fsspec is slow to import

        if known_to_fsspec(scheme):
            return FsspecBackend
        known = ", ".join(sorted({*_BUILT_IN, *points} - {""}))
        raise UsageError(f"no storage backend for {scheme}:// (known: {known})", hint=_EXTRAS)
    try:
        factory: Callable[[str], Backend] = points[scheme].load()
    except ImportError as err:
        raise UsageError(f"the storage backend for {scheme}:// cannot be imported: {err}", hint=_EXTRAS) from err
    return factory
