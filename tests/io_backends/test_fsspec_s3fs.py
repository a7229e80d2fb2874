"""The generic backend over a real fsspec file system, with an event loop and a real store behind it: s3fs, by its scheme s3a://."""

from __future__ import annotations

import pytest

from ckpt.io_backends import Backend, open_backend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.io_backends.conformance.reading import ReadingRows
from ckpt.io_backends.fsspec_backend import FsspecBackend

pytest.importorskip("s3fs")


@pytest.fixture
def backend(s3_url: str) -> Backend:
    found = open_backend(s3_url.replace("s3://", "s3a://"))
    assert isinstance(found, FsspecBackend)
    return found


class TestReading(ReadingRows):
    """Where file systems differ most: ranges, ends, absence."""


@pytest.mark.slow
class TestAll(BackendConformance):
    exclusive_create = False
