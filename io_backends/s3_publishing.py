"""Publishing small objects under a condition, which the store itself decides: of two writers one wins, whatever happens to the answers.

A request whose answer got lost may have had its effect; its repetition then looks like a conflict. So after a conflict that follows a lost
answer the object is read back: if it holds what we wrote, we were first. Whether a store keeps conditions at all is tried once for each
bucket, since some ignore them silently.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError

from ckpt import settings
from ckpt.errors import CkptError, ConflictError, NotFoundError, StorageError

from .s3_errors import Tries, code_of, status_of
from .s3_reading import Key, read_tagged


def publish(key: Key, data: bytes, replaces: bytes | None) -> None:
    """``Backend.publish`` for one key."""
    if not conditional(key):
        _publish_unconditionally(key, data, replaces)
    elif replaces is None:
        put(key, data, {"IfNoneMatch": "*"})
    else:
        _replace(key, data, _tag_of(key, replaces))


def put(key: Key, data: bytes | memoryview, condition: dict[str, str]) -> None:
    """Write a whole small object under a condition.

    Raises:
        ConflictError: the condition does not hold.
    """

    def request(boto: Any, tries: Tries) -> None:
        try:
            boto.put_object(**key.names, Body=key.client.body(data), **condition)
        except ClientError as err:
            if status_of(err) != 412:
                raise
            if tries.failed and _holds(key, data):
                return  # an earlier try had its effect
            raise _conflict(key, "the name is taken" if "IfNoneMatch" in condition else "it holds something else now") from err

    key.client.attempt("write", key.where, request)


def _replace(key: Key, data: bytes, etag: str) -> None:
    try:
        put(key, data, {"IfMatch": etag})
    except ConflictError:
        # Some versions of Ceph compare with the quotes that belong to an ETag, some without.
        if not etag.startswith('"') or _etag(key) != etag:
            raise
        put(key, data, {"IfMatch": etag.strip('"')})


def _tag_of(key: Key, content: bytes) -> str:
    """The ETag of the object, which holds exactly ``content``."""
    try:
        found, etag = read_tagged(key)
    except NotFoundError as err:
        raise _conflict(key, "it is absent now") from err
    if found != content:
        raise _conflict(key, "it holds something else now")
    return etag


def _etag(key: Key) -> str:
    try:
        return read_tagged(key)[1]
    except NotFoundError:
        return ""


def _holds(key: Key, data: bytes | memoryview) -> bool:
    try:
        return read_tagged(key)[0] == data
    except NotFoundError:
        return False


def _conflict(key: Key, what: str) -> ConflictError:
    return ConflictError(f"cannot publish: {what}", where=key.where, hint="another save was first; read it again and decide anew")


# ---- does the store keep conditions?


def conditional(key: Key) -> bool:
    """Whether the bucket keeps conditions; tried with an object beside ``key`` the first time.

    Raises:
        StorageError: it does not, and nobody has said that this is good enough.
    """
    known = key.client.conditional
    if key.bucket not in known:
        probe(key)
    if not known[key.bucket] and settings.conditional_put() == "require":
        raise StorageError(
            "the store ignores or refuses conditional writes, so two saves at once could both believe that they were committed",
            where=f"s3://{key.bucket}",
            hint="set CKPT_CONDITIONAL_PUT=emulate if never more than one job saves to one place (docs/object-storage.md)",
        )
    return known[key.bucket]


def probe(key: Key) -> None:
    """Write a small object beside ``key`` and delete it. The first time in a bucket, also try whether it keeps conditions.

    Raises:
        NotFoundError: there is no such bucket.
        StorageError: nothing can be written there.
    """
    folder = key.key.rpartition("/")[0]
    name = f".prepare-{secrets.token_hex(8)}.tmp"
    beside = Key(client=key.client, bucket=key.bucket, key=f"{folder}/{name}" if folder else name)
    known = key.client.conditional
    try:
        if key.bucket in known:
            put(beside, b"probe", {})
        else:
            known[key.bucket] = _keeps_conditions(beside)
    except BaseException:
        with suppress(CkptError):  # why it could not be written is what counts
            delete(beside)
        raise
    delete(beside)


def _keeps_conditions(key: Key) -> bool:
    """Whether of two writes "if absent" the second is refused, and a write "if it is this" of something else."""
    try:
        put(key, b"probe", {"IfNoneMatch": "*"})
        return _refuses(key, {"IfNoneMatch": "*"}) and _refuses(key, {"IfMatch": '"0123456789abcdef0123456789abcdef"'})
    except StorageError as err:
        if _is_unknown(err.__cause__):
            return False
        raise


def _is_unknown(err: BaseException | None) -> bool:
    """Whether a store says that it does not know a condition. Other refusals, of expired credentials for example, may pass."""
    return isinstance(err, ClientError) and (status_of(err) == 501 or code_of(err) in ("NotImplemented", "InvalidArgument"))


def _refuses(key: Key, condition: dict[str, str]) -> bool:
    try:
        put(key, b"again", condition)
    except ConflictError:
        return True
    return False


def delete(key: Key) -> None:
    """Delete an object; one that is absent is no error."""

    def request(boto: Any, _: Tries) -> None:
        try:
            boto.delete_object(**key.names)
        except ClientError as err:
            if status_of(err) != 404 or err.response["Error"].get("Code") == "NoSuchBucket":
                raise

    key.client.attempt("delete", key.where, request)


def _publish_unconditionally(key: Key, data: bytes, replaces: bytes | None) -> None:
    """Look, then write, then look again: what another writer does in between is found out late, or not at all."""
    try:
        found: bytes | None = read_tagged(key)[0]
    except NotFoundError:
        found = None
    if found != replaces:
        raise _conflict(key, "the name is taken" if replaces is None else "it is absent or holds something else now")
    put(key, data, {})
    if not _holds(key, data):
        raise _conflict(key, "another writer replaced it at once")
