"""Bits that flip on the way to an object store, and requests that arrive twice: the right bytes are there, or there is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import ConflictError, NotFoundError, StorageError
from ckpt.io_backends.conformance.reading import put
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.s3_backend import S3Backend
from tests.faults.proxy import FaultProxy, Schedule
from tests.s3.stores import ObjectStore, use

MIB = 1 << 20
DATA = np.random.default_rng(8).integers(0, 256, 11 * MIB + 77, dtype=np.uint8).tobytes()
OLD, NEW = b"the old record " * 20, b"the new record " * 20


@pytest.fixture(params=["object_store", pytest.param("moto_store", marks=pytest.mark.slow)])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    store: ObjectStore = request.getfixturevalue(request.param)
    use(store, monkeypatch)
    with FaultProxy(store.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("CKPT_TIMEOUT", "60")
        proxy.prefix = store.new_prefix()  # type: ignore[attr-defined]
        yield proxy


@pytest.fixture
def backend(proxy: FaultProxy) -> Backend:
    """Nothing goes wrong while it is found out what the store can do."""
    backend = S3Backend(proxy.prefix, part=5 * MIB)  # type: ignore[attr-defined]
    put(backend, "first", DATA)
    return backend


def single(backend: Backend) -> None:
    put(backend, "a", DATA[:100_000])


def parts(backend: Backend) -> None:
    put(backend, "a", DATA)


def shared(backend: Backend) -> None:
    one = backend.create_shared("a", len(DATA))
    assert one is not None
    other = backend.create_shared("a", len(DATA), one.token)
    assert other is not None
    try:
        one.write(0, [memoryview(DATA)[: 5 * MIB]])
        other.write(5 * MIB, [memoryview(DATA)[5 * MIB :]])
        one.complete([one.flush(), other.flush()], replace=False)
    finally:
        other.close()
        one.abort()


def published(backend: Backend) -> None:
    backend.put_if("a", NEW, expected=None)


def replaced(backend: Backend) -> None:
    backend.put_if("a", NEW, expected=OLD)


WRITES: dict[Callable[[Backend], None], bytes] = {single: DATA[:100_000], parts: DATA, shared: DATA, published: NEW, replaced: NEW}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_bit_flips_on_the_way_up(proxy: FaultProxy, backend: Backend, write: Callable[[Backend], None]) -> None:
    if write is replaced:
        backend.put_if("a", OLD, expected=None)
    proxy.schedule = Schedule(rates={"flip": 1}, methods=frozenset({"PUT"}), paths=r"/a(\?|$)", most=2)
    write(backend)
    assert proxy.injected["flip"] == 2
    proxy.schedule = None
    assert backend.read("a") == WRITES[write]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_bit_flips_each_time(proxy: FaultProxy, backend: Backend, write: Callable[[Backend], None]) -> None:
    if write is replaced:
        backend.put_if("a", OLD, expected=None)
    proxy.schedule = Schedule(rates={"flip": 1}, methods=frozenset({"PUT"}), paths=r"/a(\?|$)")
    with pytest.raises(StorageError, match=r"(?s)(MD5|BadDigest|SHA256).*5 times.*changes bytes"):
        write(backend)
    proxy.schedule = None
    if write in (single, parts, shared):
        with pytest.raises(NotFoundError):
            backend.size("a")


def test_without_checksums_it_would_not_be_noticed(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above says nothing."""
    monkeypatch.setenv("CKPT_S3_CHECKSUM", "off")
    backend = S3Backend(proxy.prefix, part=5 * MIB)  # type: ignore[attr-defined]
    proxy.schedule = Schedule(rates={"flip": 1}, methods=frozenset({"PUT"}), paths=r"/a(\?|$)")
    parts(backend)
    assert sum(a != b for a, b in zip(backend.read("a"), DATA, strict=True)) == 3


def test_saves(proxy: FaultProxy) -> None:
    """Whole checkpoints, the trial of what the store can do included: told committed means that each bit is right."""
    url = f"{proxy.prefix}/run"  # type: ignore[attr-defined]
    told = 0
    for number in range(5):
        state: dict[str, Any] = {"w": torch.full((300_000,), number, dtype=torch.int64), "n": number}
        proxy.schedule = Schedule(rates={"flip": 0.25}, seed=number, methods=frozenset({"PUT", "POST"}))
        try:
            ckpt.save(f"{url}/{number}", state)
            told += 1
        except StorageError:
            continue
        finally:
            proxy.schedule = None
        loaded = {"w": torch.zeros(300_000, dtype=torch.int64), "n": -1}
        ckpt.load(f"{url}/{number}", loaded)
        assert torch.equal(loaded["w"], state["w"])
        assert loaded["n"] == number
    assert told >= 2
    assert proxy.injected["flip"] > 4


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_request_that_arrives_twice_is_no_conflict(proxy: FaultProxy, backend: Backend, write: Callable[[Backend], None]) -> None:
    if write is replaced:
        backend.put_if("a", OLD, expected=None)
    proxy.schedule = Schedule(rates={"repeat": 1}, methods=frozenset({"PUT", "POST"}), paths=r"/a\?uploadId|/a$|/a\?partNumber")
    write(backend)
    assert proxy.injected["repeat"]
    proxy.schedule = None
    assert backend.read("a") == WRITES[write]
    with pytest.raises(ConflictError):
        published(backend)
