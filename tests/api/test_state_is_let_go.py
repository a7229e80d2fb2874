"""What a save or load held of a state is free when it is over, without waiting for the collector of cyclic garbage."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import NotFoundError
from ckpt.io_backends.fsspec_errors import fsspec_errors
from ckpt.io_backends.posix_files import storage_errors
from ckpt.net.group import Group, current_group


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPERATIONS: dict[str, Callable[[str, Any], object]] = {
    "save": ckpt.save,
    "lazy": lambda url, state: ckpt.save_async(url, state).result(30),
    "eager": lambda url, state: ckpt.save_async(url, state, capture="eager").result(30),
    "load": ckpt.load,
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_memory_is_free_afterwards(tmp_path: Path, operation: str) -> None:
    url = str(tmp_path / "a")
    state = {"x": torch.arange(4.0), "nested": {"y": torch.ones(3)}, "big": torch.ones(1 << 18), "step": 1}
    if operation == "load":
        ckpt.save(url, state)
    else:
        ckpt.save(url, {"x": torch.zeros(1)})
    OPERATIONS[operation](url, state)
    OPERATIONS[operation](url, state)  # what is kept between calls is in use now
    tensors = [weakref.ref(t) for t in (state["x"], state["nested"]["y"], state["big"])]  # type: ignore[index]
    del state
    end = time.monotonic() + 30  # a thread of the save may still be on its way out
    while any(ref() is not None for ref in tensors) and time.monotonic() < end:
        time.sleep(0.01)
    assert [ref() for ref in tensors] == [None] * 3


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("errors", [storage_errors, fsspec_errors])
def test_what_a_reader_of_an_absent_file_has_is_free(errors: Callable[..., AbstractContextManager[None]], tmp_path: Path) -> None:
    """A first save looks for the one before. From Python 3.12 on frames of generators keep those that called them."""

    def read() -> None:
        with errors("w", "read", reading=True):
            (tmp_path / "absent").read_bytes()

    def save() -> weakref.ref[torch.Tensor]:
        state = torch.ones(3)
        with pytest.raises(NotFoundError):
            read()
        return weakref.ref(state)

    assert save()() is None


def test_the_group_of_a_job_is_free_although_its_last_handle_is_kept(tmp_path: Path) -> None:
    """A group keeps the job's store, and the leader's is a server. Each thread without torch.distributed has a group of its own."""
    handles: list[ckpt.SaveHandle] = []
    groups: list[weakref.ref[Group]] = []

    def job() -> None:
        handles.append(ckpt.save_async(tmp_path / "a", {"x": torch.ones(3)}))
        handles[0].result(30)
        groups.append(weakref.ref(current_group()))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join(30)
    end = time.monotonic() + 30  # the thread of the save may still be on its way out
    while groups[0]() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert groups[0]() is None
    assert handles[0].progress().phase == "done"
