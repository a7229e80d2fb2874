"""What is particular to object stores: parts, names, uploads that nobody ends, who we are, and where the store is."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.awsrequest import AWSResponse
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.errors import AccessError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import CommitRecord, new_id
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends import ObjectMeta, open_backend
from ckpt.io_backends import s3_client as s3_client
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.s3_backend import S3Backend
from ckpt.io_backends.s3_writer import part_size
from ckpt.runs.step_listing import KnownSteps, list_steps
from tests.cli.checkpoints import write_checkpoint
from tests.s3.meddling import Seen, _Raw, answer, watch
from tests.s3.stores import KEYS, ObjectStore, use

MIB = 1 << 20


def random_bytes(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


# ------------------------------------------------------------------------------------------------------- many steps


def test_a_save_asks_a_store_for_few_things_however_many_steps_and_files_there_are(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing leaves out the data files of all steps, and a record that is the same object is not read again."""
    write_checkpoint(f"{s3_url}/step-1", {"w": np.zeros((6, 2), np.float32)}, ranks=3)
    known = KnownSteps(s3_url)
    for n in range(2, 5):
        copy(s3_url, f"step-{n}")
    seen = watch(monkeypatch)
    assert known.list() == list_steps(s3_url)
    seen.clear()
    listed = listed_objects(monkeypatch)
    assert [s.number for s in known.list()] == [1, 2, 3, 4]
    assert [s.operation for s in seen] == ["ListObjectsV2", "ListObjectsV2"]
    assert not [path for path in listed if "/data/" in path] and sum("checkpoint.json" in path for path in listed) == 4
    set_tags(open_backend(f"{s3_url}/step-3"), ["mine"])
    seen.clear()
    assert [s.number for s in known.list() if s.tags] == [3]
    assert [s.operation for s in seen if s.operation == "GetObject"] == ["GetObject"]


def listed_objects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The objects that listings give from now on."""
    listed: list[str] = []
    pages = S3Backend._pages

    def kept(self: S3Backend, **what: str) -> Any:
        for page in pages(self, **what):
            listed.extend(str(entry["Key"]) for entry in page.get("Contents", ()))
            yield page

    monkeypatch.setattr(S3Backend, "_pages", kept)
    return listed


def copy(run: str, name: str) -> None:
    """Step 1 under another name, and of another id."""
    backend = open_backend(run)
    for entry in backend.list_prefix("step-1/"):
        inner = entry.path.removeprefix("step-1/")
        data = backend.read(entry.path)
        if inner == "checkpoint.json":
            data = replace(CommitRecord.from_bytes(data, ""), id=new_id()).to_bytes()
        put(backend, f"{name}/{inner}", data)


# ----------------------------------------------------------------------------------------------------------- deletes


def test_a_thousand_objects_go_in_one_request(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = S3Backend(s3_url)
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    names = [f"data/{n} é&<" for n in range(1001)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: object_store.client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b""), [*names, "stays"]))
    seen = watch(monkeypatch)
    backend.delete_many(names)
    assert sorted(s.operation for s in seen) == ["DeleteObjects", "DeleteObjects"]
    assert everything(backend) == {"stays": b""}
    set_up = open_backend(f"{s3_url}/run")
    write_checkpoint(f"{s3_url}/run/step-1", {"w": np.zeros((6, 2), np.float32)}, ranks=3)
    files = len(everything(set_up))
    seen.clear()
    assert CliRunner().invoke(cli, ["rm", f"{s3_url}/run/step-1", "--yes"]).exit_code == 0
    assert everything(set_up) == {} and files > 5
    assert len([s for s in seen if s.operation == "DeleteObjects"]) == 1
    assert len([s for s in seen if s.operation == "DeleteObject"]) <= 2  # the record, and what removes empty directories elsewhere


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "MalformedXML"), (403, "AccessDenied")]
)
def test_stores_that_do_not_delete_many_are_asked_for_each(s3_url: str, monkeypatch: pytest.MonkeyPatch, status: int, code: str) -> None:
    backend, names = S3Backend(s3_url), [f"a/{n}" for n in range(5)]
    for name in names:
        put(backend, name)
    seen = watch(monkeypatch, lambda s: answer(s.request, status, code) if s.operation == "DeleteObjects" else None)
    backend.delete_many(names[:3])
    backend.delete_many(names[3:])
    assert everything(backend) == {}
    asked = [s.operation for s in seen if s.operation.startswith("Delete")]
    assert asked.count("DeleteObject") == 5
    if status != 403:  # which may be about these objects alone
        assert asked.count("DeleteObjects") == 1


def test_an_object_that_is_not_deleted_with_the_others_is_asked_for_by_itself(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store says of one that it failed, and nothing of another."""
    backend, names = S3Backend(s3_url), [f"a/{n}" for n in range(4)]
    for name in names:
        put(backend, name)
    prefix = s3_url.removeprefix("s3://").partition("/")[2]

    def half(seen: Seen) -> Any:
        if seen.operation != "DeleteObjects":
            return None
        for name in names[:2]:
            backend.delete(name)
        gone = "".join(f"<Deleted><Key>{prefix}/{name}</Key></Deleted>" for name in names[:2])
        failed = f"<Error><Key>{prefix}/{names[2]}</Key><Code>InternalError</Code><Message>meddled</Message></Error>"
        return AWSResponse(seen.request.url, 200, {}, _Raw(f"<DeleteResult>{gone}{failed}</DeleteResult>".encode()))

    seen = watch(monkeypatch, half)
    backend.delete_many(names)
    assert everything(backend) == {}
    assert sorted(s.path.rpartition("/")[2] for s in seen if s.operation == "DeleteObject") == ["0", "1", "2", "3"]  # two are the meddler's


def test_what_the_store_refuses_to_delete_is_an_error(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = S3Backend(s3_url)
    put(backend, "a/1")
    watch(monkeypatch, lambda s: answer(s.request, 403, "AccessDenied") if s.operation.startswith("Delete") else None)
    with pytest.raises(AccessError, match="cannot delete"):
        backend.delete_many(["a/1", "a/2"])
    assert everything(backend) == {"a/1": b"x"}


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("size", "part"),
    [
        (0, 16 * MIB),
        (16_000 * MIB, 16 * MIB),
        (16_000 * MIB + 1, 17 * MIB),
        (64_000 * MIB, 64 * MIB),
        (640_000 * MIB, 64 * MIB),
        (5 << 40, 525 * MIB),
        (50_000_000_000_000, 4769 * MIB),
    ],
)
def test_part_sizes(size: int, part: int) -> None:
    assert part_size(size) == part
    assert -(-size // part) <= 10_000
    assert part <= 5 << 30


def test_whole_parts_are_sent_from_the_callers_memory(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    data = random_bytes(17 * MIB)
    backend = S3Backend(s3_url, part=5 * MIB)
    with backend.create("a", data.nbytes) as writer:
        assert writer.block_size == 5 * MIB
        writer.write(0, [data[: 6 * MIB].data, data[6 * MIB : 16 * MIB].data])
        writer.write(16 * MIB, [data[16 * MIB :].data])
        writer.commit()
    sent = {s.request.url.rpartition("partNumber=")[2]: s.request.body for s in seen if s.is_part}
    begin = data.ctypes.data
    ours = {n for n, body in sent.items() if begin <= np.frombuffer(body.getbuffer(), np.uint8).ctypes.data < begin + data.nbytes}
    assert set(sent) == {"1", "2", "3", "4"}
    assert ours == {"1", "3"}  # the first write ends inside of part 2, which is in two pieces; part 4 comes with two writes
    assert backend.read("a") == data.tobytes()


def test_memory_is_bounded(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is faster than the store waits."""
    let_go = threading.Event()
    seen = watch(monkeypatch, lambda s: let_go.wait(60) and None if s.is_part else None)
    backend = S3Backend(s3_url, part=5 * MIB)
    monkeypatch.setattr(s3_client.client_of(), "lanes", threading.BoundedSemaphore(2))
    data = random_bytes(42 * MIB)
    written: list[int] = []
    with backend.create("a", data.nbytes) as writer:

        def write() -> None:
            for at in range(0, data.nbytes, MIB):
                writer.write(at, [data[at : at + MIB].data])
                written.append(at)

        thread = threading.Thread(target=write)
        thread.start()
        while sum(s.is_part for s in seen) < 2:
            time.sleep(0.01)
        while len(written) < 14:
            time.sleep(0.01)
        thread.join(0.5)
        assert len(written) == 14  # two parts are on their way, the third is whole: its last write waits
        let_go.set()
        thread.join(60)
        writer.commit()
    assert backend.read("a") == data.tobytes()


def test_parts_that_were_sent_are_written_again_whole_or_not_at_all(s3_url: str) -> None:
    backend = S3Backend(s3_url, part=5 * MIB)
    with backend.create("a", 10 * MIB) as writer:
        writer.write(0, [bytes(5 * MIB)])
        with pytest.raises(StorageError, match="was sent already"):
            writer.write(5 * MIB - 1, [b"xy"])
        writer.write(0, [b"a" * (5 * MIB)])
        with pytest.raises(StorageError, match="were planned"):
            writer.commit()
        writer.write(5 * MIB, [b"b" * (5 * MIB)])
        writer.commit()
    assert backend.read("a") == b"a" * (5 * MIB) + b"b" * (5 * MIB)


def test_a_part_on_its_way_is_replaced_whole_or_not_at_all(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    first: list[int] = []

    def slow(seen: Seen) -> None:
        if seen.is_part and not first:
            first.append(1)
            let_go.wait(60)

    watch(monkeypatch, slow)
    with S3Backend(s3_url, part=5 * MIB).create("a", 6 * MIB) as writer:
        writer.write(0, [b"a" * MIB])
        writer.write(MIB, [b"a" * (4 * MIB)])  # whole: it is sent beside us, and hangs
        while not first:
            time.sleep(0.01)
        with pytest.raises(StorageError, match="was sent already"):
            writer.write(0, [b"x"])
        threading.Timer(0.2, let_go.set).start()
        writer.write(0, [b"b" * (5 * MIB)])
        writer.write(5 * MIB, [b"c" * MIB])
        writer.commit()
    assert S3Backend(s3_url).read("a") == b"b" * (5 * MIB) + b"c" * MIB


def test_long_ranges_are_read_in_parallel(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    backend = S3Backend(s3_url)
    data = random_bytes(40 * MIB + 5)
    put(backend, "a", data.data)
    target = np.zeros(33 * MIB, np.uint8)
    backend.read_into("a", 3, target.data)
    assert np.array_equal(target, data[3 : 3 + 33 * MIB])
    asked = {(s.request.headers["Range"], "If-Match" in s.request.headers) for s in seen if s.operation == "GetObject"}
    assert asked == {(f"bytes=3-{32 * MIB + 2}".encode(), False), (f"bytes={32 * MIB + 3}-{33 * MIB + 2}".encode(), False)}
    assert backend.read("a") == data.tobytes()
    assert backend.read("a", 20 * MIB) == data[20 * MIB :].tobytes()


def test_unfinished_uploads(s3_url: str, object_store: ObjectStore) -> None:
    backend = S3Backend(s3_url, part=5 * MIB)
    writers = {name: backend.create(name, 11 * MIB) for name in ("a/1", "a/2", "b/1", "b/2")}
    for writer in writers.values():
        writer.write(0, [bytes(5 * MIB)])
    writers["a/2"].abort()
    found = {u.path: u for u in backend.pending_uploads()}
    assert set(found) == {"a/1", "b/1", "b/2"}
    if object_store.kind != "moto":  # to which all uploads began in 2010
        assert all(abs(u.started - time.time()) < 120 for u in found.values())
    assert [u.path for u in backend.pending_uploads("b/")] == ["b/1", "b/2"]
    backend.abort_upload(found["a/1"])
    backend.abort_upload(found["a/1"])
    assert [u.path for u in backend.pending_uploads()] == ["b/1", "b/2"]
    with pytest.raises(StorageError, match="another process ended the upload"):
        writers["a/1"].write(5 * MIB, [bytes(6 * MIB)])
    for writer in writers.values():
        writer.abort()
    assert list(backend.pending_uploads()) == []
    assert everything(backend) == {}


def test_a_shared_upload_that_is_aborted_and_closed_while_a_part_is_sent_leaves_nothing(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, sending = threading.Event(), threading.Event()

    def slow(seen: Seen) -> None:
        if seen.is_part:
            sending.set()
            let_go.wait(60)

    watch(monkeypatch, slow)
    backend = S3Backend(s3_url, part=5 * MIB)
    shared = backend.create_shared("a", 6 * MIB)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(shared.write, 0, [bytes(5 * MIB)])
        assert sending.wait(60)
        shared.abort()
        shared.close()
        let_go.set()
        writing.exception(60)
    assert list(backend.pending_uploads()) == []


def test_stamps_tell_what_was_written_within_one_second(moto_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    use(moto_store, monkeypatch)
    url = moto_store.new_bucket()
    backend = S3Backend(url)
    with pytest.raises(NotFoundError):
        backend.version_token("a")
    stamps = [_stamp_after(backend, data) for data in (b"one", b"two", b"one")]
    assert stamps[0] == stamps[2] != stamps[1]
    moto_store.client.put_bucket_versioning(Bucket=url.removeprefix("s3://"), VersioningConfiguration={"Status": "Enabled"})
    assert len({_stamp_after(backend, b"one") for _ in range(3)}) == 3


def _stamp_after(backend: S3Backend, data: bytes) -> str | None:
    backend.delete("a")
    put(backend, "a", data)
    assert backend.version_token("a") == backend.version_token("a")
    return backend.version_token("a")


# ------------------------------------------------------------------------------------------------------------- names


def test_strange_names(bucket: str) -> None:
    backend = S3Backend(bucket)
    names = ["a b", "a+b", "a%20b", "ä/ö", "x=1&y=2", "~", "'\"<>", "日本"]
    for name in names:
        put(backend, name, name.encode())
    assert everything(backend) == {name: name.encode() for name in names}
    assert backend.list_dir() == sorted(["ä/" if n.startswith("ä") else n for n in names])


def test_keys_that_are_no_paths_are_not_given(bucket: str, object_store: ObjectStore) -> None:
    name = bucket.removeprefix("s3://")
    for key in ("run/", "run/a/", "run/a", "run//b", "run/a/b"):
        object_store.client.put_object(Bucket=name, Key=key, Body=b"")
    backend = S3Backend(f"{bucket}/run")
    assert list(backend.list_prefix()) == [ObjectMeta("a", 0), ObjectMeta("a/b", 0)]
    assert backend.list_dir() == ["a", "a/"]


def test_listings_of_many_pages(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    backend = S3Backend(s3_url)
    names = [f"{d}/{i}" for d in "abc" for i in range(3)]
    for name in names:
        backend.put_if(name, b"", expected=None)
    pages = {"provide-client-params.s3.ListObjectsV2": "MaxKeys", "provide-client-params.s3.ListMultipartUploads": "MaxUploads"}
    boto = s3_client.client_of()._boto
    for event, limit in pages.items():
        boto.meta.events.register(event, lambda params, limit=limit, **_: params | {limit: 2})
    assert [e.path for e in backend.list_prefix()] == names
    assert backend.list_dir() == ["a/", "b/", "c/"]
    writers = [S3Backend(s3_url, part=5 * MIB).create(f"u/{i}", 6 * MIB) for i in range(5)]
    for writer in writers:
        writer.write(0, [bytes(5 * MIB)])
    assert [u.path for u in backend.pending_uploads()] == [f"u/{i}" for i in range(5)]
    for writer in writers:
        writer.abort()
    assert [s.operation for s in seen].count("ListObjectsV2") == 5 + 2
    assert [s.operation for s in seen].count("ListMultipartUploads") == 3


def test_listings_that_are_sorted_by_directory(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SeaweedFS gives them, in pages."""
    names = ["a", "b/a/x", "b.x", "b0", "c/d", "c-e", "d"]
    pages = [[("a", 1)], [("b/a/x", 1), ("b.x", 1)], [("b0", 1), ("c/d", 1), ("c-e", 1)], [("d", 1)]]
    backend = S3Backend(s3_url)
    root = s3_url.removeprefix("s3://").partition("/")[2]
    answers = [{"Contents": [{"Key": f"{root}/{name}", "Size": size} for name, size in page]} for page in pages]
    monkeypatch.setattr(backend, "_pages", lambda **_: iter(answers))
    assert [e.path for e in backend.list_prefix()] == sorted(names)


@pytest.mark.parametrize("url", ["s3://", "s3:///a", "s3://b//a", "s3://b/../a"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError):
        open_backend(url)


def test_urls() -> None:
    assert open_backend("s3://b").url == "s3://b"
    assert open_backend("S3://b/").url == "s3://b"
    assert open_backend("s3://b/x/y/").url == "s3://b/x/y"


# ------------------------------------------------------------------------------------------------------------- who and where


def test_profiles_and_their_endpoint(s3_url: str, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*KEYS, "AWS_ENDPOINT_URL", "AWS_REGION"]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile job]\nservices = here\n[services here]\ns3 =\n  endpoint_url = {object_store.endpoint}\n")
    (tmp_path / "credentials").write_text(
        f"[job]\naws_access_key_id = {KEYS['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {KEYS['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "job")
    backend = open_backend(s3_url)
    put(backend, "a", b"x")
    assert everything(backend) == {"a": b"x"}


def test_what_is_configured_wins(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    (tmp_path / "config").write_text("[default]\ns3 =\n  payload_signing_enabled = true\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    data = random_bytes(11 * MIB)
    backend = S3Backend(s3_url, part=5 * MIB)
    put(backend, "a", data.data)
    parts = [s.request.headers for s in seen if s.is_part]
    assert len(parts) == 3
    assert all("x-amz-checksum-crc32" in headers for headers in parts)
    assert not any(headers["X-Amz-Content-SHA256"] == b"UNSIGNED-PAYLOAD" for headers in parts)
    assert backend.read("a") == data.tobytes()


def test_no_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    with pytest.raises(AccessError, match=r"(?s)cannot read.*AWS_PROFILE"):
        open_backend(s3_url).read("a")


def test_refused(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    if object_store.kind == "moto":
        pytest.skip("moto lets everybody in")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    backend = open_backend(s3_url)
    for call in (
        lambda: backend.read("a"),
        lambda: backend.size("a"),
        lambda: list(backend.list_prefix()),
        lambda: backend.create("a", 1),
        lambda: backend.put_if("a", b"", expected=None),
        lambda: backend.delete("a"),
        backend.prepare,
    ):
        with pytest.raises(AccessError, match=s3_url) as error:
            call()
        assert "HTTP 403" in str(error.value)


def test_no_such_bucket(bucket: str) -> None:
    backend = open_backend(f"{bucket}-typo/x")
    for call in (lambda: backend.read("a"), lambda: list(backend.list_prefix()), backend.prepare):
        with pytest.raises(NotFoundError, match=r"(?s)not exist.*NoSuchBucket.*s3://test-.*-typo/x.*create the bucket") as error:
            call()
        assert "cannot delete" not in str(error.value)


def test_an_unknown_profile(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        open_backend(s3_url).read("a")


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, s3_url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("CKPT_TIMEOUT", "3")  # on a busy machine one try alone takes half a second
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1.*times"):
        open_backend(s3_url).read("a")
    assert 1.4 < time.monotonic() - began < 20


def test_addressing(monkeypatch: pytest.MonkeyPatch, s3_url: str) -> None:
    """AWS by the bucket's own name, other stores by path."""
    seen = watch(monkeypatch, lambda s: answer(s.request, 403, "AccessDenied"))
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    for endpoint in ("https://r2.example", ""):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(AccessError):
            open_backend("s3://bucket/runs").read("a")
    assert [s.request.url for s in seen] == [
        "https://r2.example/bucket/runs/a",
        "https://bucket.s3.eu-central-1.amazonaws.com/runs/a",
    ]


# ------------------------------------------------------------------------------------------------------------- processes and loops


def test_forked_children(s3_url: str) -> None:
    backend = open_backend(s3_url)
    data = random_bytes(3 * MIB)
    put(backend, "a", data.data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what is tested
        pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = backend.read("a") == data.tobytes()
            put(backend, "child", b"from the child")
        finally:
            os._exit(0 if good else 1)
    assert backend.read("a") == data.tobytes()
    assert os.waitpid(pid, 0)[1] == 0
    assert backend.read("child") == b"from the child"


def test_beside_a_running_loop(s3_url: str) -> None:
    async def work() -> bytes:
        backend = open_backend(s3_url)
        put(backend, "a", b"x" * 100)
        return backend.read("a")

    assert asyncio.run(work()) == b"x" * 100
