"""Object stores that speak S3: ``s3://bucket/prefix``.

Directories do not exist here: they are as long as an object lies in them. An object shows only once its Writer has committed. Credentials,
profile, region and endpoint are those of the options (``s3_options``), and else of the environment and of ``~/.aws`` at the time of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from ckpt import settings
from ckpt.concurrency import run_tasks
from ckpt.errors import CkptError, ConflictError, StorageError, UsageError

from . import s3_reading as objects
from .checks import byte_view, check_path, check_prefix, check_read, check_size, put_conflict
from .protocol import DELETES, Backend, CopySource, IOHints, ObjectMeta, PendingUpload, Writer
from .s3_client import LANES, Checks, ConfirmedPart, S3Client, client_of
from .s3_probing import abilities, assume, checks_of, conditional, part_checks_of, probe
from .s3_tries import DEFAULT, S3Options
from .s3_writer import PART, SINGLE, S3CopySource, S3Writer, part_size
from .writer_base import SharedWriter, check_total

# An object that several processes send parts of: one upload, whose id is the token.


class S3SharedObject(SharedWriter, S3Writer):
    """See ``SharedObject``. ``token`` is None in the process that begins it."""

    def __init__(self, key: objects.Key, size: int, part: int, *, conditional: bool, token: str | None) -> None:
        super().__init__(key, size, part, conditional=conditional, single=False)
        self.part_size = part
        self._owned = token is None
        self._id = self._started() if token is None else self._join(token)

    def _join(self, token: str) -> str:
        """Which checksums the parts have was said when the upload began; if it was CRC-32, all of them need it."""
        way, self._mark, self._upload = token.split(" ", 2)
        self._checks = Checks(way="crc32") if way == "crc32" else part_checks_of(self._key)
        return self._upload

    @property
    def token(self) -> str:
        return f"{self._checks.way} {self._mark} {self._id}"

    def _put(self, offset: int, views: list[memoryview]) -> None:
        length = sum(view.nbytes for view in views)
        if offset % self._part or (length % self._part and offset + length != self._size) or len(views) != 1:
            raise UsageError(f"these are not whole parts of {self._part} bytes: {length} at {offset}", where=self._key.where)
        run_tasks([partial(self._send_whole, p) for p in self._places(offset, views)], LANES, "ckpt-s3-write")

    def flush(self) -> dict[str, str]:
        """See ``SharedObject.flush``: the parts that this process sent, by number from 0."""
        return {str(number): part.text for number, part in self._parts.items()}

    def complete(self, receipts: Sequence[Mapping[str, str]], *, replace: bool) -> None:
        parts = {int(number): ConfirmedPart.of_text(text) for receipt in receipts for number, text in receipt.items()}
        check_total(sum(self._length(number) for number in parts), self._size, self._key.where)
        if sum(len(receipt) for receipt in receipts) != len(parts):
            raise UsageError("two processes sent the same part", where=self._key.where)
        self._parts = parts
        if replace:
            self._condition = {}
        else:
            objects.check_free(self._key)  # some stores know no conditions for uploads: then this question has to do
        self._state = "failed"  # until it did not
        try:
            self._complete()
        finally:
            self._perhaps_there = self._perhaps_there and not replace  # what is there may be what was there before
        self._state = "committed"

    def _close(self) -> None:
        if self._owned:
            super()._close()


# Publishing small objects under a condition, which the store itself decides: of two writers one wins, whatever happens to the answers.


def put_if(key: objects.Key, data: bytes, expected: bytes | None) -> None:
    """``Backend.put_if`` for one key."""
    if not conditional(key):
        # Look, then write, then look again: what another writer does in between is found out late, or not at all
        if objects.stored(key)[0] != expected:
            raise put_conflict(key.where, expected)
        objects.put(key, data, {}, checks_of(key))
        if objects.stored(key)[0] != data:
            raise put_conflict(key.where, data, "another writer replaced it at once")
    elif expected is None:
        objects.put(key, data, {"IfNoneMatch": "*"}, checks_of(key))
    else:
        content, etag = objects.stored(key)
        if content != expected:
            raise put_conflict(key.where, expected, "it is absent now" if content is None else "it holds something else now")
        _replace(key, data, etag)


def _replace(key: objects.Key, data: bytes, etag: str) -> None:
    # The compare-and-swap of object stores: If-Match with the ETag of the content that the caller expects. The ETag
    # comes from a read whose bytes were compared, so there is no moment between comparing and replacing.
    bare = etag.strip('"')
    if key.bucket in key.client.bare_tags:
        objects.put(key, data, {"IfMatch": bare}, checks_of(key))
        return
    try:
        objects.put(key, data, {"IfMatch": etag}, checks_of(key))
    except ConflictError:
        # Some versions of Ceph compare with the quotes that belong to an ETag, some without.
        if bare == etag or objects.stored(key)[1] != etag:
            raise
        objects.put(key, data, {"IfMatch": bare}, checks_of(key))
        key.client.bare_tags.add(key.bucket)


_SCHEME = "s3://"
_PIECE = 8 << 20
"""Each thread has room for one."""
_STRETCH = 64 << 20
"""As long as a chunk may be: a checkpoint of few tensors keeps the store as busy as one of many."""
_GAP = 1 << 20
"""A request takes about as long as this many bytes."""


class S3Backend(Backend):
    """The objects of a bucket below a prefix. Parts of an upload have at least ``part`` bytes, which is at least 5 MiB for most stores.
    Objects up to ``single`` bytes are sent in one request while there is room for them; by default that is one part, or 64 MiB if nothing
    is said about parts.

    Of two Writers of one path at most one commits if the object is small enough for one request, or the store keeps the condition of
    completing an upload, as AWS does and Ceph does not.
    """

    def __init__(self, url: str, *, part: int = PART, single: int | None = None, options: S3Options = DEFAULT) -> None:
        bucket, _, prefix = url.removeprefix(_SCHEME).partition("/")
        if not url.startswith(_SCHEME) or not bucket:
            raise UsageError(f"{url!r} is not the URL of a bucket", hint="write s3://bucket/prefix")
        settings.s3_checksum(), settings.conditional_put()  # a mistake is named before anything is asked of the store
        prefix = prefix.rstrip("/")
        self._bucket = bucket
        self._prefix = f"{check_path(prefix)}/" if prefix else ""
        self._part = part
        self._single = single if single is not None else SINGLE if part == PART else part
        self._options = options

    @property
    def url(self) -> str:
        """The root, without a trailing slash."""
        return f"{_SCHEME}{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def io_hints(self) -> IOHints:
        """Long ranges, many at once: each answer takes a while to begin."""
        return IOHints(read_size=_PIECE, split_read_size=_STRETCH, coalesce_gap=_GAP, concurrency=LANES, single_put_size=self._single)

    @property
    def _client(self) -> S3Client:
        return client_of(self._options)

    def _key(self, path: str) -> objects.Key:
        return objects.Key(client=self._client, bucket=self._bucket, key=self._prefix + check_path(path))

    # ---- reading

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """See ``Backend.read``. One request, if not several million bytes are wanted."""
        check_read(offset, length)
        key = self._key(path)
        if length is None:
            return objects.read_tagged(key, offset)[0]
        data = bytearray(length)
        objects.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_whole(self, path: str, limit: int) -> bytes:
        """See ``Backend.read_whole``. One request: the answer says the size before its bytes."""
        return objects.read_tagged(self._key(path), limit=limit)[0]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        check_read(offset, None)
        view = byte_view(buffer, writable=True)
        objects.read_into(self._key(path), offset, view)

    def read_start(self, path: str, length: int) -> tuple[bytes, int]:
        """See ``Backend.read_start``. One request."""
        check_read(0, length)
        return objects.read_start(self._key(path), length)

    def size(self, path: str) -> int:
        return objects.head(self._key(path)).size

    # ---- listing

    def modified(self, path: str) -> float:
        key = self._key(path)
        answer = self._client.attempt("get the time", key.where, lambda boto, _: boto.head_object(**key.names))
        return float(answer["LastModified"].timestamp())

    def now(self) -> float | None:
        """See ``Backend.now``: what the store dates an answer with, to the second."""
        try:
            answer = self._client.attempt(
                "ask for the time", self.url, lambda boto, _: boto.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
            )
            return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
        except (CkptError, KeyError, TypeError, ValueError):
            return None  # it refuses, or does not date its answers

    def version_token(self, path: str) -> str:
        """See ``Backend.version_token``: the ETag, and the version in buckets that keep versions. Times in whole seconds are too coarse."""
        there = objects.head(self._key(path))
        return f"etag {there.tag} version {there.version}" if there.version else f"etag {there.tag}"

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. Keys that are no paths, such as the empty ``a/`` that some tools make, are not given.

        Where a store lists directory by directory, as SeaweedFS does, all pages are kept from the first one on whose order is not ours.
        """
        pages = (self._entries(page) for page in self._pages(Prefix=self._prefix + check_prefix(prefix)))
        for page in pages:
            if page != sorted(page):
                yield from sorted(itertools.chain(page, *pages))
                return
            yield from page

    def _entries(self, page: Any) -> list[ObjectMeta]:
        paths = ((str(item["Key"]).removeprefix(self._prefix), int(item["Size"])) for item in page.get("Contents", ()))
        return [ObjectMeta(path, size) for path, size in paths if _is_path(path)]

    def list_dir(self, prefix: str = "") -> list[str]:
        directory = check_prefix(prefix).removesuffix("/")
        start = self._prefix + (f"{directory}/" if directory else "")
        names = []
        for page in self._pages(Prefix=start, Delimiter="/"):
            names += [str(p["Prefix"]) for p in page.get("CommonPrefixes", ())]
            names += [str(p["Key"]) for p in page.get("Contents", ())]
        below = (name.removeprefix(start) for name in names)
        return sorted(name for name in below if _is_path(name.removesuffix("/")))

    def version_tokens(self, directories: Sequence[str], name: str, *, skip: str) -> dict[str, str] | None:
        """See ``Backend.version_tokens``: ETags of a listing in which all paths of a directory that contain ``skip`` count as one."""
        tokens = {}
        try:
            for page in self._pages(Prefix=self._prefix, Delimiter=skip):
                for entry in page.get("Contents", ()):
                    directory, _, rest = str(entry["Key"]).removeprefix(self._prefix).partition("/")
                    if rest == name and entry.get("ETag"):
                        tokens[directory] = f"{entry['ETag']} {entry['Size']}"
        except StorageError:
            return None  # a store that knows no delimiter but the slash; if it is something else, who reads the objects hears of it
        return tokens

    def _pages(self, **what: str) -> Iterator[Any]:
        return self._all_pages("list", "list_objects_v2", {"ContinuationToken": "NextContinuationToken"}, what)

    def _all_pages(self, what: str, operation: str, goes_on: Mapping[str, str], names: dict[str, str]) -> Iterator[Any]:
        """``goes_on``: the arguments of the next request, and what the answer calls them."""
        where = f"{_SCHEME}{self._bucket}/{names['Prefix']}"
        while True:
            page = self._client.attempt(what, where, lambda boto, _: getattr(boto, operation)(Bucket=self._bucket, **names))
            yield page
            if not page.get("IsTruncated"):
                return
            names.update({name: page[next_name] for name, next_name in goes_on.items()})

    # ---- writing

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Where one conditional request writes the object, that request tells whether the name is taken."""
        key = self._key(path)
        check_size(size, key.where)
        keeps, part = conditional(key), part_size(size, self._part)
        room = size if part < size <= self._single and key.client.room.take(size) else 0
        writer = S3Writer(key, size, part, conditional=keeps, single=bool(room) or size <= part, room=room)
        if not (writer.single and keeps):
            try:
                objects.check_free(key)
            except BaseException:
                writer.abort()
                raise
        return writer

    @property
    def shares_files(self) -> bool:
        return True

    def create_shared(self, path: str, size: int, token: str | None = None) -> S3SharedObject:
        key = self._key(path)
        check_size(size, key.where)
        return S3SharedObject(key, size, part_size(size, self._part), conditional=token is None and conditional(key), token=token)

    def copy_source(self, path: str) -> CopySource | None:
        """See ``Backend.copy_source``. One request, for its ETag: only that version is copied."""
        key = self._key(path)
        return S3CopySource(key=key, tag=objects.head(key).tag)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        put_if(self._key(path), data, expected)

    def delete(self, path: str) -> None:
        objects.delete(self._key(path))

    def delete_many(self, paths: Collection[str]) -> None:
        """See ``Backend.delete_many``. One request for each thousand, where the store knows it."""
        keys = [self._key(path) for path in dict.fromkeys(paths)]
        if len(keys) > 1:
            left: list[objects.Key] = []
            batches = [keys[at : at + objects.TOGETHER] for at in range(0, len(keys), objects.TOGETHER)]
            run_tasks([lambda batch=batch: left.extend(objects.delete_together(batch)) for batch in batches], LANES, "ckpt-delete")  # type: ignore[misc]
            keys = left
        run_tasks([partial(objects.delete, key) for key in keys], DELETES, "ckpt-delete")

    def prepare(self) -> None:
        """See ``Backend.prepare``. Writes a small object and deletes it; ckpt makes no buckets."""
        key = self._key("checkpoint")
        probe(key)
        conditional(key)

    def abilities(self) -> str:
        """See ``Backend.abilities``: what ``probing`` tries, of parts too."""
        return abilities(self._key("checkpoint"))

    def assume(self, abilities: str) -> None:
        assume(self._key("checkpoint"), abilities)

    # ---- uploads that nobody ends

    def pending_uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        """See ``Backend.pending_uploads``: uploads that were neither completed nor aborted. Their parts cost as much as objects do."""
        start = self._prefix + check_prefix(prefix)
        goes_on = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._all_pages("list the uploads", "list_multipart_uploads", goes_on, {"Prefix": start}):
            for upload in page.get("Uploads", ()):
                path = str(upload["Key"]).removeprefix(self._prefix)
                if str(upload["Key"]).startswith(start) and _is_path(path):
                    yield PendingUpload(path=path, started=upload["Initiated"].timestamp(), token=str(upload["UploadId"]))

    def abort_upload(self, upload: PendingUpload) -> None:
        objects.abort_upload(self._key(upload.path), upload.token)


def _is_path(path: str) -> bool:
    try:
        check_path(path)
    except UsageError:
        return False
    return True
