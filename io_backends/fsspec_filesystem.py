"""From a URL and storage options to an fsspec file system, what kind of storage it is, and a place in it.

fsspec keeps file systems by their options alone, so that one made under other variables (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``) would serve.
Here they are kept by options and environment together.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from fsspec.implementations.dirfs import DirFileSystem

from ckpt import settings
from ckpt.concurrency import ProcessLock
from ckpt.errors import NotFoundError, StorageError, UsageError
from ckpt.text import parse_json

from .checks import check_path
from .fsspec_errors import fsspec_errors, is_absence, keeps_condition, kept_conditions, writable_places

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
_lock = ProcessLock(_file_systems.clear)


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
        # Options, and what the URL says of host, user or account
        parts = cls._get_kwargs_from_urls(url)
        for name, value in parts.items():
            if options.get(name) not in (None, value):
                raise UsageError(f"the URL and the storage option {name} differ", where=url, hint="leave one of them out")
        merged = {**options, **parts}
        return _kept(cls, merged), str(cls._strip_protocol(url))


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


# A place below a root of an fsspec file system: its keys, its bucket, and whether objects are created there only if they are absent.

TRIES = 8
IN_MEMORY = 8 << 20
"""Bytes. Smaller objects are gathered in memory, others in a file ``ckpt-*`` where temporary files are."""


class FsspecPlace:
    """The file system for ``url``, by its options, or by a file system that is there already. Usable after a fork."""

    def __init__(self, url: str, options: Mapping[str, Any], filesystem: Any) -> None:
        self.scheme, _, rest = url.partition("://")
        self.url = f"{self.scheme}://{rest.rstrip('/')}"
        self._options = dict(options)
        self._given = filesystem
        self._conceal = secrets_of(self._options if filesystem is None else filesystem.storage_options)
        self._bucket_is_there = False
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        if self._given is None:
            self._fs, root = opened(self.url, self._options)
        else:
            self._fs = self._given if self._pid is None else after_fork(self._given)
            known = self.scheme in protocols_of(self._fs)
            root = str(self._fs._strip_protocol(self.url if known else self.url.partition("://")[2]))
        self.root = root.rstrip("/")
        if not self.root.strip("/"):
            raise UsageError(f"{self.url!r} names no place below a root", hint=f"write {self.scheme}://bucket/path")
        self._pid = os.getpid()

    @property
    def fs(self) -> Any:
        """The file system, of this process: connections and event loops do not survive a fork."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._open()
        return self._fs

    def speaks(self, protocols: frozenset[str]) -> bool:
        """Whether the file system is one of these protocols, or a directory of one that is."""
        fs = self.fs
        while isinstance(fs, DirFileSystem):
            fs = fs.fs
        return not protocols.isdisjoint(protocols_of(fs))

    def on_this_machine(self, path: str = "") -> str | None:
        """The file of a path (by default the root) if the file system is one of this machine."""
        fs, key = self.fs, self.key(path) if path else self.root
        while isinstance(fs, DirFileSystem):
            fs, key = fs.fs, fs._join(key)
        return key if THIS_MACHINE.intersection(protocols_of(fs)) else None

    def key(self, path: str) -> str:
        return f"{self.root}/{check_path(path)}"

    def where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def errors(self, where: str, doing: str, *, reading: bool = False) -> AbstractContextManager[None]:
        """``fsspec_errors`` that show no value of a secret option."""
        return fsspec_errors(where, doing, reading=reading, conceal=self._conceal)

    # ---- buckets

    @property
    def bucket(self) -> str:
        """The first part of the root, as the file system calls it."""
        start = len(self.root) - len(self.root.lstrip("/"))
        return self.root[: start + len(self.root[start:].partition("/")[0])]

    def check_bucket(self, cause: Exception | None = None) -> None:
        """Asks once: a bucket that was there stays."""
        if self._bucket_is_there or BUCKETS.isdisjoint(protocols_of(self.fs)):
            return
        try:
            self.fs.info(self.bucket)
            self._bucket_is_there = True
        except Exception as err:  # noqa: BLE001  who may not look at the bucket may still use it
            if not is_absence(err):
                return
            hint = "create it, or check its name and the endpoint; ckpt makes no buckets"
            raise NotFoundError(f"the bucket does not exist: {self.bucket}", where=self.url, hint=hint) from cause or err

    def put(self, key: str, write: Callable[[], object]) -> None:
        """Call ``write``, which writes ``key``; if its directory is missing make it and try again: a ``delete`` may prune it meanwhile."""
        for tries_left in reversed(range(TRIES)):
            try:
                write()
                return
            except Exception as err:
                if not is_absence(err):
                    raise
                self.check_bucket(err)
                if not tries_left or self.speaks(BUCKETS):
                    raise
                with suppress(FileNotFoundError, FileExistsError):  # both when it is pruned while it is made
                    self.fs.makedirs(key.rpartition("/")[0], exist_ok=True)

    # ---- conditions

    def is_conditional(self) -> bool:
        """Whether the store itself creates objects only if they are absent. File systems with directories never do."""
        if self.speaks(DIRECTORIES):
            return False
        if self._tried not in kept_conditions:
            self._probe()
        kept = kept_conditions[self._tried]
        if not kept and settings.conditional_put() == "require":
            why = "so two saves at once could both believe that they were committed"
            hint = "set CKPT_CONDITIONAL_PUT=emulate if never more than one job saves to one place (docs/storage.md)"
            raise StorageError(f"the store ignores or does not offer `create only if absent`, {why}", where=self.url, hint=hint)
        return kept

    @property
    def _tried(self) -> tuple[str, str]:
        return self.fs._fs_token, self.bucket

    def prepare(self) -> None:
        """Write a small object and remove it: on object stores once for all places beside each other, such as the steps of a run. The first
        time in a bucket, try conditions with it."""
        run = self.root.rpartition("/")[0]
        if self.speaks(DIRECTORIES) or (self._tried in kept_conditions and (self.fs._fs_token, run) not in writable_places):
            self._probe()
        self.is_conditional()
        writable_places.add((self.fs._fs_token, run))

    def _probe(self) -> None:
        key = self.key(f".prepare-{secrets.token_hex(8)}.tmp")

        def put(condition: dict[str, Any]) -> None:
            self.put(key, lambda: self.fs.pipe_file(key, b"probe", **condition))

        with self.errors(self.url, "write to the root"):
            try:
                if self.speaks(DIRECTORIES) or self._tried in kept_conditions:
                    put({})
                else:
                    kept_conditions[self._tried] = keeps_condition(self.fs, key, self.url, put)
            except BaseException:
                with suppress(Exception):  # why it could not be written is what counts
                    self.fs.rm_file(key)
                raise
            with suppress(FileNotFoundError):  # a file system that does not know the condition has written nothing
                self.fs.rm_file(key)
