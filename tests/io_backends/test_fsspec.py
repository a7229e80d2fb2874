"""The generic backend keeps the tables of the port over two very different fsspec file systems, and says clearly what it cannot do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt.errors import AccessError, ConflictError, CorruptError, NotFoundError, StorageError, UsageError
from ckpt.io_backends import Backend, open_backend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.io_backends.conformance.reading import BYTES, everything, put
from ckpt.io_backends.fsspec_backend import FsspecBackend
from ckpt.io_backends.fsspec_filesystem import IN_MEMORY, opened
from tests.io_backends.bucket import Bucket, buckets


@pytest.fixture(autouse=True)
def _bucket() -> Iterator[None]:
    with buckets():
        yield


@pytest.fixture
def bucket() -> Backend:
    return open_backend("testbucket://bucket/run/")


class TestObjects(BackendConformance):
    exclusive_create = False

    @pytest.fixture
    def backend(self) -> Backend:
        return FsspecBackend("testbucket://bucket/run")


class TestDirectories(BackendConformance):
    exclusive_create = False

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(f"local://{tmp_path}/some/root")


def test_large_objects_go_through_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    backend = FsspecBackend(f"local://{tmp_path}/root")
    data = os.urandom(IN_MEMORY + 7)
    with backend.create("d/a", len(data)) as writer:
        writer.write(1000, [data[1000:]])
        writer.write(0, [data[:1000]])
        assert len(list((tmp_path / "spool").iterdir())) == 1
        writer.commit()
    assert (tmp_path / "root" / "d" / "a").read_bytes() == data
    backend.create("d/b", len(data)).abort()
    assert list((tmp_path / "spool").iterdir()) == []
    assert [p.name for p in (tmp_path / "root" / "d").iterdir()] == ["a"]


def test_small_objects_need_no_directory_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._get_default_tempdir", lambda: os.stat(tmp_path / "none"))  # full, or all of it only to be read
    backend = FsspecBackend(f"local://{tmp_path}/root")
    put(backend, "a", b"small")
    assert backend.read("a") == b"small"
    with pytest.raises(StorageError, match="cannot make a temporary file"):
        backend.create("b", IN_MEMORY + 1)


def test_a_scheme_whose_package_is_missing_is_named() -> None:
    for url, word in (("gs://bucket/run", "pip install gcsfs"), ("az://bucket/run", "pip install adlfs")):
        with pytest.raises(UsageError, match=word):
            open_backend(url)


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="known: file, inprocess, memory"):
        open_backend("nonsense://bucket/run")


def test_a_url_without_a_place_below_the_root() -> None:
    with pytest.raises(UsageError, match="no place below a root"):
        open_backend("testbucket://")


def test_publishing_loses_against_another_process(bucket: Backend) -> None:
    """Between comparing and writing somebody else was there: the file system itself refuses to create what exists."""
    check = FsspecBackend._check_holds

    def then_somebody_else(self: FsspecBackend, path: str, expected: bytes | None) -> None:
        check(self, path, expected)
        MemoryFileSystem.pipe_file(Bucket(), f"/bucket/run/{path}", b"theirs")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsspecBackend, "_check_holds", then_somebody_else)
        with pytest.raises(ConflictError):
            bucket.put_if("a", b"ours", expected=None)
    assert everything(bucket) == {"a": b"theirs"}


def test_an_answer_that_got_lost_is_a_success(bucket: Backend) -> None:
    Bucket.lost["pipe_file"] = ConnectionResetError("gone")
    bucket.put_if("a", b"ours", expected=None)
    bucket.put_if("a", b"new", expected=b"ours")
    Bucket.lost.clear()
    assert everything(bucket) == {"a": b"new"}


def test_a_failed_publish_changes_nothing(bucket: Backend) -> None:
    Bucket.answers["pipe_file"] = ConnectionResetError("gone")
    with pytest.raises(StorageError, match="ConnectionResetError"):
        bucket.put_if("a", b"ours", expected=None)
    assert everything(bucket) == {}


class HttpError(Exception):
    """As client libraries raise them: no OSError, and a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} from the server")
        self.status = status


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (HttpError(403), AccessError),
        (HttpError(404), NotFoundError),
        (HttpError(500), StorageError),
        (PermissionError("no"), AccessError),
        (ValueError("strange"), StorageError),
        (NotImplementedError(), StorageError),
    ],
)
def test_errors_of_any_kind_arrive_as_ours(bucket: Backend, error: Exception, ours: type[Exception]) -> None:
    put(bucket, "a", BYTES)
    Bucket.answers["cat_file"] = error
    with pytest.raises(ours) as raised:
        bucket.read("a", 0, 10)
    assert type(raised.value) is ours
    assert "testbucket://bucket/run/a" in str(raised.value)


def test_a_short_answer_is_never_given_back(bucket: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.io_backends.fsspec_backend._PAUSE", 0)
    put(bucket, "a", BYTES)
    Bucket.answers["short"] = Exception()
    for call in (lambda: bucket.read("a"), lambda: bucket.read("a", 5, 100), lambda: bucket.read_into("a", 0, memoryview(bytearray(9)))):
        with pytest.raises(StorageError, match="gave"):
            call()


def test_past_the_end_is_not_a_short_answer(bucket: Backend) -> None:
    put(bucket, "a", BYTES)
    with pytest.raises(CorruptError, match="1024"):
        bucket.read("a", 1000, 25)


def _read_in_child(backend: Backend, answers: Any) -> None:
    answers.put(backend.read("a"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_file_system(tmp_path: Path) -> None:
    backend = FsspecBackend(f"local://{tmp_path}/root")
    put(backend, "a", BYTES)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_read_in_child, args=(backend, answers))
    child.start()
    assert answers.get(timeout=30) == BYTES
    child.join()


def test_a_child_forked_while_somebody_publishes_can_publish(tmp_path: Path) -> None:
    """As a worker of a data loader may be, beside a save in the background."""
    backend = FsspecBackend(f"local://{tmp_path}/root")
    publishing, go_on = threading.Event(), threading.Event()
    check = backend._check_holds

    def slow(path: str, expected: bytes | None) -> None:
        publishing.set()
        go_on.wait(60)
        check(path, expected)

    backend._check_holds = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=backend.put_if, args=("parent", b"p"), kwargs={"expected": None})
    thread.start()
    publishing.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what is tested
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        FsspecBackend(f"local://{tmp_path}/root").put_if("child", b"c", expected=None)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    go_on.set()
    thread.join()
    assert status == 0
    assert everything(FsspecBackend(f"local://{tmp_path}/root")) == {"parent": b"p", "child": b"c"}


def test_a_child_forked_by_whoever_publishes_goes_on(tmp_path: Path) -> None:
    """A file system may fork while it publishes: the child leaves the block too, and can publish."""
    pid, code = -1, 1
    try:
        with FsspecBackend._publishing:
            pid = os.fork()
        FsspecBackend(f"local://{tmp_path}/root").put_if("parent" if pid else "child", b"x", expected=None)
        code = 0
    finally:
        if pid == 0:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert everything(FsspecBackend(f"local://{tmp_path}/root")) == {"parent": b"x", "child": b"x"}


def test_a_storage_that_connects_slowly_holds_up_no_other_one() -> None:
    """Those who want the same one wait, and get what was made once; after one that failed, the next makes it."""
    going, may_go, made = threading.Event(), threading.Event(), list[str]()

    class Slow(MemoryFileSystem):  # type: ignore[misc]
        protocol, cachable = "slowtest", False

        def __init__(self, **options: Any) -> None:
            made.append("try")
            going.set()
            assert may_go.wait(60)
            if len(made) == 1:
                raise PermissionError("not yet")
            super().__init__(**options)

    fsspec.register_implementation("slowtest", Slow, clobber=True)
    results = list[Any]()

    def open_slow() -> None:
        try:
            results.append(opened("slowtest://a/b", {})[0])
        except AccessError as err:
            results.append(err)

    threads = [threading.Thread(target=open_slow) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert going.wait(60)
    assert list(open_backend("testbucket://bucket/run/").list_dir()) == []
    assert results == []
    may_go.set()
    for thread in threads:
        thread.join(60)
    assert len(made) == 2 and sum(isinstance(each, AccessError) for each in results) == 1
    assert len({id(each) for each in results}) == 2
