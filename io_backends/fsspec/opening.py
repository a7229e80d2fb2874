"""From a URL and storage options to an fsspec file system, and what kind of storage it is.

fsspec keeps file systems by their options alone, so that one made under other variables (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``) would serve.
Here they are kept by options and environment together.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import UsageError
from ckpt.text import parse_json

from .errors import fsspec_errors

# fsspec's own configuration: ``FSSPEC_*`` variables as they are now, and the files that fsspec has read when it was imported.
#
# A variable that was set after fsspec was imported counts here too, and one that cannot be understood is an error: fsspec warns and goes
# on.


def fsspec_config(*protocols: str) -> dict[str, Any]:
    """The options that are configured for file systems of these protocols; a later one wins, as in fsspec."""
    if not _is_configured():
        return {}
    from fsspec.config import conf, set_conf_env  # late: it is slow to import

    options: dict[str, Any] = {}
    for protocol in protocols:
        name = f"FSSPEC_{protocol.upper()}"
        mine = {k: v for k, v in os.environ.items() if k == name or k.startswith(f"{name}_")}
        if name in mine:
            _check_object(name, mine[name])
        of_protocol = {protocol: dict(conf.get(protocol, {}))}
        set_conf_env(of_protocol, mine)
        options |= of_protocol[protocol]
    return options


def _is_configured() -> bool:
    """Whether there may be something to read. fsspec takes a while to import, and most programs have nothing there."""
    if "fsspec" in sys.modules or any(name.startswith("FSSPEC_") for name in os.environ):
        return True
    return os.path.isdir(os.path.join(os.path.expanduser("~"), ".config/fsspec"))


def _check_object(name: str, text: str) -> None:
    try:
        is_object = isinstance(parse_json(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise UsageError("it has to be a JSON object with the options of a file system", where=name, hint=f"or set {name}_<OPTION>=value")


DIRECTORIES = frozenset({"file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "arrow_hdfs", "webhdfs", "dbfs", "webdav"})
"""Protocols with real directories, whose writes show before they are whole: what is published there is written aside and moved."""
STRICT_RMDIR = frozenset({"file", "local", "sftp", "ssh", "smb"})
"""Protocols whose ``rmdir`` refuses directories that are not empty. Others may remove all that is in them."""
THIS_MACHINE = frozenset({"file", "local"})
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "ocilake", "obs", "tos", "tosfs", "bos", "r2"})
"""Protocols of object stores: objects in buckets (containers), which nobody makes by writing into them."""
_PACKAGES = dict.fromkeys(("gs", "gcs"), "gcsfs") | dict.fromkeys(("az", "abfs", "abfss"), "adlfs") | {"hf": "huggingface_hub"}
_PACKAGES |= {"sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "oss": "ossfs", "oci": "ocifs", "webdav": "webdav4"}
"""Scheme → what to install; for others fsspec has words of its own."""
_SECRET = ("key", "secret", "token", "password", "credential", "connection_string", "sas")
_KEPT = 8


@dataclass(eq=False)
class _KeptFileSystem:
    """Made by the first that takes the lock."""

    made: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_file_systems: dict[Any, _KeptFileSystem] = {}
_lock = threading.Lock()


def known_to_fsspec(scheme: str) -> bool:
    """Whether fsspec has heard of ``scheme``; the package that serves it may still be missing."""
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry


def protocols_of(filesystem: Any) -> tuple[str, ...]:
    """What a file system, or its class, calls itself."""
    named = filesystem.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def opened(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system for ``url``, and what it calls the place."""
    from fsspec import get_filesystem_class

    scheme = url.partition("://")[0]
    try:
        cls = get_filesystem_class(scheme)
    except ImportError as err:
        hint = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else str(err)
        raise UsageError(f"{scheme}:// needs a package that is not installed", where=url, hint=hint) from err
    options = {**fsspec_config(*protocols_of(cls)), **options}
    with fsspec_errors(url, "open the file system", conceal=secrets_of(options)):
        merged = _with_parts_of(url, cls._get_kwargs_from_urls(url), options)
        return _kept(cls, merged), str(cls._strip_protocol(url))


def _with_parts_of(url: str, parts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, and what the URL says of host, user or account."""
    for name, value in parts.items():
        if options.get(name) not in (None, value):
            raise UsageError(f"the URL and the storage option {name} differ", where=url, hint="leave one of them out")
    return {**options, **parts}


def _kept(cls: Any, options: dict[str, Any]) -> Any:
    from fsspec.utils import tokenize

    if options.get("asynchronous"):
        raise UsageError("the storage option asynchronous is for coroutines, and cannot be used", hint="leave it out")
    options = {name: value for name, value in options.items() if name != "skip_instance_cache"}
    key = (os.getpid(), cls, tokenize(**options), frozenset(os.environ.items()))
    with _lock:
        kept = _file_systems.pop(key, None) or _KeptFileSystem()
        _file_systems[key] = kept  # the last one that will be forgotten
        while len(_file_systems) > _KEPT:
            del _file_systems[next(iter(_file_systems))]
    with kept.lock:  # some connect at once: who wants another file system does not wait for that
        if kept.made is None:
            kept.made = cls(**options, skip_instance_cache=True)
        return kept.made


def after_fork(filesystem: Any) -> Any:
    """The same file system for a forked child: connections and event loops do not survive."""
    return type(filesystem)(*filesystem.storage_args, **{**filesystem.storage_options, "skip_instance_cache": True})


def secrets_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that no message may show."""
    secrets = [secret for value in options.values() if isinstance(value, Mapping) for secret in secrets_of(value)]
    secrets += [v for k, v in options.items() if isinstance(v, str) and len(v) > 3 and any(word in k.lower() for word in _SECRET)]
    return tuple(secrets)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that held it is not in the child
    _file_systems.clear()


os.register_at_fork(after_in_child=_forget)
