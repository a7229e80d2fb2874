"""Which checksums a store compares is found out by trying, and said where it matters."""

from __future__ import annotations

import base64
import hashlib
import logging
import zlib
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from ckpt.errors import StorageError, UsageError
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.s3_backend import S3Backend
from ckpt.io_backends.s3_client import Checks, ConfirmedPart, check_whole, client_of
from ckpt.io_backends.s3_tries import ChangedError
from tests.s3.meddling import Seen, _Raw, answer, watch
from tests.s3.stores import ObjectStore, use

MIB = 1 << 20
DATA = bytes(range(251)) * (6 * MIB // 251)


def bucket_of(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[0]


def test_what_ceph_compares(object_store: ObjectStore, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if object_store.kind != "rgw":
        pytest.skip("needs Ceph")
    seen = watch(monkeypatch)
    put(S3Backend(s3_url, part=5 * MIB), "a", DATA)
    assert client_of().checks[bucket_of(s3_url)] == client_of().part_checks[bucket_of(s3_url)] == Checks(way="sha256")
    parts = [s.request for s in seen if s.is_part]
    assert len(parts) == 2
    for part in parts:
        assert part.headers["X-Amz-Content-SHA256"].decode() == hashlib.sha256(part.body.getbuffer()).hexdigest()
    assert everything(S3Backend(s3_url)) == {"a": DATA}


def test_what_moto_compares(moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing; but its ETags are the MD5 of the bytes."""
    use(moto_store, monkeypatch)
    seen = watch(monkeypatch)
    url = moto_store.new_prefix()
    put(S3Backend(url, part=5 * MIB), "a", DATA)
    assert client_of().checks[bucket_of(url)] == client_of().part_checks[bucket_of(url)] == Checks(way="md5", tags=True)
    for part in (s.request for s in seen if s.is_part):
        assert base64.b64decode(part.headers["Content-MD5"]) == hashlib.md5(part.body.getbuffer()).digest()


def compares_crc32(seen: Seen) -> Any:
    """What a store does that compares CRC-32, before moto sees the request."""
    sent = seen.request.headers.get("x-amz-checksum-crc32")
    if sent is None or base64.b64decode(sent) == zlib.crc32(seen.request.body.getbuffer()).to_bytes(4, "big"):
        return None
    return answer(seen.request, 400, "BadDigest")


def test_a_store_that_compares_crc32(moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    use(moto_store, monkeypatch)
    seen = watch(monkeypatch, compares_crc32)
    url = moto_store.new_prefix()
    backend = S3Backend(url, part=5 * MIB)
    put(backend, "a", DATA)
    backend.put_if("b", b"x", expected=None)
    assert client_of().checks[bucket_of(url)] == client_of().part_checks[bucket_of(url)] == Checks(way="crc32")
    assert all("x-amz-checksum-crc32" in s.request.headers for s in seen if s.is_part or s.path.endswith("/b"))
    begun = [s.request.headers for s in seen if s.operation == "CreateMultipartUpload" and ".prepare-" not in s.path]
    assert [headers["x-amz-checksum-algorithm"] for headers in begun] == [b"CRC32"]
    completed = [s.request.body for s in seen if s.operation == "CompleteMultipartUpload"]
    assert [body.count(b"<ChecksumCRC32>") for body in completed] == [2]
    assert everything(backend) == {"a": DATA, "b": b"x"}


def test_a_store_that_compares_checksums_of_objects_but_not_of_parts(moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    use(moto_store, monkeypatch)
    watch(monkeypatch, lambda seen: compares_crc32(seen) if seen.operation == "PutObject" else None)
    url = moto_store.new_prefix()
    put(S3Backend(url, part=5 * MIB), "a", DATA)
    assert client_of().checks[bucket_of(url)] == Checks(way="crc32")
    assert client_of().part_checks[bucket_of(url)] == Checks(way="md5", tags=True)
    assert list(S3Backend(url).pending_uploads()) == []


def test_without_the_right_to_end_uploads(
    moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that ends well needs no such right, so the trial of parts does not either."""
    use(moto_store, monkeypatch)
    seen = watch(monkeypatch, lambda s: answer(s.request, 403, "AccessDenied") if s.operation == "AbortMultipartUpload" else None)
    url = moto_store.new_prefix()
    with caplog.at_level(logging.WARNING, "ckpt"):
        put(S3Backend(url, part=5 * MIB), "a", DATA)
    assert everything(S3Backend(url)) == {"a": DATA}
    assert "stays there until a rule of the bucket ends it" in caplog.text
    assert [s.operation for s in seen].count("DeleteObject") == 1  # of the object that was tried; parts make none


def test_a_checksum_that_is_asked_for_and_not_compared(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_S3_CHECKSUM", "crc32")
    with pytest.raises(StorageError, match=r"(?s)does not compare the crc32 checksums of objects.*CKPT_S3_CHECKSUM=auto"):
        open_backend(s3_url).prepare()
    monkeypatch.setenv("CKPT_S3_CHECKSUM", "md5")
    put(S3Backend(s3_url, part=5 * MIB), "a", DATA)
    assert everything(open_backend(s3_url)) == {"a": DATA}
    monkeypatch.setenv("CKPT_S3_CHECKSUM", "sha1")
    with pytest.raises(UsageError, match="CKPT_S3_CHECKSUM"):
        open_backend(s3_url).prepare()


def test_a_store_that_compares_nothing(moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its ETags say nothing either."""

    def opaque(seen: Seen) -> Any:
        plain = not {"If-None-Match", "If-Match"} & set(seen.request.headers)
        probing = seen.operation == "PutObject" and ".prepare-" in seen.path and plain
        return AWSResponse(seen.request.url, 200, {"ETag": '"opaque"'}, _Raw(b"")) if probing else None

    use(moto_store, monkeypatch)
    watch(monkeypatch, opaque)
    backend = open_backend(moto_store.new_prefix())
    with caplog.at_level(logging.WARNING, "ckpt"):
        backend.prepare()
        backend.put_if("a", b"x", expected=None)
    assert [r.message for r in caplog.records if "compares no checksums of objects" in r.message] == [caplog.records[0].message]
    assert backend.read("a") == b"x"


def test_the_whole_object_is_compared_too() -> None:
    halves = (b"one", b"two")
    parts = [
        ConfirmedPart(tag=f'"{hashlib.md5(h).hexdigest()}"', crc=base64.b64encode(zlib.crc32(h).to_bytes(4, "big")).decode())
        for h in halves
    ]
    crc = base64.b64encode(zlib.crc32(b"".join(zlib.crc32(h).to_bytes(4, "big") for h in halves)).to_bytes(4, "big")).decode()
    md5 = hashlib.md5(b"".join(hashlib.md5(h).digest() for h in halves)).hexdigest()
    checks = Checks(way="md5", tags=True)
    for right in ({}, {"ChecksumCRC32": f"{crc}-2", "ETag": f'"{md5}-2"'}, {"ETag": "opaque-2x"}, {"ChecksumCRC32": crc}):
        check_whole(checks, parts, right)
    for wrong in ({"ChecksumCRC32": f"AAAA{crc[4:]}-2"}, {"ETag": f'"0{md5[1:]}-2"' if md5[0] != "0" else f'"1{md5[1:]}-2"'}):
        with pytest.raises(ChangedError, match="another object"):
            check_whole(checks, parts, wrong)
    assert [ConfirmedPart.of_text(part.text) for part in parts] == parts
