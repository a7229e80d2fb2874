"""What a store can do, tried with small objects that are deleted at once: whether it keeps conditions, and which checksums it compares.

Many stores take headers that they do not know without a word, so only a request that has to be refused tells. Each process tries once per
bucket, of the ranks of a job only the leader. Parts are tried when the first file is sent in parts, since some stores compare the checksums
of whole objects only.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from botocore.exceptions import ClientError

from ckpt import settings
from ckpt.errors import AccessError, CkptError, StorageError
from ckpt.text import parse_json

from .s3_client import OFF, WAYS, Checks, Sums, md5_in
from .s3_reading import Key, abort_upload, delete, put
from .s3_tries import Tries, code_of, is_changed, is_passing, status_of, tag_of

log = logging.getLogger("ckpt")

_PROBE = b"probe"


_Send = Callable[[Any, Sums], str]
"""Sends the bytes of the probe with these checksums, by botocore's client; gives the ETag."""


# ---- conditions


def conditional(key: Key) -> bool:
    """Whether the bucket keeps conditions; tried with an object beside ``key`` the first time."""
    known = key.client.conditional
    if key.bucket not in known:
        probe(key)
    if not known[key.bucket] and settings.conditional_put() == "require":
        raise StorageError(
            "the store ignores or refuses conditional writes, so two saves at once could both believe that they were committed",
            where=f"s3://{key.bucket}",
            hint="set CKPT_CONDITIONAL_PUT=emulate if never more than one job saves to one place (docs/storage.md)",
        )
    return known[key.bucket]


def probe(key: Key) -> None:
    """Write a small object beside ``key`` and delete it; once for all places beside each other, such as the steps of a run. The first time
    in a bucket, also try what it can do."""
    client, bucket = key.client, key.bucket
    run = bucket, "/".join(key.key.split("/")[:-2])
    with client.trying:
        known = bucket in client.conditional and bucket in client.checks
        if known and run in client.writable:
            return
        with _beside(key) as beside:
            if known:
                put(beside, _PROBE, {}, client.checks[bucket])
            else:
                client.conditional[bucket] = _keeps_conditions(beside)
                ways = _candidates(settings.s3_checksum(), secure=client.secure())
                client.checks[bucket] = _first_compared(
                    beside, ways, lambda boto, sums: tag_of(boto.put_object(**beside.names, **sums.names, Body=_PROBE))
                )
        client.writable.add(run)


@contextmanager
def _beside(key: Key) -> Iterator[Key]:
    beside = _named_beside(key)
    try:
        yield beside
    except BaseException:
        with suppress(CkptError):  # why it could not be written is what counts
            delete(beside)
        raise
    delete(beside)


def _named_beside(key: Key) -> Key:
    folder = key.key.rpartition("/")[0]
    name = f".prepare-{secrets.token_hex(8)}.tmp"
    return replace(key, key=f"{folder}/{name}" if folder else name)


def _keeps_conditions(key: Key) -> bool:
    """Whether of two writes "if absent" the second is refused, and a write "if it is this" of something else."""
    try:
        _refuses(key, {"IfNoneMatch": "*"})
        return _refuses(key, {"IfNoneMatch": "*"}) and _refuses(key, {"IfMatch": '"0123456789abcdef0123456789abcdef"'})
    except StorageError as err:
        # It does not know the header. Other refusals, of expired credentials for example, may pass
        if isinstance(err.__cause__, ClientError) and (
            status_of(err.__cause__) == 501 or code_of(err.__cause__) in ("NotImplemented", "InvalidArgument")
        ):
            return False
        raise


def _refuses(key: Key, condition: dict[str, str]) -> bool:
    def request(boto: Any, _: Tries) -> bool:
        try:
            boto.put_object(**key.names, **condition, Body=_PROBE)
        except ClientError as err:
            if status_of(err) != 412:
                raise
            return True
        return False

    return key.client.attempt("write", key.where, request)


# ---- for other processes


def abilities(key: Key) -> str:
    """What was tried, for ``assume``; tried now if it was not."""
    tried = {"conditional": conditional(key), "whole": asdict(checks_of(key))}
    with suppress(CkptError):  # perhaps nobody sends parts; who does tries them, and fails
        tried["parts"] = asdict(part_checks_of(key))
    return json.dumps({"endpoint": key.client.endpoint, "bucket": key.bucket, "asked": settings.s3_checksum(), **tried})


def assume(key: Key, abilities: str) -> None:
    """Take what another process tried, if it reaches the same store in the same way, and was asked for the same."""
    client, bucket = key.client, key.bucket
    with client.trying, suppress(ValueError, KeyError, TypeError):
        results = parse_json(abilities)
        same = (results["endpoint"], results["bucket"], results["asked"]) == (client.endpoint, bucket, settings.s3_checksum())
        checks = {kind: Checks(**results[kind]) for kind in ("whole", "parts") if kind in results}
        if not same or bucket in client.checks or not {c.way for c in checks.values()} <= {*WAYS, OFF.way}:
            return
        client.conditional[bucket], client.checks[bucket] = bool(results["conditional"]), checks["whole"]
        if "parts" in checks:
            client.part_checks[bucket] = checks["parts"]
        if any(c.way == "sha256" for c in checks.values()):
            client.sign_bodies(on=True)


# ---- checksums


def checks_of(key: Key) -> Checks:
    """The checksums that the bucket compares of whole objects; tried the first time, as ``probe`` does."""
    known = key.client.checks
    if key.bucket not in known:
        probe(key)
    return known[key.bucket]


def part_checks_of(key: Key) -> Checks:
    """The same of the parts of an upload."""
    known = key.client.part_checks
    with key.client.trying:
        if key.bucket not in known:
            objects = checks_of(key)
            after = _candidates(settings.s3_checksum(), secure=key.client.secure())
            ways = after[[c.way for c in after].index(objects.way) :] if objects != OFF else ()
            known[key.bucket] = objects if not ways else _first_compared(_named_beside(key), ways, None)
    return known[key.bucket]


def _candidates(asked: str, *, secure: bool) -> tuple[Checks, ...]:
    """TLS protects the way too, so there only a checksum that costs next to nothing is worth its while."""
    return tuple(Checks(way=way) for way in WAYS if asked == way or (asked == "auto" and (way == "crc32" or not secure)))


def _first_compared(key: Key, ways: tuple[Checks, ...], send: _Send | None) -> Checks:
    """The first of these that the store compares; ``send`` is None for parts."""
    for checks in ways:
        with _scratch(key, checks, send) as sending:
            compared = _compared(key, checks, sending)
        if compared is not None:
            return compared
    asked = settings.s3_checksum()
    what = "objects" if send is not None else "parts"
    if asked not in ("auto", "off"):
        hint = "set CKPT_S3_CHECKSUM=auto"
        raise StorageError(f"the store does not compare the {asked} checksums of {what}", where=f"s3://{key.bucket}", hint=hint)
    if asked == "auto" and not key.client.secure():
        log.warning("s3://%s compares no checksums of %s: a bit that flips on the way there is found when it is read", key.bucket, what)
    return OFF


@contextmanager
def _scratch(key: Key, checks: Checks, send: _Send | None) -> Iterator[_Send]:
    """Where to send the probe: a whole object, or a part of an upload that is not completed."""
    if send is not None:
        yield send
        return
    names = {**key.names, **checks.upload}
    upload = key.client.attempt("begin an upload", key.where, lambda b, _: str(b.create_multipart_upload(**names)["UploadId"]))
    what = {**key.names, "UploadId": upload, "PartNumber": 1, "Body": _PROBE}
    try:
        yield lambda boto, sums: tag_of(boto.upload_part(**what, **sums.names))
    finally:
        try:
            abort_upload(key, upload)
        except AccessError as err:  # the bytes that are to be saved need no such right
            log.warning("%s; the upload of a few bytes stays there until a rule of the bucket ends it", err)


def _compared(key: Key, checks: Checks, send: _Send) -> Checks | None:
    """How the store compares these checksums, or None if it does not."""
    if checks.way == "sha256":
        before = key.client.signs
        key.client.sign_bodies(on=True)
        if _refuses_wrong(key, checks, send):
            return checks
        key.client.sign_bodies(on=before)
        return None
    if checks.way == "md5" and _tags_are_md5(key, send):
        return replace(checks, tags=True)
    return checks if _refuses_wrong(key, checks, send) else None


def _tags_are_md5(key: Key, send: _Send) -> bool:
    expected = Checks(way="md5", tags=True).of(_PROBE)
    tags = (key.client.attempt("try a checksum", key.where, lambda boto, _: send(boto, Sums())) for _ in range(2))
    return any(md5_in(tag) == expected.md5 for tag in tags)  # the first may be of bytes that changed on their way


def _refuses_wrong(key: Key, checks: Checks, send: _Send) -> bool:
    """Whether the probe is refused with a checksum that is not its own, and not refused with its own."""

    def wrong(boto: Any, _: Tries) -> ClientError | None:
        try:
            with _spoiled(boto, key, checks):
                send(boto, checks.wrong())
        except ClientError as err:
            if is_passing(err) or status_of(err) not in (400, 403, 422, 501):
                raise
            return err
        return None

    def right(boto: Any, _: Tries) -> bool:
        try:
            send(boto, checks.of(_PROBE))
        except ClientError as err:
            if is_passing(err) or is_changed(err):
                raise
            return False
        return True

    refusal = key.client.attempt("try a checksum", key.where, wrong)
    if refusal is None:
        return False
    return is_changed(refusal) or key.client.attempt("try a checksum", key.where, right)


@contextmanager
def _spoiled(boto: Any, key: Key, checks: Checks) -> Iterator[None]:
    """While it lasts a signed body is replaced after the signature, in the requests about this key."""
    if checks.way != "sha256":
        yield
        return

    def spoil(request: Any, **_: Any) -> None:
        if key.key.rpartition("/")[2] in request.url and request.body:
            request.body = _PROBE[::-1]

    name = f"spoil-{key.key}"
    boto.meta.events.register("before-send.s3", spoil, unique_id=name)
    try:
        yield
    finally:
        boto.meta.events.unregister("before-send.s3", unique_id=name)
