"""The backend for object stores keeps the tables of the port: on the real store, in single requests and in parts, and on moto."""

from __future__ import annotations

import pytest

from ckpt.io_backends import Backend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.io_backends.conformance.writing import WritingRows
from ckpt.io_backends.s3_backend import S3Backend
from tests.s3.stores import ObjectStore, use


class TestObjectStore(BackendConformance):
    @pytest.fixture
    def backend(self, s3_url: str) -> Backend:
        return S3Backend(s3_url)


class TestInParts(WritingRows):
    """The smallest parts that stores take, so that the rows about larger objects are about several of them."""

    @pytest.fixture
    def backend(self, bucket: str) -> Backend:
        return S3Backend(bucket, part=5 << 20)


class TestMoto(BackendConformance):
    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Backend:
        if object_store.kind == "rgw" and not request.config.getoption("--slow"):
            pytest.skip("a more real store runs; needs --slow")
        moto_store: ObjectStore = request.getfixturevalue("moto_store")
        use(moto_store, monkeypatch)
        return S3Backend(f"{moto_store.new_prefix()}/é root", part=5 << 20)
