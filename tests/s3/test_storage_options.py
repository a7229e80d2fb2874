"""What users of fsspec and s3fs bring reaches the store that they mean: options, file systems, configuration; or it is refused by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.engine.copy import copy_checkpoint
from ckpt.errors import AccessError, CkptError, ConflictError, NotFoundError, StorageError, UsageError
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.io_backends import open_backend, registry
from ckpt.io_backends import s3_client as s3_client
from ckpt.io_backends.conformance.reading import everything
from ckpt.io_backends.fsspec_backend import FsspecBackend
from ckpt.io_backends.s3_backend import S3Backend
from tests.cli.running import run
from tests.faults.proxy import FaultProxy
from tests.s3.elsewhere import elsewhere
from tests.s3.meddling import watch
from tests.s3.rgw import KEY, SECRET
from tests.s3.stores import ObjectStore

s3fs = pytest.importorskip("s3fs")

SCHEMES = ("s3", "s3a")
ALIKE = ("s3", pytest.param("s3a", marks=pytest.mark.slow))
"""Where what a store answers is looked at, which does not depend on the name of its scheme."""


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Nothing is known of any store; no test may ask another one than it means."""
    monkeypatch.setattr(registry, "_table", {})
    with elsewhere(monkeypatch) as requests:
        yield requests
        assert requests == []


@pytest.fixture
def options(object_store: ObjectStore) -> dict[str, Any]:
    return {"key": KEY, "secret": SECRET, "endpoint_url": object_store.endpoint}


def place(store: ObjectStore, scheme: str = "s3") -> str:
    return store.new_prefix().replace("s3://", f"{scheme}://")


def state(number: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((3, 4), number), "n": number}


def check(url: str, number: float = 1.0) -> None:
    found = state(0.0)
    ckpt.load(url, found)
    assert torch.equal(found["w"], torch.full((3, 4), number))
    assert found["n"] == number


# ---- storage options and file systems


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("scheme", ALIKE)
def test_options_reach_every_call(object_store: ObjectStore, options: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    root = place(object_store, scheme)
    ckpt.configure_storage(f"{scheme}://tests", options)
    ckpt.save(f"{root}/step-1", state())
    ckpt.save_async(f"{root}/step-2", state(2.0)).result()
    check(f"{root}/step-2", 2.0)
    assert torch.equal(torch.as_tensor(ckpt.open(f"{root}/step-1")["w"][:]), state()["w"])
    with ckpt.Checkpointer(root) as c:
        c.save(3, state(3.0))
        c.wait()
        assert c.restore(state(0.0)) == 3
    assert [s.number for s in ckpt.list_steps(root)] == [1, 2, 3]
    dcp.save({"w": torch.ones(3)}, storage_writer=CkptWriter(f"{root}/dcp"), no_dist=True)
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=CkptReader(f"{root}/dcp"), no_dist=True)
    assert torch.equal(found["w"], torch.ones(3))
    copy_checkpoint(f"{root}/step-1", f"{root}/copy")
    copy_checkpoint(f"{root}/copy", str(tmp_path / "copy"))
    check(str(tmp_path / "copy"))


def test_the_longest_url_decides(object_store: ObjectStore, options: dict[str, Any], moto_store: ObjectStore) -> None:
    """Two stores with the same bucket names in one copy."""
    url, other = object_store.new_prefix(), moto_store.new_prefix()
    ckpt.configure_storage("s3://", options)
    ckpt.configure_storage(other, {**options, "endpoint_url": moto_store.endpoint})
    ckpt.save(f"{url}/a", state())
    copy_checkpoint(f"{url}/a", f"{other}/a")
    assert [s.url for s in ckpt.list_steps(other) if s.committed] == [f"{other}/a"]
    names = [o["Key"] for o in moto_store.client.list_objects_v2(Bucket="tests", Prefix=other.removeprefix("s3://tests/"))["Contents"]]
    assert any(name.endswith("/a/checkpoint.json") for name in names)
    assert everything(open_backend(f"{other}x")) == {}  # not below it
    ckpt.configure_storage(other)
    assert everything(open_backend(other)) == {}  # in the other store


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_system_that_is_there_already(object_store: ObjectStore, options: dict[str, Any], scheme: str) -> None:
    root = place(object_store, scheme)
    ckpt.configure_storage(f"{scheme}://tests", filesystem=s3fs.S3FileSystem(**options))
    assert isinstance(open_backend(root), FsspecBackend)
    ckpt.save(f"{root}/step-1", state())
    check(f"{root}/step-1")


def test_sources_of_virtual_checkpoints_have_options_of_their_own(
    object_store: ObjectStore, options: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import save

    from ckpt.converters.importer import import_checkpoint

    backend = open_backend_with(options, url := place(object_store))
    content = save({"w": torch.ones(3, 4)})
    with backend.create("model.safetensors", len(content)) as writer:
        writer.write(0, [content])
        writer.commit()
    import_checkpoint(url, str(tmp_path / "v"))
    assert torch.equal(torch.as_tensor(ckpt.open(str(tmp_path / "v"))["w"][:]), torch.ones(3, 4))
    assert not [p for p in (tmp_path / "v").rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]


def open_backend_with(options: Mapping[str, Any], url: str) -> Any:
    ckpt.configure_storage(url, options)
    return open_backend(url)


# ---- fsspec's configuration


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("prefix", ["FSSPEC_S3", "FSSPEC_S3A"])
def test_variables_of_fsspec(
    object_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, scheme: str, prefix: str
) -> None:
    for name, value in options.items():
        monkeypatch.setenv(f"{prefix}_{name.upper()}", value)
    url = place(object_store, scheme)
    ckpt.save(url, state())
    check(url)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_keys_of_aws_go_to_the_endpoint_of_fsspec(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", object_store.endpoint)
    ckpt.save(url := place(object_store, scheme), state())
    check(url)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_of_fsspec(object_store: ObjectStore, options: dict[str, Any], tmp_path: Path, scheme: str) -> None:
    """fsspec reads its files when it is imported."""
    (tmp_path / "any.json").write_text(json.dumps({"s3": options}))
    url = place(object_store, scheme)
    code = "import sys, ckpt.io_backends as b; b.open_backend(sys.argv[1]).put_if('a', b'x', expected=None)"
    environment = {**os.environ, "FSSPEC_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, url], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert everything(open_backend_with(options, url)) == {"a": b"x"}


def test_precedence(object_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, then fsspec's configuration, then AWS_*; as s3fs has it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("FSSPEC_S3", json.dumps({**options, "secret": "wrong"}))
    ckpt.configure_storage("s3://tests", {"secret": SECRET})
    for scheme in SCHEMES:
        ckpt.save(url := place(object_store, scheme), state())
        check(url)


def test_changed_variables_are_seen(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for scheme in SCHEMES:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        ckpt.save(url := place(object_store, scheme), state())
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "changed")
        if object_store.kind == "rgw":  # moto takes every key
            with pytest.raises(AccessError):
                ckpt.save(url, state())


@pytest.mark.parametrize("value", ["text", "[1]"])
def test_a_variable_that_cannot_be_understood(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FSSPEC_S3", value)
    for scheme in SCHEMES:
        with pytest.raises(UsageError, match="FSSPEC_S3"):
            open_backend(f"{scheme}://bucket/run")


# ---- options of s3fs that our client does not have


def test_an_option_that_only_s3fs_has_goes_through_s3fs(
    object_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt.io_backends.registry._through_s3fs", set())
    url = place(object_store)
    backend = open_backend_with({**options, "s3_additional_kwargs": {"Metadata": {"mine": "1"}}}, url)
    assert isinstance(backend, FsspecBackend)
    assert caplog.messages == ["s3:// goes through s3fs, with its guarantees, since only that has the storage options s3_additional_kwargs"]
    ckpt.save(url, state())
    check(url)
    key = f"{url.removeprefix('s3://tests/')}/checkpoint.json"
    assert object_store.client.head_object(Bucket="tests", Key=key)["Metadata"] == {"mine": "1"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_option_that_nobody_has_is_named(object_store: ObjectStore, options: dict[str, Any], scheme: str) -> None:
    url = place(object_store, scheme)
    with pytest.raises(UsageError, match="sekret") as raised:
        open_backend_with({**options, "sekret": SECRET + SECRET}, url).read("a")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("name", ["default_block_size", "default_cache_type", "listings_expiry_time", "fixed_upload_size"])
def test_options_without_effect_leave_the_backend(options: dict[str, Any], name: str) -> None:
    assert isinstance(open_backend_with({**options, name: 1}, "s3://bucket/run"), S3Backend)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"anon": "perhaps"}, "anon is true or false"),
        ({"key": "a"}, "have key, but no secret"),
        ({"token": "a"}, "have token, but no key and secret"),
        ({"key": 1234, "secret": "s"}, "key is not text"),
        ({"client_kwargs": "x"}, "client_kwargs is not a dict"),
        ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url is no URL"),
        ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, "endpoint_url and client_kwargs.endpoint_url differ"),
    ],
)
def test_options_that_cannot_be_understood(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        open_backend_with(given, "s3://bucket/run")


def test_what_the_client_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile mine]\nregion = eu-south-2\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    given = {
        "profile": "mine",
        "endpoint_url": "https://127.0.0.1:9",
        "client_kwargs": {"verify": False},
        "config_kwargs": {"s3": {"addressing_style": "virtual"}, "read_timeout": 3, "user_agent_extra": "mine/1"},
    }
    backend = open_backend_with(given, "s3://bucket/run")
    assert isinstance(backend, S3Backend)
    boto = backend._client._client()
    assert (boto.meta.region_name, boto.meta.endpoint_url) == ("eu-south-2", "https://127.0.0.1:9")
    assert boto.meta.config.s3["addressing_style"] == "virtual"
    assert boto.meta.config.read_timeout == 3
    assert boto.meta.config.user_agent_extra == "mine/1"
    assert boto._endpoint.http_session._verify is False
    assert boto._request_signer._credentials.access_key == "k"
    backend = open_backend_with(
        {"use_ssl": False, "client_kwargs": {"region_name": "eu-west-9"}, "key": "a", "secret": "b"}, "s3://bucket/run"
    )
    boto = backend._client._client()
    assert boto.meta.endpoint_url == "http://s3.eu-west-9.amazonaws.com"


def test_who_asks_pays(object_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    url = place(object_store)
    ckpt.configure_storage(url, {**options, "requester_pays": True})
    ckpt.save(url, state())
    check(url)
    assert {s.request.headers.get("x-amz-request-payer") for s in seen} == {b"requester"}


# ---- reading without keys


@pytest.mark.parametrize("scheme", ALIKE)
@pytest.mark.parametrize("how", ["option", "variable"])
def test_public_buckets(object_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, scheme: str, how: str) -> None:
    bucket = object_store.new_bucket()
    ckpt.configure_storage("s3://", options)
    ckpt.save(f"{bucket}/a", state())
    name = bucket.removeprefix("s3://")
    object_store.client.put_bucket_acl(Bucket=name, ACL="public-read")
    for found in object_store.client.list_objects_v2(Bucket=name)["Contents"]:
        object_store.client.put_object_acl(Bucket=name, Key=found["Key"], ACL="public-read")
    if how == "option":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of another store")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of another store")
        ckpt.configure_storage("s3://", {"anon": True, "endpoint_url": object_store.endpoint})
    else:
        ckpt.configure_storage("s3://")
        monkeypatch.setenv("FSSPEC_S3_ANON", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)
    root = bucket.replace("s3://", f"{scheme}://")
    check(f"{root}/a")
    assert [s.committed for s in ckpt.list_steps(root)] == [True]
    if object_store.kind == "rgw":
        with pytest.raises(AccessError):
            ckpt.save(f"{root}/b", state())


@pytest.mark.parametrize("scheme", ALIKE)
def test_without_keys_the_hint_says_how_to_read_public_buckets(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)
    with pytest.raises(AccessError, match="NoCredentialsError") as raised:
        ckpt.list_steps(f"{scheme}://tests/run")
    assert "FSSPEC_S3_ANON=true" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": "x", "secret": "hush"}, "win over the environment: endpoint_url, key, secret"),
        ({"anon": True}, "win over the environment: anon, endpoint_url"),
        (
            {"anon": True, "client_kwargs": {"verify": "/nowhere.pem"}},
            "the certificates in /nowhere.pem cannot be read",
        ),
    ],
)
def test_errors_name_the_options_that_decide(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    """And not variables that count for nothing beside them."""
    if object_store.kind == "moto":
        pytest.skip("moto lets everybody in")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/not/this/one.pem")
    endpoint = object_store.endpoint.replace("http:", "https:") if "client_kwargs" in given else object_store.endpoint
    ckpt.configure_storage("s3://tests", {**given, "endpoint_url": endpoint})
    with pytest.raises(CkptError) as raised:
        open_backend("s3://tests/run").read("a")
    assert words in str(raised.value) and "hush" not in str(raised.value) and "/not/this" not in str(raised.value)


# ---- guarantees


@pytest.mark.parametrize("scheme", ALIKE)
def test_a_bucket_of_a_mistyped_name_is_not_made(object_store: ObjectStore, options: dict[str, Any], scheme: str) -> None:
    before = [b["Name"] for b in object_store.client.list_buckets()["Buckets"]]
    root = f"{scheme}://no-such-bucket-anywhere/run"
    ckpt.configure_storage(root, options)
    for call in (lambda: ckpt.save(f"{root}/a", state()), lambda: ckpt.load(f"{root}/a", state()), lambda: ckpt.list_steps(root)):
        with pytest.raises(NotFoundError, match="the bucket does not exist"):
            call()
    assert [b["Name"] for b in object_store.client.list_buckets()["Buckets"]] == before


@pytest.mark.parametrize("scheme", ALIKE)
def test_a_store_that_ignores_conditions_is_refused(
    moto_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with FaultProxy(moto_store.endpoint, drops=frozenset({"if-none-match"})) as proxy:
        url = place(moto_store, scheme)
        backend = open_backend_with({**options, "endpoint_url": proxy.url}, url)
        for call in (backend.prepare, lambda: backend.put_if("a", b"x", expected=None), lambda: ckpt.save(url, state())):
            with pytest.raises(StorageError, match="CKPT_CONDITIONAL_PUT=emulate"):
                call()
        assert everything(backend) == {}
        monkeypatch.setenv("CKPT_CONDITIONAL_PUT", "emulate")
        ckpt.save(url, state())
        check(url)
        with pytest.raises(ConflictError):
            backend.put_if("checkpoint.json", b"x", expected=None)


def test_conditions_are_tried_once(object_store: ObjectStore, options: dict[str, Any]) -> None:
    with FaultProxy(object_store.endpoint) as proxy:
        url = place(object_store, "s3a")
        open_backend_with({**options, "endpoint_url": object_store.endpoint}, url).prepare()
        for number in range(3):
            open_backend(url).put_if(f"a{number}", b"x", expected=None)
    assert proxy.requests == 0
    assert everything(open_backend(url)) == {f"a{n}": b"x" for n in range(3)}


# ---- secrets


def test_secrets_do_not_show(object_store: ObjectStore, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ckpt")
    secret = "a-very-secret-value"
    ckpt.configure_storage("s3://tests", {**options, "secret": secret})
    shown = [repr(registry._table)]
    for scheme in SCHEMES:
        backend = open_backend(place(object_store, scheme))
        shown.append(repr(backend))
        if object_store.kind == "rgw":
            with pytest.raises(AccessError) as raised:
                backend.prepare()
            shown.append(str(raised.value))
    backend = open_backend("s3://tests/x")
    assert isinstance(backend, S3Backend)
    shown += [repr(backend._options), caplog.text]
    assert secret not in "".join(shown)
    assert secret not in repr(list(s3_client._clients))


def test_a_password_in_a_url_is_refused() -> None:
    for call in (open_backend, ckpt.configure_storage, ckpt.open):
        with pytest.raises(UsageError, match="password") as raised:
            call("sftp://me:swordfish@host/runs")
        assert "swordfish" not in str(raised.value)


# ---- the command


def command(*args: str) -> str:
    done = run(*args)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_takes_the_configuration_of_fsspec(
    object_store: ObjectStore, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in options.items():
        monkeypatch.setenv(f"FSSPEC_S3_{name.upper()}", value)
    url = place(object_store)
    ckpt.save(f"{url}/step-1", state())
    assert "step-1" in command("ls", url)


def test_the_command_copies_between_two_stores(
    object_store: ObjectStore, moto_store: ObjectStore, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = object_store.new_prefix(), moto_store.new_prefix()
    (tmp_path / "stores.json").write_text(json.dumps({source: options, target: {**options, "endpoint_url": moto_store.endpoint}}))
    monkeypatch.setenv("CKPT_STORAGE_OPTIONS", str(tmp_path / "stores.json"))
    ckpt.save(source, state())
    command("cp", source, target)
    monkeypatch.delenv("CKPT_STORAGE_OPTIONS")
    ckpt.configure_storage(target, {**options, "endpoint_url": moto_store.endpoint})
    check(target)
