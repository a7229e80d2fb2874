"""Any storage that has an fsspec file system: ``gs://``, ``az://``, ``hf://``, ``sftp://`` and the rest, by what all of them can do.

Weaker than the backends made for one storage (docs/storage.md says what may go wrong):

* ``publish`` reads, compares and writes. Two processes that replace the same object at the same moment may both believe that they did. New
  objects are safe on object stores, which are tried whether they create only what is absent (``fsspec_conditions``), and not elsewhere.
* ``create`` promises nothing to two callers that take the same path at once.
* How durable a finished write is, and how failed requests are tried again, is up to the file system.

Invariant: no listing of a file system's cache is believed: caches are dropped before every question.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar

from ckpt.concurrency import ProcessLock, map_tasks
from ckpt.errors import CkptError, NotFoundError, StorageError

from .checks import byte_view, check_path, check_prefix, check_read, check_size, name_taken, past_end, put_conflict, too_large
from .fsspec_errors import mapped, only_if_absent
from .fsspec_filesystem import DIRECTORIES, IN_MEMORY, STRICT_RMDIR, TRIES, FsspecPlace
from .posix_files import storage_errors
from .protocol import Backend, IOHints, ObjectMeta, Writer
from .writer_base import GatheringWriter

_PAUSE = 0.03
"""Seconds, growing with each try."""
_FEW = 32
"""Objects of a directory that are listed with those of others."""
_SEVERAL = 5
"""Directories of which listings take fewer requests than to read an object of each."""


class FsspecBackend(Backend):
    """The storage at a URL that fsspec understands, by the options of its file system, or by a file system that is there already.

    Options win over fsspec's own configuration, and that over what the file system finds in the environment.
    """

    _publishing: ClassVar[ProcessLock] = ProcessLock()

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, filesystem: Any = None) -> None:
        self._place = FsspecPlace(url, storage_options or {}, filesystem)
        self._url = self._place.url

    @property
    def _fs(self) -> Any:
        return self._place.fs

    @property
    def url(self) -> str:
        """The URL, without a trailing slash."""
        return self._url

    @property
    def io_hints(self) -> IOHints:
        """Long ranges, several at once: each answer takes a while to begin."""
        return IOHints(read_size=8 << 20, coalesce_gap=256 << 10, concurrency=8)

    # ---- reading

    def _info_size(self, path: str) -> int:
        self._fs.invalidate_cache()
        info = self._fs.info(self._place.key(path))
        if info["type"] != "file":
            raise NotFoundError(
                "cannot read: it is not a file", where=self._place.where(path), hint="check the URL; `ckpt ls` lists the checkpoints there"
            )
        return int(info["size"])

    def size(self, path: str) -> int:
        check_path(path)
        with self._place.errors(self._place.where(path), "get the size", reading=True):
            return self._info_size(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_read(offset, length)
        check_path(path)
        try:
            with self._place.errors(self._place.where(path), "read", reading=True):
                return self._read(path, offset, length)
        except NotFoundError as err:
            self._place.check_bucket(err)
            raise

    def _read(self, path: str, offset: int, length: int | None) -> bytes:
        """The size is asked for only where the bytes alone do not show that they are all."""
        if length:
            data = self._range_or_nothing(path, offset, length)
            if len(data) == length:
                return data
        for tries in range(TRIES):
            time.sleep(_PAUSE * tries)  # somebody replaces it: let them come to an end
            size = self._info_size(path)
            wanted = max(size - offset, 0) if length is None else length
            if offset + wanted > size:
                raise past_end(self._place.where(path), offset, wanted, size)
            data = self._range_or_nothing(path, offset, wanted)
            if len(data) == wanted and (length is not None or self._info_size(path) == size):
                return data
        raise StorageError(
            f"the storage gave {len(data)} of {wanted} bytes from offset {offset}, {TRIES} times",
            where=self._place.where(path),
            hint="try again; if no process keeps replacing the object, report it to the maintainers of the fsspec file system",
        )

    def _range_or_nothing(self, path: str, offset: int, length: int) -> bytes:
        """Some storages raise what they like for a range beyond the end."""
        try:
            data = bytes(self._fs.cat_file(self._place.key(path), start=offset, end=offset + length)) if length else b""
        except Exception as err:
            if not isinstance(mapped(err, path, "read", reading=True), NotFoundError) and offset + length > self._info_size(path):
                return b""
            raise
        if len(data) > length:
            message = f"the storage was asked for {length} bytes and gave {len(data)}: it does not know ranges"
            hint = "serve the files with a server that does, as nginx and Apache do, or copy them to this machine first"
            raise StorageError(message, where=self._place.where(path), hint=hint)
        return data

    def read_whole(self, path: str, limit: int) -> bytes:
        """See ``Backend.read_whole``. A byte more is asked for than there were: if it does not come, these are all."""
        size = self.size(path)
        if size > limit:
            raise too_large(self._place.where(path), size, limit)
        with self._place.errors(self._place.where(path), "read", reading=True):
            data = self._range_or_nothing(path, 0, size + 1)
        return data if len(data) == size else self.read(path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        view = byte_view(buffer, writable=True)
        view[:] = self.read(path, offset, view.nbytes)

    # ---- listing

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. The objects are those of the moment of the call."""
        check_prefix(prefix)
        below = prefix.rpartition("/")[0]
        base = f"{self._place.root}/{below}".rstrip("/")
        try:
            with self._place.errors(self._place.where(below), "list", reading=True):
                self._fs.invalidate_cache()
                listed = self._fs.find(base, detail=True)
        except NotFoundError:
            listed = {}
        if not listed:
            self._place.check_bucket()
        skip = len(self._place.root) + 1
        entries = [
            ObjectMeta(name[skip:], int(info["size"]))
            for name, info in listed.items()
            if name.startswith(f"{base}/") and (info.get("type", "file") == "file" and (not info["name"].endswith("/")))
        ]
        return iter(sorted(entry for entry in entries if entry.path.startswith(prefix)))

    def list_dir(self, prefix: str = "") -> list[str]:
        below = check_prefix(prefix).removesuffix("/")
        base = f"{self._place.root}/{below}".rstrip("/")
        try:
            with self._place.errors(self._place.where(below), "list", reading=True):
                self._fs.invalidate_cache()
                listed = self._fs.ls(base, detail=True)
        except NotFoundError:
            listed = []
        if not listed:
            self._place.check_bucket()
        names = {i["name"].rstrip("/") + ("/" if i["type"] == "directory" else ""): i for i in listed}
        below_base = (name.removeprefix(f"{base}/") for name, i in names.items() if name.startswith(f"{base}/") and i["type"] != "other")
        return sorted(name for name in below_base if name.strip("/"))

    def version_tokens(self, directories: Sequence[str], name: str, *, skip: str) -> dict[str, str] | None:
        """See ``Backend.version_tokens``: of object stores whose listings tell generations or ETags. Directories of few objects are listed
        all at once, others each by itself and without what is in directories below: a listing has a thousand objects a request."""
        if len(directories) < _SEVERAL or self._place.speaks(DIRECTORIES):
            return None
        with self._place.errors(self._url, "list", reading=True):
            sample = self._fs.find(self._place.key(directories[len(directories) // 2]), detail=True)
            if sample and not any(map(_version, sample.values())):
                return None
            self._fs.invalidate_cache()
            if len(sample) <= _FEW:
                infos: Iterable[dict[str, Any]] = self._fs.find(self._place.root, detail=True).values()
            else:
                infos = chain.from_iterable(map_tasks(self._infos, directories, self.io_hints.concurrency, "ckpt-look"))
            below = ((info, *info["name"][len(self._place.root) + 1 :].partition("/")) for info in infos)
            tokens = {directory: _version(info) for info, directory, _, rest in below if rest == name}
        return {directory: token for directory, token in tokens.items() if token is not None}

    def _infos(self, directory: str) -> list[dict[str, Any]]:
        try:
            listed: list[dict[str, Any]] = self._fs.ls(self._place.key(directory), detail=True)
        except FileNotFoundError:  # it was removed since the root was listed
            return []
        return listed

    # ---- writing

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Two callers at once: both may commit, and the later one holds."""
        key, where = self._place.key(path), self._place.where(path)
        check_size(size, where)
        if self._exists(path):
            raise name_taken(where)

        def send(content: bytes | Path) -> None:
            with self._place.errors(where, "write the object"):
                if isinstance(content, bytes):
                    self._place.put(key, lambda: self._fs.pipe_file(key, content))
                else:
                    self._place.put(key, lambda: self._fs.put_file(str(content), key))
                arrived = self._info_size(path)
            if arrived != size:
                raise StorageError(f"{size} bytes were sent, but the object has {arrived}", where=where, hint="save again")

        with storage_errors("the directory for temporary files", "make a temporary file"):  # looked for only if one is needed
            file = tempfile.NamedTemporaryFile(prefix="ckpt-") if size > IN_MEMORY else None  # noqa: SIM115  the Writer closes it
        return GatheringWriter(where=where, size=size, send=send, remove=lambda: self.delete(path), file=file)

    def _exists(self, path: str) -> bool:
        try:
            self.size(path)
        except NotFoundError:
            return False
        return True

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        """See ``Backend.put_if``, and the head of this file for what is weaker. Threads of one process take turns."""
        check_path(path)
        where = self._place.where(path)
        conditional = self._place.is_conditional()
        with self._publishing:
            self._check_holds(path, expected)
            try:
                with self._place.errors(where, "publish"):
                    self._publish(path, data, only_if_absent(self._fs) if conditional and expected is None else {})
            except CkptError as err:
                self._judge(path, data, expected, err)
            if not conditional and self._content(path) != data:
                raise _conflict(where, data, self._content(path))

    def _judge(self, path: str, data: bytes, expected: bytes | None, err: CkptError) -> None:
        """After an error: a lost answer is a success, and somebody else's content a conflict."""
        if isinstance(err, NotFoundError):
            raise err
        content = self._content(path)
        if content == data:
            return
        if content != expected:
            raise _conflict(self._place.where(path), data, content) from err
        raise err

    def _publish(self, path: str, data: bytes, condition: dict[str, Any]) -> None:
        key = self._place.key(path)
        if not self._place.speaks(DIRECTORIES):
            self._place.put(key, lambda: self._fs.pipe_file(key, data, **condition))
            return
        aside = "/".join([*path.split("/")[:-1], f".publish-{secrets.token_hex(8)}.tmp"])

        def put_and_move() -> None:
            self._fs.pipe_file(self._place.key(aside), data)
            self._fs.mv(self._place.key(aside), key)

        try:
            self._place.put(key, put_and_move)
        except BaseException:
            self.delete(aside)
            raise

    def _check_holds(self, path: str, expected: bytes | None) -> None:
        content = self._content(path)
        if content != expected:
            raise _conflict(self._place.where(path), expected, content)

    def _content(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except NotFoundError:
            return None

    def delete(self, path: str) -> None:
        """See ``Backend.delete``. Empty directories go where ``rmdir`` is known to be safe; elsewhere they may stay."""
        key = self._place.key(path)
        parts = path.split("/") if self._place.on_this_machine() is not None else []
        for parent in accumulate(parts[:-1], "{}/{}".format):
            target = self.link(parent)
            if target is not None:
                message = f"nothing is removed beyond a symbolic link, and this is one to {target}"
                hint = "remove the link itself, or what is behind it by its own path"
                raise StorageError(message, where=self._place.where(parent), hint=hint)
        with self._place.errors(self._place.where(path), "delete"):
            if self._place.on_this_machine(path) is not None and self.link(path) is not None:
                self._fs.rm_file(key)
            elif self._exists(path):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(key)
            if self._place.speaks(STRICT_RMDIR):
                self._prune(key.rpartition("/")[0])

    def link(self, path: str = "") -> str | None:
        """See ``Backend.link``: links of this machine's file systems are known, whatever name fsspec has for these."""
        file = self._place.on_this_machine(path)
        return f"{self._place.scheme}://{os.path.realpath(file)}" if file is not None and os.path.islink(file) else None

    def _prune(self, directory: str) -> None:
        while directory != self._place.root:
            try:
                self._fs.rmdir(directory)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError:  # not empty, or not ours to remove
                return
            directory = directory.rpartition("/")[0]

    def prepare(self) -> None:
        """See ``Backend.prepare``. Writes a small object and removes it: only that tells whether the storage takes one."""
        self._place.prepare()

    def modified(self, path: str) -> float | None:
        check_path(path)
        with self._place.errors(self._place.where(path), "get the time", reading=True):
            self._info_size(path)
            try:
                return float(self._fs.modified(self._place.key(path)).timestamp())
            except NotImplementedError:
                return None


def _version(info: dict[str, Any]) -> str | None:
    """A text that is another one once the object was replaced; None if the listing does not tell."""
    token = next((info[key] for key in ("generation", "etag", "ETag") if info.get(key)), None)
    return None if token is None else f"{token} {info.get('size')}"


def _conflict(where: str, expected: bytes | None, content: bytes | None) -> CkptError:
    return put_conflict(where, expected, "it is absent now" if content is None else "it holds something else now")
