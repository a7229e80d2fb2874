"""Bytes out of an object store: ranges straight into the memory that asked for them, several at once where they are long; and single
requests that change a store.

Invariant: all bytes of one call are of one version of the object. Ranges that are asked for at once have to have one ETag; what is asked
for after an answer asks for its ETag.
"""

from __future__ import annotations

import http.client
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from ckpt.concurrency import run_tasks
from ckpt.errors import AccessError, CorruptError, NotFoundError, StorageError

from .checks import name_taken, past_end, put_conflict, too_large
from .s3_client import Checks, S3Client
from .s3_tries import FAILURES, ChangedError, Tries, TruncatedError, code_of, is_passing, is_refused, is_stale_key, status_of

RANGE = 32 << 20
"""Bytes of one request, where a longer range is read: a request takes as much processor time as some MiB."""
_FIRST = 16 << 20
"""Bytes that one request reads of an object whose size is not known yet."""
READERS = 8
"""Ranges of one call that are read at once."""
_QUICK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""Some stores, Ceph's among them, send the body when its head was acknowledged, which a kernel puts off for 40 ms if nobody asks."""
_STEP = 1 << 20
"""Bytes after which a reader notes how far it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One object of a store."""

    client: S3Client
    bucket: str
    key: str

    @property
    def where(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def names(self) -> dict[str, str]:
        """What every request about it says."""
        return {"Bucket": self.bucket, "Key": self.key}


class Head(NamedTuple):
    """What a store says of an object. ``version`` is empty in buckets that keep none, ``mark`` if another program wrote it, or the store
    keeps none."""

    size: int
    tag: str
    version: str
    mark: str


def head(key: Key, doing: str = "get the size") -> Head:
    def request(boto: Any, _: Tries) -> Head:
        answer = boto.head_object(**key.names)
        version, mark = str(answer.get("VersionId", "")), str(answer.get("Metadata", {}).get(_MARK, ""))
        return Head(int(answer["ContentLength"]), key.client.tag_of(answer), version, mark)

    return key.client.attempt(doing, key.where, request)


def read_tagged(key: Key, offset: int = 0, limit: int | None = None) -> tuple[bytes, str]:
    """The bytes from ``offset`` to the end, and the ETag of the object that they are of. More than ``limit`` are an error."""
    reading = _Rest(key, offset, limit)
    try:
        key.client.attempt("read", key.where, reading.request)
    except CorruptError:
        if reading.etag or not offset:
            raise
    else:
        view = memoryview(reading.memory)
        _read_ranges(key, offset + reading.done, view[reading.done :], reading.etag)
        return bytes(reading.memory), reading.etag
    there = head(key)  # there is no range of nothing
    if offset > there.size:
        raise past_end(key.where, offset, 0, there.size)
    return b"", there.tag


def read_into(key: Key, offset: int, view: memoryview) -> None:
    """Fill ``view``; bytes that are not there are an error."""
    if not view.nbytes:
        size = head(key).size
        if offset > size:
            raise past_end(key.where, offset, 0, size)
        return
    _read_ranges(key, offset, view, "")


def read_start(key: Key, length: int) -> tuple[bytes, int]:
    """The first ``length`` bytes, or fewer of a shorter object, and the object's size: one request, if no answer breaks off."""
    if length <= 0:
        return b"", head(key).size
    begun: list[tuple[_Range, int]] = []

    def request(boto: Any, tries: Tries) -> tuple[bytes, int]:
        if begun and begun[0][0].done:  # its head was whole. Goes on: else a store that always cuts answers off would be asked for ever
            reading, total = begun[0]
            if reading.done < reading.view.nbytes:
                reading.request(boto, tries)
            return bytes(reading.view), total
        try:
            answer = get(boto, key, f"bytes=0-{length - 1}", "", 0, 0)
        except CorruptError:
            return b"", 0  # of an empty object there is no range
        with _Body(answer) as body:
            total = _total(answer, 0, key.where)
            reading = _Range(key, 0, memoryview(bytearray(min(length, total))), etag=key.client.tag_of(answer))
            begun[:] = [(reading, total)]
            reading.receive(body, tries)
        return bytes(reading.view), total

    return key.client.attempt("read", key.where, request)


def _read_ranges(key: Key, offset: int, view: memoryview, etag: str) -> None:
    reach = offset + view.nbytes
    # Ranges are asked for in parallel, so no answer can tell the next question its ETag: if they differ in the end,
    # the object was replaced in between and the bytes are a mixture.
    reads = [_Range(key, offset + at, view[at : at + RANGE], etag=etag, reach=reach) for at in range(0, view.nbytes, RANGE)]
    run_tasks([read.run for read in reads], READERS, "ckpt-s3-read")
    if len({read.etag for read in reads}) > 1:
        raise _replaced(key)


class _Range:
    """One range on its way into ``view``. After a failure it goes on where it was. ``reach`` is how far the whole call reads."""

    def __init__(self, key: Key, offset: int, view: memoryview, *, etag: str = "", reach: int | None = None) -> None:
        self.key = key
        self.offset = offset
        self.view = view
        self.etag = etag
        self.done = 0
        self._reach = offset + view.nbytes if reach is None else reach

    def run(self) -> None:
        if self.done < self.view.nbytes:
            self.key.client.attempt("read", self.key.where, self.request)

    def request(self, boto: Any, tries: Tries) -> None:
        asked = f"bytes={self.offset + self.done}-{self.offset + self.view.nbytes - 1}"
        answer = get(boto, self.key, asked, self.etag, self.offset, self._reach)
        with _Body(answer) as body:
            total = _total(answer, self.offset + self.done, self.key.where)
            if self._reach > total:
                raise _beyond(boto, self.key, self.offset, self._reach)
            self.etag = self.key.client.tag_of(answer)
            self.receive(body, tries)

    def receive(self, body: _Body, tries: Tries) -> None:
        while self.done < self.view.nbytes:
            count = body.readinto(self.view[self.done : self.done + _STEP])
            if not count:
                raise TruncatedError(f"the answer ended {self.view.nbytes - self.done} bytes before the range does")
            self.done += count
            tries.went_on()


class _Rest:
    """The bytes from ``offset`` to an end that the first answer tells. Of a long object only the first ranges are taken; a body that breaks
    off is left as it is: what is missing is read as ranges."""

    def __init__(self, key: Key, offset: int, limit: int | None) -> None:
        self.key = key
        self.offset = offset
        self.limit = limit
        self.etag = ""
        self.memory = bytearray()
        self.done = 0

    def request(self, boto: Any, tries: Tries) -> None:
        answer = get(boto, self.key, f"bytes={self.offset}-" if self.offset else None, "", self.offset, self.offset)
        with _Body(answer) as body:
            # The first answer gives size, ETag and the first bytes in one request. Of a long object the rest is read
            # as parallel ranges; of most objects of a checkpoint (records, index tables, headers) there is no rest.
            size = int(answer["ContentLength"])
            if self.limit is not None and size > self.limit:
                raise too_large(self.key.where, size, self.limit)
            self.memory = bytearray(size)
            self.etag = self.key.client.tag_of(answer)
            reading = _Range(self.key, self.offset, memoryview(self.memory)[:_FIRST])
            with suppress(*FAILURES):
                reading.receive(body, tries)
            self.done = reading.done
        if self.done < reading.view.nbytes and self.offset + len(self.memory) != int(boto.head_object(**self.key.names)["ContentLength"]):
            raise TruncatedError("half an answer: the size in it is wrong")  # or the object was replaced: from the start, in any case


def get(boto: Any, key: Key, asked: str | None, etag: str, offset: int, reach: int) -> Any:
    """One answer; the errors that say something about the range are raised as such."""
    conditions = {k: v for k, v in (("Range", asked), ("IfMatch", etag)) if v}
    try:
        return boto.get_object(**key.names, **conditions)
    except ClientError as err:
        if status_of(err) == 412:
            raise _replaced(key) from err
        if status_of(err) == 416:
            raise _beyond(boto, key, offset, reach) from err
        raise


def _replaced(key: Key) -> CorruptError:
    return CorruptError("the object was replaced while it was read", where=key.where, hint="read it again")


def _beyond(boto: Any, key: Key, offset: int, reach: int) -> Exception:
    """The error for a range that reaches beyond the end, as an answer says; the size is asked for again, since that answer may be half."""
    size = int(boto.head_object(**key.names)["ContentLength"])
    if reach > size or offset >= size:
        return past_end(key.where, offset, reach - offset, size)
    return TruncatedError(f"half an answer: it ends before byte {reach} of {size}")


def _total(answer: Any, start: int, where: str) -> int:
    """Size of the object that a range was taken from."""
    content_range = str(answer.get("ContentRange", ""))
    unit, _, rest = content_range.partition(" ")
    span, _, total = rest.partition("/")
    if unit == "bytes" and span.startswith(f"{start}-") and total.isdigit():
        return int(total)
    if answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
        raise TruncatedError(f"half an answer: the range is {content_range or 'missing'}")
    if start == 0:
        return int(answer["ContentLength"])  # all of it
    raise StorageError(f"the store was asked for bytes from {start} and gave all", where=where, hint="it does not know ranges")


class _Body:
    """The body of one answer. Its connection is used again only if the body was read to its end."""

    def __init__(self, answer: Any) -> None:
        self._stream = answer["Body"]
        raw = getattr(self._stream, "_raw_stream", None)
        inner: Any = getattr(raw, "_fp", None)
        # Straight from the socket into the target: both layers above copy every byte once more.
        self._inner = inner if isinstance(inner, http.client.HTTPResponse) and inner.length is not None else None
        self._release = getattr(raw, "release_conn", None)
        if _QUICK is not None:
            with suppress(AttributeError, OSError):  # other classes than we know, or a connection that is gone: then it takes longer
                inner.fp.raw._sock.setsockopt(socket.IPPROTO_TCP, _QUICK, 1)

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._inner is not None and self._inner.isclosed() and self._release is not None:
            self._release()
        else:
            self._stream.close()

    def readinto(self, view: memoryview) -> int:
        source = self._stream if self._inner is None else self._inner
        return source.readinto(view) or 0


# Single requests that change a store: write a small object under a condition, delete one, end an upload.
#
# Requests whose answer gets lost are repeated, by us and by proxies on the way. The repetition of one that had its effect then looks like a
# conflict. So every object that we write has a mark of that one write in its metadata: after a conflict it tells whether we were first.

_MARK = "ckpt-write"
TOGETHER = 1000
"""Objects that one request deletes at most."""


def new_mark() -> str:
    return secrets.token_hex(8)


def marked(mark: str) -> dict[str, dict[str, str]]:
    """What the request says that writes an object, or begins to."""
    return {"Metadata": {_MARK: mark}}


def stored(key: Key) -> tuple[bytes | None, str]:
    """All bytes of a small object, and its ETag; None and no text if it is absent."""
    try:
        return read_tagged(key)
    except NotFoundError:
        return None, ""


def head_if_there(key: Key) -> Head | None:
    try:
        return head(key, "look at what is there")
    except NotFoundError:
        return None


def put(key: Key, data: bytes | memoryview, condition: dict[str, str], checks: Checks, mark: str = "") -> str:
    """Write a whole object under a condition, with this mark or a new one; gives its ETag."""
    mark = mark or new_mark()
    sums = checks.of(data)
    holds = dict(condition)

    def request(boto: Any, tries: Tries) -> str:
        try:
            tag = key.client.tag_of(boto.put_object(**key.names, **marked(mark), **sums.names, Body=key.client.body(data, tries), **holds))
        except ClientError as err:
            if status_of(err) != 412:
                raise
            ours = _tag_if_ours(key, data, mark, tries)
            if ours is None:
                raise put_conflict(key.where, None if "IfNoneMatch" in condition else b"", "it holds something else now") from err
            tag = ours
        try:
            sums.check(tag)
        except ChangedError:
            if condition:
                holds.clear()
                holds["IfMatch"] = tag  # what has arrived changed is ours to replace, and nothing else is
            raise
        return tag

    return key.client.attempt("write", key.where, request)


def _tag_if_ours(key: Key, data: bytes | memoryview, mark: str, tries: Tries) -> str | None:
    """The ETag of the object if this write made it."""
    there = head_if_there(key)
    if there is None or there.mark == mark:
        return there and there.tag
    if there.mark or not tries.failed:
        return None
    content, tag = stored(key)
    return tag if content is not None and content == data else None


def check_free(key: Key) -> None:
    """Raises ConflictError if there is an object of this name."""
    with suppress(NotFoundError):
        head(key)
        raise name_taken(key.where)


def delete(key: Key) -> None:
    """Delete an object; one that is absent is no error."""

    def request(boto: Any, _: Tries) -> None:
        try:
            boto.delete_object(**key.names)
        except ClientError as err:
            if status_of(err) != 404 or err.response["Error"].get("Code") == "NoSuchBucket":
                raise

    key.client.attempt("delete", key.where, request)


def delete_together(keys: Sequence[Key]) -> list[Key]:
    """Delete up to ``TOGETHER`` objects of one bucket in one request. Gives those that were not deleted so, and have to be one by one: a
    store may lack this request, and refuse single objects. Only what it says is deleted counts as that."""
    client, bucket = keys[0].client, keys[0].bucket
    if bucket in client.deletes_singly:
        return [*keys]

    def request(boto: Any, _: Tries) -> set[str]:
        try:
            answer = boto.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key.key} for key in keys]})
        except ClientError as err:
            if is_passing(err) or is_refused(err) or is_stale_key(err) or code_of(err) == "NoSuchBucket":
                raise
            client.deletes_singly.add(bucket)
            return set()
        return {str(gone.get("Key")) for gone in answer.get("Deleted", ())}

    try:
        gone = client.attempt(f"delete {len(keys)} objects", keys[0].where, request)
    except AccessError:
        return [*keys]  # the request may need a right of its own
    return [key for key in keys if key.key not in gone]


def abort_upload(key: Key, upload: str) -> None:
    """End an upload and free its parts; one that is gone is no error."""

    def request(boto: Any, _: Tries) -> None:
        try:
            boto.abort_multipart_upload(**key.names, UploadId=upload)
        except ClientError as err:
            if code_of(err) != "NoSuchUpload":
                raise

    with suppress(NotFoundError):
        key.client.attempt("end the upload", key.where, request)
