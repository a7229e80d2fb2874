"""What is configured for a URL: which one decides, what is refused, and which words fsspec file systems' complaints about it get."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.errors import AccessError, CkptError, NotFoundError, StorageError, UsageError
from ckpt.io_backends import Backend, InProcessBackend, open_backend
from ckpt.io_backends import registry as storage_options
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.fsspec_errors import mapped
from ckpt.io_backends.registry import configured_for
from tests.io_backends.bucket import Bucket, buckets


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage_options, "_table", {})
    with buckets():
        yield


@pytest.mark.parametrize(
    ("url", "decides"),
    [
        ("s3://b/run/step-1", 2),
        ("s3://b/run", 2),
        ("s3a://b/run/", 2),
        ("s3://b/run2", 1),
        ("s3://b", 1),
        ("s3://bb/run", 0),
        ("gs://b/run", None),
        ("/s3/b/run", None),
        ("s3:b", None),
    ],
)
def test_the_longest_url_decides(url: str, decides: int | None) -> None:
    for number, prefix in enumerate(["s3://", "s3://b/", "S3A://b/run"]):
        ckpt.configure_storage(prefix, {"n": number})
    assert configured_for(url).options == ({} if decides is None else {"n": decides})


def test_what_was_said_can_be_forgotten_and_said_anew() -> None:
    mine = {"client_kwargs": {"region_name": "a"}}
    ckpt.configure_storage("s3://b", mine)
    mine["client_kwargs"]["region_name"] = "b"
    assert configured_for("s3://b/x").options == {"client_kwargs": {"region_name": "a"}}
    ckpt.configure_storage("s3://b", {"anon": True})
    assert configured_for("s3://b/x").options == {"anon": True}
    ckpt.configure_storage("s3://b")
    assert configured_for("s3://b/x") is storage_options.NOTHING


def test_a_file_says_it_for_programs_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"s3://a": {"profile": "one"}, "s3://b": {"profile": "two"}}))
    monkeypatch.setenv("CKPT_STORAGE_OPTIONS", str(path))
    ckpt.configure_storage("s3://b", {"profile": "three"})
    assert [configured_for(f"s3://{bucket}/run").options.get("profile") for bucket in "abc"] == ["one", "three", None]
    path.write_text(json.dumps({"s3://": {"profile": "four"}}))
    assert [configured_for(f"s3://{bucket}/run").options.get("profile") for bucket in "abc"] == ["four", "three", "four"]


@pytest.mark.parametrize("content", ['{"s3://a": "secret"', '["secret"]', '{"s3://a": "secret"}', '{"/a": {"key": "secret"}}', None])
def test_a_file_that_cannot_be_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    path = tmp_path / "options.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("CKPT_STORAGE_OPTIONS", str(path))
    with pytest.raises(UsageError) as raised:
        open_backend("s3://a/run")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["/a/b", "run", "file:///a", "inprocess://a"])
def test_paths_have_no_options(url: str) -> None:
    with pytest.raises(UsageError, match="no storage options"):
        ckpt.configure_storage(url, {"auto_mkdir": True})
    ckpt.configure_storage(url, {})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"storage_options": {"a": 1}, "filesystem": MemoryFileSystem()}, "at once"),
        ({"storage_options": "anon"}, "is a dict"),
        ({"storage_options": {"asynchronous": True}}, "asynchronous"),
        ({"filesystem": fsspec.filesystem("http", asynchronous=True, skip_instance_cache=True)}, "asynchronous"),
        ({"filesystem": "s3"}, "str is not an fsspec file system"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ckpt.configure_storage("s3://b", **given)


def test_a_repository_is_no_password() -> None:
    storage_options.check_no_password("github://org:repo@main/folder")


def test_a_path_of_another_library_names_what_to_do() -> None:
    class UPath:
        storage_options = {"anon": True}  # noqa: RUF012

    with pytest.raises(UsageError, match=r"ckpt\.configure_storage"):
        open_backend(UPath())  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["s3", "dir", "mine"])
def test_a_file_system_serves_any_scheme(tmp_path: Path, scheme: str) -> None:
    """What follows the scheme is a path of that file system."""
    ckpt.configure_storage(f"{scheme}://place", filesystem=DirFileSystem(str(tmp_path), fs=fsspec.filesystem("file", auto_mkdir=True)))
    put(open_backend(f"{scheme}://place/run"), "a", b"x")
    open_backend(f"{scheme}://place/run").put_if("b", b"y", expected=None)
    assert {p.name: p.read_bytes() for p in (tmp_path / "place" / "run").iterdir()} == {"a": b"x", "b": b"y"}


def _read_in_child(backend: Backend, answers: Any) -> None:
    answers.put(backend.read("a"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_a_given_file_system_anew() -> None:
    ckpt.configure_storage("testbucket://b", filesystem=Bucket())
    backend = open_backend("testbucket://b/run")
    put(backend, "a", b"x")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_read_in_child, args=(backend, answers))
    child.start()
    assert answers.get(timeout=30) == b"x"
    child.join()


class Takes(InProcessBackend):
    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        super().__init__(url.replace("other://", "inprocess://"))
        self.given = storage_options


def test_backends_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = [Takes]
    point = EntryPoint("other", "x:y", "ckpt.storage")
    monkeypatch.setattr(EntryPoint, "load", lambda self: made[0])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [point])
    assert open_backend("other://a").given is None  # type: ignore[attr-defined]
    ckpt.configure_storage("other://a", {"mine": 1})
    assert open_backend("other://a/b").given == {"mine": 1}  # type: ignore[attr-defined]
    made[0] = InProcessBackend
    with pytest.raises(UsageError, match="takes no storage options: mine"):
        open_backend("other://a/b")


# ---- stores that do not create only what is absent


class Ignores(Bucket):
    """Takes the condition, and overwrites."""

    protocol = "ignores"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value)


class Lacks(Bucket):
    """Does not know the condition."""

    protocol = "lacks"

    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
        super().pipe_file(path, value)


class Refuses(Bucket):
    """Knows the argument, and can do nothing with it."""

    protocol = "refuses"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise NotImplementedError(mode)
        super().pipe_file(path, value)


@pytest.mark.parametrize("kind", [Ignores, Lacks, Refuses])
def test_a_store_without_conditions_is_refused(kind: type[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.configure_storage("testbucket://b", filesystem=kind(skip_instance_cache=True))
    backend = open_backend("testbucket://b/run")
    for call in (backend.prepare, lambda: backend.put_if("a", b"x", expected=None)):
        with pytest.raises(StorageError, match="CKPT_CONDITIONAL_PUT=emulate"):
            call()
    assert everything(backend) == {}
    monkeypatch.setenv("CKPT_CONDITIONAL_PUT", "emulate")
    backend.prepare()
    backend.put_if("a", b"x", expected=None)
    backend.put_if("a", b"y", expected=b"x")
    assert everything(backend) == {"a": b"y"}


# ---- words for what file systems raise


def named(name: str, base: type[Exception] = Exception, **attributes: Any) -> Exception:
    """As a library raises it that is not installed here."""
    return type(name, (base,), attributes)("from the library")


class AzureError(Exception):
    pass


@pytest.mark.parametrize(
    ("url", "error", "ours", "hint"),
    [
        (
            "az://c/r",
            ValueError("unable to connect to account for Must provide either a connection_string or"),
            AccessError,
            "AZURE_STORAGE_ACC",
        ),
        ("abfs://c/r", named("ClientAuthenticationError", AzureError), AccessError, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://c/r", named("HttpResponseError", AzureError, status_code=403), AccessError, "AZURE_STORAGE_ANON=true"),
        ("az://c/r", named("ResourceNotFoundError", AzureError, status_code=404), NotFoundError, "check the URL"),
        (
            "gs://b/r",
            named("DefaultCredentialsError", type("GoogleAuthError", (Exception,), {})),
            AccessError,
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        ("gs://b/r", OSError("Forbidden: b/bucket"), AccessError, "FSSPEC_GS_TOKEN=anon"),
        ("gs://b/r", named("HttpError", code=401), AccessError, "gcloud auth"),
        ("s3a://b/r", named("NoCredentialsError"), AccessError, "FSSPEC_S3_ANON=true"),
        ("sftp://h/r", named("AuthenticationException"), AccessError, "credentials"),
    ],
)
def test_words(url: str, error: Exception, ours: type[CkptError], hint: str) -> None:
    told = mapped(error, url, "read", reading=True)
    assert type(told) is ours
    assert hint in str(told.hint)


def test_an_error_shows_no_secret() -> None:
    error = Exception("GET https://a.blob.core.windows.net/c?sv=1&sig=abc%3D failed for hunter22")
    told = mapped(error, "az://c/r", "read", reading=True, conceal=("hunter22",))
    assert told.message.endswith("/c?sv=1&sig=*** failed for ***")


class Stores(Bucket):
    """An object store whose buckets are made by ``makedirs`` alone, as s3fs's are."""

    protocol = ("oss", "stores")
    made: list[str] = []  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if not self.made:
            raise FileNotFoundError(path)
        super().pipe_file(path, value, mode)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.made.append(path)


def test_no_bucket_is_made() -> None:
    Stores.made.clear()
    ckpt.configure_storage("testbucket://typo", filesystem=Stores())
    backend = open_backend("testbucket://typo/run")
    for call in (backend.prepare, lambda: backend.put_if("a", b"x", expected=None), backend.list_dir, lambda: backend.read("a")):
        with pytest.raises(NotFoundError, match="the bucket does not exist: /typo"):
            call()
    assert Stores.made == []
