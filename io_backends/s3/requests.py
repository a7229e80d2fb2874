"""Single requests that change a store: write a small object under a condition, delete one, end an upload.

Requests whose answer gets lost are repeated, by us and by proxies on the way. The repetition of one that had its effect then looks like a
conflict. So every object that we write has a mark of that one write in its metadata: after a conflict it tells whether we were first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError

from ckpt.errors import AccessError, ConflictError, NotFoundError

from .checksums import Checks
from .reading import Key, head, read_tagged
from .tries import ChangedError, Tries, code_of, is_passing, is_refused, is_stale_key, status_of

_MARK = "ckpt-write"
TOGETHER = 1000
"""Objects that one request deletes at most."""


def new_mark() -> str:
    return secrets.token_hex(8)


def marked(mark: str) -> dict[str, dict[str, str]]:
    """What the request says that writes an object, or begins to."""
    return {"Metadata": {_MARK: mark}}


def mark_of(key: Key) -> tuple[str, str] | None:
    """Mark and ETag of the object; None if there is none. The mark is empty if another program wrote it, or the store keeps none."""

    def request(boto: Any, _: Tries) -> tuple[str, str]:
        answer = boto.head_object(**key.names)
        return str(answer.get("Metadata", {}).get(_MARK, "")), key.client.tag_of(answer)

    try:
        return key.client.attempt("look at what is there", key.where, request)
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
                raise conflict(key, "the name is taken" if "IfNoneMatch" in condition else "it holds something else now") from err
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
    there = mark_of(key)
    if there is None or there[0] == mark:
        return there and there[1]
    if there[0] or not tries.failed:
        return None
    with suppress(NotFoundError):
        content, tag = read_tagged(key)
        return tag if content == data else None
    return None


def conflict(key: Key, what: str) -> ConflictError:
    return ConflictError(f"cannot publish: {what}", where=key.where, hint="another save was first; read it again and decide anew")


def check_free(key: Key) -> None:
    """Raises ConflictError if there is an object of this name."""
    with suppress(NotFoundError):
        head(key)
        raise ConflictError("cannot create: the name is taken", where=key.where, hint="use a fresh name, or delete the object")


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
