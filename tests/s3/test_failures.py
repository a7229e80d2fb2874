"""Answers and requests that get lost, busy stores, bodies that break off, keys that expire: nothing is lost, and no success is false."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from ckpt.errors import AccessError, ConflictError, CorruptError, StorageError
from ckpt.io_backends import Writer, open_backend
from ckpt.io_backends import s3_client as s3_client
from ckpt.io_backends import s3_reading as s3_reading
from ckpt.io_backends import s3_tries as s3_tries
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.s3_backend import S3Backend
from tests.s3.meddling import Seen, _Raw, answer, cutting, lost_answer, lost_request, slow, watch
from tests.s3.stores import KEYS, ObjectStore, use

MIB = 1 << 20
PUBLISHED = "run/checkpoint.json"


class First:
    """Meddles with the first ``times`` requests of one operation."""

    def __init__(self, operation: str, how: Any, times: int = 1, path: str = "") -> None:
        self.operation, self.how, self.left, self.path = operation, how, times, path

    def __call__(self, seen: Seen) -> Any:
        if seen.operation != self.operation or self.left == 0 or not seen.path.endswith(self.path):
            return None
        self.left -= 1
        return self.how(seen.request)


def _in_vain(seen: Seen) -> bool:
    """Ceph 16 refuses ETags with quotes; we try those first."""
    return str(seen.request.headers.get("If-Match", "")).lstrip("b'").startswith('"')


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("how", [lost_answer, lost_request, lambda request: answer(request, 503, "SlowDown")])
def test_a_commit_whose_answer_got_lost_is_no_conflict(s3_url: str, monkeypatch: pytest.MonkeyPatch, how: Any, old: bytes | None) -> None:
    meddler = First("PutObject", how, times=2, path=PUBLISHED)
    seen = watch(monkeypatch, lambda s: None if not armed or _in_vain(s) else meddler(s))
    armed: list[int] = []
    backend = open_backend(s3_url)
    if old is not None:
        backend.put_if(PUBLISHED, old, expected=None)
    armed.append(1)
    backend.put_if(PUBLISHED, b"new", expected=old)
    assert meddler.left == 0
    assert backend.read(PUBLISHED) == b"new"
    assert [s.operation for s in seen].count("PutObject") >= 3


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_lost_commit_that_another_overtook_is_a_conflict(s3_url: str, monkeypatch: pytest.MonkeyPatch, old: bytes | None) -> None:
    backend = open_backend(s3_url)
    armed: list[int] = []

    def overtake(seen: Seen) -> Any:
        if armed and seen.operation == "PutObject" and seen.path.endswith(PUBLISHED):
            armed.clear()
            backend.put_if(PUBLISHED, b"theirs", expected=old)
            return lost_request(seen.request)
        return None

    watch(monkeypatch, overtake)
    if old is not None:
        backend.put_if(PUBLISHED, old, expected=None)
    armed.append(1)
    with pytest.raises(ConflictError):
        backend.put_if(PUBLISHED, b"ours", expected=old)
    assert backend.read(PUBLISHED) == b"theirs"


@pytest.mark.parametrize(("size", "operation"), [(100, "PutObject"), (11 * MIB, "CompleteMultipartUpload")])
def test_an_object_whose_last_answer_got_lost(s3_url: str, monkeypatch: pytest.MonkeyPatch, size: int, operation: str) -> None:
    watch(monkeypatch, First(operation, lost_answer, path="data/a"))
    backend = S3Backend(s3_url, part=5 * MIB)
    data = bytes(range(256)) * (size // 256 + 1)
    put(backend, "data/a", data[:size])
    assert backend.read("data/a") == data[:size]
    assert list(backend.pending_uploads()) == []


@pytest.mark.alone
@pytest.mark.parametrize(("size", "operation"), [(100, "PutObject"), (11 * MIB, "CompleteMultipartUpload"), (11 * MIB, "UploadPart")])
def test_what_cannot_be_committed_leaves_nothing(s3_url: str, monkeypatch: pytest.MonkeyPatch, size: int, operation: str) -> None:
    """The object may come into being, but the store does not answer any more until it is too late."""
    monkeypatch.setenv("CKPT_TIMEOUT", "3")
    gone: list[Seen] = []

    def fail(seen: Seen) -> Any:
        if not seen.path.endswith("data/a") or aborting:
            return None
        if seen.operation == operation:
            gone.append(seen)
            return lost_answer(seen.request)
        return lost_request(seen.request) if gone else None

    aborting: list[int] = []
    watch(monkeypatch, fail)
    backend = S3Backend(s3_url, part=5 * MIB)
    writer = backend.create("data/a", size)
    with pytest.raises(StorageError, match="data/a"):
        _write_all(writer, size)
    aborting.append(1)
    there = [e.path for e in backend.list_prefix()]
    writer.abort()
    assert there == ([] if operation == "UploadPart" else ["data/a"])
    assert everything(backend) == {}
    assert list(backend.pending_uploads()) == []


def _write_all(writer: Writer, size: int) -> None:
    writer.write(0, [bytes(size)])
    writer.commit()


def test_a_busy_store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third request is refused for a moment, in the ways that stores have of saying so."""
    counts: Counter[str] = Counter()
    ways = [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests"), (400, "RequestTimeout"), (409, "OperationAborted")]

    def busy(seen: Seen) -> Any:
        counts["all"] += 1
        if counts["all"] % 3:
            return None
        counts["refused"] += 1
        return answer(seen.request, *ways[counts["refused"] % len(ways)])

    watch(monkeypatch, busy)
    backend = S3Backend(s3_url, part=5 * MIB)
    data = bytes(range(251)) * 60_000
    backend.prepare()
    put(backend, "a", data)
    backend.put_if("b", b"1", expected=None)
    backend.put_if("b", b"2", expected=b"1")
    assert everything(backend) == {"a": data, "b": b"2"}
    assert backend.list_dir() == ["a", "b"]
    backend.delete("a")
    assert backend.size("b") == 1
    assert counts["refused"] > 6


@pytest.mark.alone
def test_a_store_that_stays_busy(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TIMEOUT", "2")
    seen = watch(monkeypatch, lambda s: answer(s.request, 503, "SlowDown"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"SlowDown meddled \(HTTP 503\), \d+ times \(s3://") as error:
        open_backend(s3_url).read("a")
    assert 1 < time.monotonic() - began < 30
    assert f"{len(seen)} times" in str(error.value)
    assert 3 <= len(seen) <= 12


def test_what_will_not_change_is_not_tried_again(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch, lambda s: answer(s.request, 403, "AccessDenied"))
    with pytest.raises(AccessError):
        open_backend(s3_url).read("a")
    assert len(seen) == 1


@pytest.mark.parametrize("length", [None, 20 * MIB])
def test_bodies_that_break_off(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, length: int | None) -> None:
    data = bytes(range(251)) * (20 * MIB // 251 + 1)
    put(open_backend(s3_url), "a", data[: 20 * MIB])
    cuts = [100, 5_000, 3 * MIB, 50_000, 7 * MIB, 1 * MIB, 70_000, 4 * MIB]
    monkeypatch.setattr(s3_tries, "LONGEST", 0.2)
    with cutting(object_store.endpoint, cuts) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert open_backend(s3_url).read("a", 0, length) == data[: 20 * MIB]
    assert cuts == []


def test_a_start_goes_on_where_it_broke_off(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that always cuts answers off is not asked for ever."""
    data = bytes(range(251)) * (5 * MIB // 251 + 1)
    put(open_backend(s3_url), "a", data)
    cuts = [1 * MIB] * 12
    with cutting(object_store.endpoint, cuts) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert open_backend(s3_url).read_start("a", 4 * MIB) == (data[: 4 * MIB], len(data))
    assert 6 <= len(cuts) < 12


@pytest.mark.filterwarnings("ignore::dateutil.parser.UnknownTimezoneWarning")  # botocore about half a date
@pytest.mark.parametrize("length", [None, 3_000])
def test_answers_that_break_off_anywhere(
    s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, length: int | None
) -> None:
    """Inside of the headers too, where half a size looks like a size."""
    data = bytes(range(251)) * 12
    backend = open_backend(s3_url)
    put(backend, "a", data[:3_000])
    monkeypatch.setattr(s3_tries, "LONGEST", 0.001)
    cuts = [6_000, *range(1, 700, 5)]  # one answer is whole, so the store is known to give ETags
    with cutting(object_store.endpoint, cuts) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        while cuts:
            assert backend.read("a", 0, length) == data[:3_000]


def test_an_object_that_is_replaced_while_it_is_read(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a mixture: the rest is of the same version, or there is none."""
    backend = open_backend(s3_url)
    put(backend, "a", b"old" * MIB)
    with cutting(object_store.endpoint, [1 * MIB]) as endpoint:
        replaced: list[int] = []

        def replace(seen: Seen) -> None:
            if seen.operation == "GetObject" and "If-Match" in seen.request.headers and not replaced:
                replaced.append(1)
                bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
                object_store.client.put_object(Bucket=bucket, Key=f"{prefix}/a", Body=b"new" * MIB)

        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        watch(monkeypatch, replace)
        with pytest.raises(CorruptError, match="replaced while it was read"):
            backend.read("a")
    assert replaced


def test_ranges_that_are_read_at_once_are_of_one_version(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is asked for when the object has just been replaced."""
    monkeypatch.setattr(s3_reading, "RANGE", MIB)
    monkeypatch.setattr(s3_reading, "READERS", 1)
    backend = open_backend(s3_url)
    put(backend, "a", b"old" * MIB)
    asked: list[Seen] = []

    def replace(seen: Seen) -> None:
        if seen.operation == "GetObject":
            asked.append(seen)
            if len(asked) == 2:
                bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
                object_store.client.put_object(Bucket=bucket, Key=f"{prefix}/a", Body=b"new" * MIB)

    watch(monkeypatch, replace)
    with pytest.raises(CorruptError, match="replaced while it was read"):
        backend.read_into("a", 0, memoryview(bytearray(2 * MIB)))
    assert len(asked) == 2


@pytest.mark.alone
def test_a_slow_line_is_no_silence(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that takes longer than any time-out, but goes on: it is sent once."""
    monkeypatch.setenv("CKPT_TIMEOUT", "14")  # silence: 3.5 s
    data = bytes(range(256)) * (40 << 10)
    with slow(object_store.endpoint, 2 * MIB) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        seen = watch(monkeypatch)
        put(open_backend(s3_url), "a", data)
        assert [s.operation for s in seen if s.path.endswith("/a")] == ["PutObject"]
        assert open_backend(s3_url).read("a") == data


def test_a_name_that_is_taken_meanwhile_keeps_what_it_has(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether a name is free that one request takes. Its object stays also if no answer comes."""
    backend = open_backend(s3_url)
    put(backend, "data/a", b"theirs")
    writer = backend.create("data/a", 6)
    writer.write(0, [b"oursss"])
    with monkeypatch.context() as patch:
        patch.setenv("CKPT_TIMEOUT", "3")
        watch(patch, lambda s: lost_request(s.request) if s.operation == "PutObject" and s.path.endswith("/a") else None)
        lost = open_backend(s3_url).create("data/a", 6)
        lost.write(0, [b"oursss"])
        with pytest.raises(StorageError):
            lost.commit()
        lost.abort()
    with pytest.raises(ConflictError, match="the name is taken"):
        writer.commit()
    writer.abort()
    assert everything(backend) == {"data/a": b"theirs"}


def test_expired_credentials_are_looked_up_again(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody keeps fresh: the old key fails, the new one is read."""
    for name in KEYS:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    old = "[default]\naws_access_key_id = old\naws_secret_access_key = x\n"
    file.write_text(old)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def expired(seen: Seen) -> Any:
        if b"Credential=old/" not in seen.request.headers["Authorization"]:
            return None
        file.write_text(old.replace("old", KEYS["AWS_ACCESS_KEY_ID"]).replace("= x", f"= {KEYS['AWS_SECRET_ACCESS_KEY']}"))
        return answer(seen.request, 400, "ExpiredToken")

    seen = watch(monkeypatch, expired)
    backend = open_backend(s3_url)
    backend.put_if("a", b"x", expected=None)
    assert backend.read("a") == b"x"
    assert sum(b"Credential=old/" in s.request.headers["Authorization"] for s in seen) == 1


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "AccessDenied", ""])
def test_keys_that_are_replaced(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Stores say that the old one is refused, not that it has expired. And a file that was missing at first is read once it is there."""
    for name in KEYS:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    revoked = False

    def store(seen: Seen) -> Any:
        if b"Credential=old/" not in seen.request.headers["Authorization"]:
            return None
        headers = {"content-length": "7", "etag": '"x"'}
        return answer(seen.request, 403, code) if revoked else AWSResponse(seen.request.url, 200, headers, _Raw(b""))

    seen = watch(monkeypatch, store)
    backend = open_backend(s3_url)
    with pytest.raises(AccessError, match="NoCredentials"):
        backend.size("a")
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = x\n")
    assert backend.size("a") == 7
    revoked = True
    with pytest.raises(AccessError):
        backend.size("a")
    assert len(seen) == 3  # one more try: the file has not changed
    access, secret = KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]
    file.write_text(f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n")
    monkeypatch.setattr(s3_client, "_RENEW", 0.0)
    backend.put_if("a", b"x", expected=None)
    assert backend.size("a") == 1


def test_a_part_that_could_not_even_be_sent_is_no_success(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was: it is raised by the writer, not lost with the thread that met it."""

    def no_memory(seen: Seen) -> None:
        if seen.is_part and "partNumber=2" in seen.request.url:
            raise MemoryError("no room for the request")

    def write() -> None:
        with backend.create("a", 11 * MIB) as writer:
            for at in range(11):
                writer.write(at * MIB, [bytes(MIB)])
            writer.commit()

    watch(monkeypatch, no_memory)
    backend = S3Backend(s3_url, part=5 * MIB)
    with pytest.raises(MemoryError, match="no room"):
        write()
    assert everything(backend) == {}


def test_credentials_that_stay_expired(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch, lambda s: answer(s.request, 400, "ExpiredToken"))
    with pytest.raises(AccessError, match=r"(?s)ExpiredToken.*check the credentials"):
        open_backend(s3_url).read("a")
    assert len(seen) == 2


# ------------------------------------------------------------------------------------------------------------ stores that ignore conditions


@pytest.fixture
def careless(moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that takes every write, whatever condition it has."""

    def strip(seen: Seen) -> None:
        if seen.operation in ("PutObject", "CompleteMultipartUpload"):
            for name in {"If-None-Match", "If-Match"} & set(seen.request.headers):
                del seen.request.headers[name]

    use(moto_store, monkeypatch)
    watch(monkeypatch, strip)
    return moto_store.new_bucket()


def test_a_store_that_ignores_conditions_is_refused(careless: str) -> None:
    backend = open_backend(f"{careless}/run")
    for call in (backend.prepare, lambda: backend.put_if("a", b"", expected=None), lambda: backend.create("a", 1)):
        with pytest.raises(StorageError, match="(?s)ignores or refuses conditional writes.*CKPT_CONDITIONAL_PUT=emulate"):
            call()
    assert everything(backend) == {}


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_store_that_refuses_conditions(bucket: str, monkeypatch: pytest.MonkeyPatch, status: int, code: str) -> None:
    watch(monkeypatch, lambda s: answer(s.request, status, code) if "If-None-Match" in s.request.headers else None)
    with pytest.raises(StorageError, match="CKPT_CONDITIONAL_PUT=emulate"):
        open_backend(bucket).prepare()
    monkeypatch.setenv("CKPT_CONDITIONAL_PUT", "emulate")
    backend = S3Backend(bucket, part=5 * MIB)
    backend.prepare()
    put(backend, "a", bytes(6 * MIB))
    assert backend.size("a") == 6 * MIB


@pytest.mark.parametrize("code", ["ExpiredToken", "BadDigest"])
def test_a_failure_that_passes_says_nothing_about_conditions(bucket: str, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    failing = [True]
    watch(monkeypatch, lambda s: answer(s.request, 400, code) if failing and s.operation == "PutObject" else None)
    backend = open_backend(bucket)
    with pytest.raises(StorageError, match=code):
        backend.prepare()
    failing.clear()
    backend.prepare()
    backend.put_if("a", b"1", expected=None)
    with pytest.raises(ConflictError):
        backend.put_if("a", b"2", expected=None)


def test_conditions_are_emulated_on_demand(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CONDITIONAL_PUT", "emulate")
    backend = open_backend(f"{careless}/run")
    backend.prepare()
    backend.put_if("a", b"1", expected=None)
    backend.put_if("a", b"2", expected=b"1")
    for expected in (None, b"1", b""):
        with pytest.raises(ConflictError):
            backend.put_if("a", b"3", expected=expected)
    put(backend, "b", b"x")
    assert everything(backend) == {"a": b"2", "b": b"x"}
