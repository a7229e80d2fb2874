"""Any storage that has an fsspec file system: ``gs://``, ``az://``, ``hf://``, ``sftp://`` and the rest, by what all of them can do.

Weaker than the backends made for one storage (docs/copying.md says what may go wrong):

* ``publish`` reads, compares and writes. Two processes that publish the same path at the same moment may both believe that they did. Where
  the file system offers to create an object only if it is absent (``mode="create"`` or ``overwrite=False``), new ones are safe.
* ``create`` promises nothing to two callers that take the same path at once.
* How durable a finished write is, and how failed requests are tried again, is up to the file system.

Invariant: no listing of a file system's cache is believed: caches are dropped before every question.
"""

from __future__ import annotations

import builtins
import inspect
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ckpt.errors import CkptError, ConflictError, NotFoundError, StorageError, UsageError

from .checks import byte_view, check_path, check_prefix, check_read, check_size, past_end
from .fsspec_errors import fsspec_errors, mapped
from .fsspec_writer import GatheringWriter
from .protocol import Backend, Entry, Grain, Writer

_DIRECTORIES = frozenset({"file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "arrow_hdfs", "webhdfs", "dbfs", "webdav"})
"""Protocols with real directories, whose writes show before they are whole: what is published there is written aside and moved."""
_STRICT_RMDIR = frozenset({"file", "local", "sftp", "ssh", "smb"})
"""Protocols whose ``rmdir`` refuses directories that are not empty. Others may remove all that is in them."""
_PACKAGES = dict.fromkeys(("gs", "gcs"), "gcsfs") | dict.fromkeys(("az", "abfs", "abfss"), "adlfs") | {"hf": "huggingface_hub"}
_PACKAGES |= {"sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "oss": "ossfs", "oci": "ocifs", "webdav": "webdav4"}
"""Scheme → what to install; for others fsspec has words of its own."""
_TRIES = 8
_PAUSE = 0.03
"""Seconds, growing with each try."""


def known_to_fsspec(scheme: str) -> bool:
    """Whether fsspec has heard of ``scheme``; the package that serves it may still be missing."""
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry


class FsspecBackend(Backend):
    """The storage at a URL that fsspec understands. Options, credentials and end points come from fsspec's own configuration.

    Raises:
        UsageError: the package for this scheme is not installed, or the URL names nothing below a root.
    """

    _publishing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str) -> None:
        self._scheme, _, rest = url.partition("://")
        self._url = f"{self._scheme}://{rest.rstrip('/')}"
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        from fsspec.core import url_to_fs

        try:
            self._held, root = url_to_fs(self._url)
        except ImportError as err:
            hint = f"pip install {_PACKAGES[self._scheme]}" if self._scheme in _PACKAGES else str(err)
            raise UsageError(f"{self._scheme}:// needs a package that is not installed", where=self._url, hint=hint) from err
        except ValueError as err:
            raise UsageError(f"fsspec cannot open this URL: {err}", where=self._url, hint="check its spelling") from err
        self._root = str(root).rstrip("/")
        if not self._root.strip("/"):
            raise UsageError(f"{self._url!r} names no place below a root", hint=f"write {self._scheme}://bucket/path")
        self._pid = os.getpid()

    @property
    def _fs(self) -> Any:
        """The file system, of this process: connections and event loops do not survive a fork."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._open()
        return self._held

    def _is(self, protocols: frozenset[str]) -> bool:
        found = self._fs.protocol
        return not protocols.isdisjoint((found,) if isinstance(found, str) else found)

    @property
    def url(self) -> str:
        """The URL, without a trailing slash."""
        return self._url

    @property
    def grain(self) -> Grain:
        """Long ranges, several at once: each answer takes a while to begin."""
        return Grain(piece=8 << 20, gap=256 << 10, calls=8)

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _where(self, path: str) -> str:
        return f"{self._url}/{path}"

    # ---- reading

    def _info_size(self, path: str) -> int:
        self._fs.invalidate_cache()
        info = self._fs.info(self._key(path))
        if info["type"] != "file":
            raise NotFoundError(
                "cannot read: it is not a file", where=self._where(path), hint="check the URL; `ckpt ls` shows what is there"
            )
        return int(info["size"])

    def size(self, path: str) -> int:
        """See ``Backend.size``."""
        check_path(path)
        with fsspec_errors(self._where(path), "get the size", reading=True):
            return self._info_size(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """See ``Backend.read``."""
        check_read(offset, length)
        check_path(path)
        with fsspec_errors(self._where(path), "read", reading=True):
            return self._read(path, offset, length)

    def _read(self, path: str, offset: int, length: int | None) -> bytes:
        """The size is asked for only where the bytes alone do not show that they are all."""
        if length:
            data = self._range_or_nothing(path, offset, length)
            if len(data) == length:
                return data
        for tries in range(_TRIES):
            time.sleep(_PAUSE * tries)  # somebody replaces it: let them come to an end
            size = self._info_size(path)
            wanted = max(size - offset, 0) if length is None else length
            if offset + wanted > size:
                raise past_end(self._where(path), offset, wanted, size)
            data = self._range_or_nothing(path, offset, wanted)
            if len(data) == wanted and (length is not None or self._info_size(path) == size):
                return data
        raise StorageError(
            f"the storage gave {len(data)} of {wanted} bytes from offset {offset}, {_TRIES} times",
            where=self._where(path),
            hint="try again; if nobody replaces the object all the time, report it to whoever keeps the fsspec file system",
        )

    def _range_or_nothing(self, path: str, offset: int, length: int) -> bytes:
        """Some storages raise what they like for a range beyond the end."""
        try:
            return bytes(self._fs.cat_file(self._key(path), start=offset, end=offset + length)) if length else b""
        except Exception as err:
            if not isinstance(mapped(err, path, "read", reading=True), NotFoundError) and offset + length > self._info_size(path):
                return b""
            raise

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Backend.read_into``."""
        view = byte_view(buffer, writable=True)
        view[:] = self.read(path, offset, view.nbytes)

    # ---- listing

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Backend.list``. The objects are those of the moment of the call."""
        check_prefix(prefix)
        below = prefix.rpartition("/")[0]
        base = f"{self._root}/{below}".rstrip("/")
        try:
            with fsspec_errors(self._where(below), "list", reading=True):
                self._fs.invalidate_cache()
                found = self._fs.find(base, detail=True)
        except NotFoundError:
            return iter(())
        skip = len(self._root) + 1
        entries = [Entry(name[skip:], int(info["size"])) for name, info in found.items() if name.startswith(f"{base}/") and _is_file(info)]
        return iter(sorted(entry for entry in entries if entry.path.startswith(prefix)))

    def children(self, prefix: str = "") -> builtins.list[str]:
        """See ``Backend.children``."""
        below = check_prefix(prefix).removesuffix("/")
        base = f"{self._root}/{below}".rstrip("/")
        try:
            with fsspec_errors(self._where(below), "list", reading=True):
                self._fs.invalidate_cache()
                found = self._fs.ls(base, detail=True)
        except NotFoundError:
            return []
        names = {i["name"].rstrip("/") + ("/" if i["type"] == "directory" else ""): i for i in found}
        below_base = (name.removeprefix(f"{base}/") for name, i in names.items() if name.startswith(f"{base}/") and i["type"] != "other")
        return sorted(name for name in below_base if name.strip("/"))

    # ---- writing

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Two callers at once: both may commit, and the later one holds."""
        key, where = self._key(path), self._where(path)
        check_size(size, where)
        if self._exists(path):
            raise ConflictError("cannot create: the name is taken", where=where, hint="use a fresh name, or delete the object")

        def send(content: bytes | Path) -> None:
            with fsspec_errors(where, "write the object"):
                if isinstance(content, bytes):
                    self._put(key, lambda: self._fs.pipe_file(key, content))
                else:
                    self._put(key, lambda: self._fs.put_file(str(content), key))
                arrived = self._info_size(path)
            if arrived != size:
                raise StorageError(f"{size} bytes were sent, but the object has {arrived}", where=where, hint="save again")

        return GatheringWriter(where=where, size=size, send=send, remove=lambda: self.delete(path))

    def _exists(self, path: str) -> bool:
        try:
            self.size(path)
        except NotFoundError:
            return False
        return True

    def _put(self, key: str, put: Callable[[], object]) -> None:
        """Call ``put``, which writes ``key``; if its directory is missing make that and try again: a ``delete`` may prune it meanwhile."""
        for tries_left in reversed(range(_TRIES)):
            try:
                put()
                return
            except FileNotFoundError:
                if not tries_left:
                    raise
                with suppress(FileNotFoundError):
                    self._fs.makedirs(key.rpartition("/")[0], exist_ok=True)

    def _only_if_absent(self) -> dict[str, Any]:
        """The argument of ``pipe_file`` by which this file system creates an object only if it is absent; none if it has none."""
        parameters = inspect.signature(self._fs.pipe_file).parameters
        return {"mode": "create"} if "mode" in parameters else {"overwrite": False} if "overwrite" in parameters else {}

    def publish(self, path: str, data: bytes, *, replaces: bytes | None) -> None:
        """See ``Backend.publish``, and the head of this file for what is weaker. Threads of one process take turns."""
        check_path(path)
        where = self._where(path)
        with self._publishing:
            self._check_holds(path, replaces)
            try:
                with fsspec_errors(where, "publish"):
                    self._publish(path, data, new=replaces is None)
            except CkptError as err:
                self._judge(path, data, replaces, err)

    def _judge(self, path: str, data: bytes, replaces: bytes | None, err: CkptError) -> None:
        """After an error: a lost answer is a success, and somebody else's content a conflict."""
        if isinstance(err, ConflictError):
            raise err
        held = self._content(path)
        if held == data:
            return
        if held != replaces:
            raise _conflict(self._where(path), held) from err
        raise err

    def _publish(self, path: str, data: bytes, *, new: bool) -> None:
        key = self._key(path)
        if not self._is(_DIRECTORIES):
            options = self._only_if_absent() if new else {}
            self._put(key, lambda: self._fs.pipe_file(key, data, **options))
            return
        aside = "/".join([*path.split("/")[:-1], f".publish-{secrets.token_hex(8)}.tmp"])

        def put_and_move() -> None:
            self._fs.pipe_file(self._key(aside), data)
            self._fs.mv(self._key(aside), key)

        try:
            self._put(key, put_and_move)
        except BaseException:
            self.delete(aside)
            raise

    def _check_holds(self, path: str, replaces: bytes | None) -> None:
        held = self._content(path)
        if held != replaces:
            raise _conflict(self._where(path), held, new=replaces is None)

    def _content(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except NotFoundError:
            return None

    def delete(self, path: str) -> None:
        """See ``Backend.delete``. Empty directories go where ``rmdir`` is known to be safe; elsewhere they may stay."""
        key = self._key(path)
        with fsspec_errors(self._where(path), "delete"):
            if self._exists(path):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(key)
            if self._is(_STRICT_RMDIR):
                self._prune(key.rpartition("/")[0])

    def _prune(self, directory: str) -> None:
        while directory != self._root:
            try:
                self._fs.rmdir(directory)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError:  # not empty, or not ours to remove
                return
            directory = directory.rpartition("/")[0]

    def prepare(self) -> None:
        """See ``Backend.prepare``. Writes a small object and removes it: only that tells whether the storage takes one."""
        probe = f".prepare-{secrets.token_hex(8)}.tmp"
        with fsspec_errors(self._url, "write to the root"):
            self._put(self._key(probe), lambda: self._fs.pipe_file(self._key(probe), b"probe"))
            self._fs.rm_file(self._key(probe))

    def modified(self, path: str) -> float | None:
        """See ``Backend.modified``."""
        check_path(path)
        with fsspec_errors(self._where(path), "get the time", reading=True):
            self._info_size(path)
            try:
                return float(self._fs.modified(self._key(path)).timestamp())
            except NotImplementedError:
                return None


def _is_file(info: Any) -> bool:
    return info.get("type", "file") == "file" and not info["name"].endswith("/")


def _conflict(where: str, held: bytes | None, *, new: bool = False) -> ConflictError:
    if new:
        return ConflictError(
            "cannot publish: the name is taken", where=where, hint="another save was first; use another name, or replace it"
        )
    found = "it is absent now" if held is None else "it holds something else now"
    return ConflictError(f"cannot replace: {found}", where=where, hint="another save was first; read it again and decide anew")


def _begin_anew() -> None:
    FsspecBackend._publishing = threading.Lock()  # a thread that held it is not in the child


os.register_at_fork(after_in_child=_begin_anew)
