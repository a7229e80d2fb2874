"""What is set up wrong is said at once, by the right error, with what to do about it: names, certificates, credentials, clocks, regions."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectTimeoutError

from ckpt.errors import AccessError, CkptError, StorageError, UsageError
from ckpt.io_backends import open_backend
from ckpt.io_backends import s3_tries as s3_tries
from tests.s3.meddling import _Raw, answer, watch
from tests.s3.stores import KEYS, NO_FILES

SECONDS = 30
"""A request is tried for 150 s here: what takes less than this was not tried again."""
CONFIG = """
[profile fails]
credential_process = /bin/false
[profile gone]
credential_process = {folder}/no-program
[profile junk]
credential_process = /bin/echo hello
[profile sso]
sso_start_url = https://x.example/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = r
[profile role]
role_arn = arn:aws:iam::123456789012:role/x
source_profile = nobody
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**KEYS, **NO_FILES, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "CKPT_TIMEOUT": "300", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a server with a certificate for other.example, and its certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    names = ("-subj", "/CN=other.example", "-addext", "subjectAltName=DNS:other.example")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "30", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server = _Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_address[1], folder / "cert.pem"
    server.shutdown()
    server.server_close()


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def error_of_a_read(kind: type[CkptError]) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as error:
        open_backend("s3://bucket/run").read("a")
    assert time.monotonic() - began < SECONDS
    assert type(error.value) is kind
    return str(error.value)


def test_a_certificate_of_another_host(tls: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{tls[0]}")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls[1]))
    text = error_of_a_read(StorageError)
    assert "other.example" in text
    assert "certificate is of another host" in text


def test_a_certificate_of_nobody_known(tls: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{tls[0]}")
    assert "AWS_CA_BUNDLE" in error_of_a_read(StorageError)


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_bundle_that_cannot_be_read(tls: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    file = tmp_path / "bundle.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{tls[0]}")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
    assert f"the certificates in {file} cannot be read" in error_of_a_read(UsageError)


def test_https_where_there_is_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_address[1]}")
    try:
        assert "write http:// in AWS_ENDPOINT_URL" in error_of_a_read(StorageError)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("profile", "kind", "words"),
    [
        ("fails", AccessError, "run the credential_process of ~/.aws/config by hand"),
        ("gone", AccessError, "no-program: check AWS_WEB_IDENTITY_TOKEN_FILE, and credential_process"),
        ("junk", AccessError, "it has to print credentials"),
        ("sso", AccessError, "aws sso login --profile sso"),
        ("role", UsageError, "nobody"),
    ],
)
def test_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, kind: type[CkptError], words: str) -> None:
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", profile)
    assert words in error_of_a_read(kind)


def test_a_token_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    assert f"credentials come from {tmp_path / 'token'}" in error_of_a_read(AccessError)


@pytest.mark.parametrize(
    ("status", "code", "headers", "kind", "words"),
    [
        (
            403,
            "RequestTimeTooSkewed",
            {"date": "Sun, 01 Nov 2026 10:00:00 GMT"},
            AccessError,
            "set the clock of this machine; the store's says Sun",
        ),
        (307, "", {"location": "http://other.example/x"}, StorageError, "sends us to http://other.example/x: set AWS_ENDPOINT_URL"),
        (400, "AuthorizationHeaderMalformed", {"x-amz-bucket-region": "eu-west-3"}, StorageError, "set AWS_REGION=eu-west-3"),
        (400, "InvalidIdentityToken", {}, AccessError, "check the credentials"),
        (405, "", {}, StorageError, "the endpoint of an S3 store"),
    ],
)
def test_answers(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, headers: dict[str, str], kind: type[CkptError], words: str
) -> None:
    body = f"<Error><Code>{code}</Code><Message>meddled</Message></Error>".encode() if code else b""
    wanted = "GetObject"  # botocore itself asks for the region of a bucket, by another request
    seen = watch(
        monkeypatch, lambda s: AWSResponse(s.request.url, *((status, headers) if s.operation == wanted else (403, {})), _Raw(body))
    )
    assert words in error_of_a_read(kind)
    assert [s.operation for s in seen].count(wanted) == 1


def test_a_store_that_redirects_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, lambda s: AWSResponse(s.request.url, 307, {"location": "http://other.example/"}, _Raw(b"")))
    assert "answers every request with a redirect" in error_of_a_read(StorageError)


def test_a_store_without_etags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the gateway of JuiceFS by default. The first answer may have been half of one."""
    seen = watch(monkeypatch, lambda s: AWSResponse(s.request.url, 200, {"content-length": "1"}, _Raw(b"")))
    with pytest.raises(StorageError, match="JuiceFS gateway: --keep-etag"):
        open_backend("s3://bucket/run").size("a")
    assert len(seen) == 5


def test_a_store_that_never_answered_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not one that has: that is a network that comes back. Only pauses between tries count as time: a busy machine adds nothing."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(s3_tries, "time", clock)
    reached: list[int] = []

    def meddle(seen: Any) -> Any:
        if reached:
            reached.clear()
            return answer(seen.request, 404, "NoSuchKey")
        raise ConnectTimeoutError(endpoint_url=seen.request.url)

    watch(monkeypatch, meddle)
    times = []
    for first in (False, True):
        if first:
            reached.append(1)
            with pytest.raises(CkptError):
                open_backend("s3://bucket/run").read("a")
        pauses.clear()
        with pytest.raises(StorageError, match="ConnectTimeoutError"):
            open_backend("s3://bucket/run").read("a")
        times.append(sum(pauses))
    assert s3_tries.STRANGE <= times[0] < 2 * s3_tries.STRANGE
    assert times[1] > 4 * s3_tries.STRANGE
