"""The object stores that tests run against: Ceph's gateway where it can run, else moto; one server for the whole run, a bucket per test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import pytest

from tests.s3 import moto, rgw

KEYS = {"AWS_ACCESS_KEY_ID": rgw.KEY, "AWS_SECRET_ACCESS_KEY": rgw.SECRET}
NO_FILES = {
    "AWS_CONFIG_FILE": "/nowhere/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nowhere/credentials",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SHARED = "tests"
"""The bucket of the tests that need none of their own."""

_used: dict[str, str] = {}


@dataclass(kw_only=True)
class ObjectStore:
    """A running server. ``environment`` is what a client needs to use it."""

    kind: Literal["rgw", "moto"]
    name: str
    endpoint: str
    pids: dict[str, int]

    @property
    def environment(self) -> dict[str, str]:
        return {**KEYS, **NO_FILES, "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"}

    @cached_property
    def client(self) -> Any:
        """A client of botocore's own, to look at the store with other eyes than ours."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=rgw.KEY,
            aws_secret_access_key=rgw.SECRET,
            config=Config(s3={"addressing_style": "path"}),
        )

    def new_bucket(self) -> str:
        """The URL of a new, empty bucket."""
        name = f"test-{uuid.uuid4().hex[:20]}"
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    @cached_property
    def shared_bucket(self) -> str:
        """The URL of the one bucket whose tests keep to a prefix of their own."""
        self.client.create_bucket(Bucket=SHARED)
        return f"s3://{SHARED}"

    def new_prefix(self) -> str:
        """The URL of a place where nothing is yet."""
        return f"{self.shared_bucket}/{uuid.uuid4().hex[:20]}"


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """The most real store that runs here."""
    try:
        server = rgw.serve()
        gateway = server.__enter__()
    except rgw.NotStartedError as err:
        with moto.serve() as (endpoint, version):
            yield _told(ObjectStore(kind="moto", name=f"moto {version}, not Ceph RGW: {err}", endpoint=endpoint, pids={}))
    else:
        try:
            yield _told(ObjectStore(kind="rgw", name=f"Ceph RGW {gateway.version}", endpoint=gateway.endpoint, pids=gateway.pids))
        finally:
            server.__exit__(None, None, None)


@pytest.fixture(scope="session")
def moto_store() -> Iterator[ObjectStore]:
    """moto, whatever else runs: it answers in some ways as AWS does and Ceph does not."""
    with moto.serve() as (endpoint, version):
        yield _told(ObjectStore(kind="moto", name=f"moto {version}", endpoint=endpoint, pids={}))


@pytest.fixture
def bucket(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, in an environment that leads to its store and to no other."""
    use(object_store, monkeypatch)
    return object_store.new_bucket()


@pytest.fixture
def s3_url(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a place in a bucket where nothing is yet; the environment is as for ``bucket``."""
    use(object_store, monkeypatch)
    return object_store.new_prefix()


def use(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment lead to this store and to no other."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)


def _told(store: ObjectStore) -> ObjectStore:
    """Whose clients share what botocore reads of its service: each would spend most of its time on the same JSON."""
    import botocore.session

    botocore.session.create_loader = cache(botocore.session.create_loader)
    _used[store.endpoint] = store.name
    return store


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what the tests of object storage have run against."""
    for name in _used.values():
        terminalreporter.write_line(f"object store: {name}")
