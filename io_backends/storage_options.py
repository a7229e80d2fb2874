"""What a program has said about the storage below a URL: options of its file system, or the file system itself.

URLs are plain text everywhere: in step lists, messages between ranks and the sources of virtual checkpoints. What belongs to a place
and must not be written down, credentials above all, is therefore kept here, by the beginning of the URL, for as long as the process lives.

Invariant: values of options are in no ``repr``, and nothing here is logged or stored.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt import settings
from ckpt.errors import UsageError
from ckpt.text.json_reader import parse_json
from ckpt.text.urls import url_text

LOCAL = ("", "file", "mem", "memory")
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

_lock = threading.Lock()
_table: dict[str, Configured] = {}
_file: tuple[Any, dict[str, Configured]] = (None, {})
"""What ``CKPT_STORAGE_OPTIONS`` said, and which state of which file that was."""


def configure_storage(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, filesystem: Any = None) -> None:
    """Say how the storage at ``url`` and everything below it is reached. It holds in this process, for all calls, until it is said anew.

    Of several URLs that fit, the longest decides, alone. Without options and file system, what was said of ``url`` is forgotten. Each
    rank calls it for itself. Nothing of it is stored, sent to other ranks or logged.

    Args:
        url: the beginning of the URLs that are meant: ``"s3://bucket/runs"``, ``"s3://bucket"``, or ``"s3://"`` for all buckets. ``s3a://``
            means the same storage as ``s3://``.
        storage_options: what the file system takes, as for ``fsspec.filesystem``, pandas or DCP: ``{"key": …, "secret": …,
            "endpoint_url": …}``, ``{"anon": True}``. They win over fsspec's configuration, and that over the environment.
        filesystem: an existing fsspec file system, which then does all the work.

    Raises:
        UsageError: ``url`` is a path or ``memory://``, which have no options; or both are given; or the file system is one for coroutines.
    """
    url = url_text(url)
    if storage_options is not None and filesystem is not None:
        raise UsageError("storage_options and a file system at once", where=url, hint="give one; a file system has its options already")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise UsageError(f"storage_options is a dict, not {type(storage_options).__name__}", where=url, hint='such as {"anon": True}')
    if filesystem is not None and not hasattr(filesystem, "cat_file"):
        raise UsageError(f"{type(filesystem).__name__} is no fsspec file system", where=url, hint="fsspec.filesystem(...) gives one")
    configured = Configured(options=_copied(storage_options or {}), filesystem=filesystem)
    _set(_checked(url, configured), configured)


def _checked(url: str, configured: Configured) -> str:
    """The canonical form of a URL that may have these options."""
    key = canonical(url)
    check_no_password(url)
    scheme = key.partition("://")[0]
    if scheme in LOCAL and (configured.options or (configured.filesystem is not None and scheme != "memory")):
        raise UsageError("paths, file:// and memory:// have no storage options", where=url, hint="give them for a URL, such as s3://bucket")
    if getattr(configured.filesystem, "asynchronous", False) or configured.options.get("asynchronous"):
        raise UsageError("asynchronous: a file system for coroutines cannot be used", where=url, hint="make it without asynchronous=True")
    return key


def _set(key: str, configured: Configured) -> None:
    global _table
    with _lock:
        others = {k: v for k, v in _table.items() if k != key}
        _table = {**others, key: configured} if configured.options or configured.filesystem is not None else others


def configured_for(url: str) -> Configured:
    """What was said of the longest URL that ``url`` lies below, by the program or else by the file."""
    path = settings.storage_options()
    table = {**_of_file(path), **_table} if path is not None else _table
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
                raise ValueError("it is no JSON object of URLs, each with an object of options")
            by_url = {url: Configured(options=options) for url, options in content.items()}
            _file = (state, {_checked(url, configured): configured for url, configured in by_url.items()})
    except UsageError:
        raise
    except (OSError, ValueError) as err:  # the text of a JSONDecodeError has a place, and nothing of the content
        raise UsageError(
            f"{path} cannot be read: {err}", where="CKPT_STORAGE_OPTIONS", hint="docs/object-storage.md has an example"
        ) from err
    return _file[1]


def check_no_password(url: str) -> None:
    if _PASSWORD.match(url):
        shown = _PASSWORD.sub(lambda m: f"{m[0].partition('://')[0]}://…@", url)
        hint = "leave it out, and give it apart: ckpt.configure_storage(url, {'username': …, 'password': …})"
        raise UsageError("the URL holds a password, and URLs are logged", where=shown, hint=hint)


def canonical(url: str) -> str:
    """A URL with one name for its scheme, and without a slash at its end."""
    if not isinstance(url, str):
        raise UsageError(f"a URL is a str, not {type(url).__name__}", where=str(url), hint="pass str(path)")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return f"://{url}"
    scheme = scheme.lower()
    return f"{ALIASES.get(scheme, scheme)}://{rest.rstrip('/')}"


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller does to its dicts later changes nothing here."""
    return {str(k): _copied(v) if isinstance(v, Mapping) else v for k, v in options.items()}


def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that held it is not in the child


os.register_at_fork(after_in_child=_forget_lock)
