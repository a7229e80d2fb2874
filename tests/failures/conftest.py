"""What the failure tests share: processes that may die, and a place in memory to save to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest

from ckpt.io_backends.inprocess import InProcessBackend
from tests.failures import rich
from tests.failures.damage import Copy
from tests.failures.hostile import loaded

SHM = "/dev/shm"


@pytest.fixture(autouse=True)
def _without_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are placed by the number of an operation; how long a save took is written by three more, which have a test of their own."""
    monkeypatch.setenv("CKPT_SPANS", "off")
    monkeypatch.setenv("CKPT_PROGRESS", "off")


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory in memory where there is one: thousands of fsyncs on a disk take minutes."""
    with TemporaryDirectory(prefix="ckpt-", dir=SHM if os.path.isdir(SHM) else None) as path:
        yield path


@pytest.fixture(params=["posix", "memory"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty root, of each backend."""
    if request.param == "posix":
        yield request.getfixturevalue("directory")
        return
    InProcessBackend.reset()
    yield "inprocess://failures"
    InProcessBackend.reset()


@pytest.fixture(scope="module")
def copy() -> Iterator[Copy]:
    """A checkpoint with one of everything, to be spoiled."""
    InProcessBackend.reset()
    rich.save("inprocess://hostile")
    yield Copy("inprocess://hostile")
    InProcessBackend.reset()


@pytest.fixture(scope="module")
def right(copy: Copy) -> dict[str, bytes]:
    """The bytes of every tensor that a load fills."""
    copy.restore()
    return loaded(copy.url)
