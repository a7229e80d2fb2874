"""One rank fails at a save or a load, the others are told, and the job goes on: for the scenarios of frameworks that have many ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from ckpt.errors import CkptError, DeadlineError
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import wrap_backends

from .lives import Job, Maker


class Storage(FaultyProcess):
    """Fails at every operation of one kind."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation, self.failed = operation, 0

    def _begin(self, what: str, *, is_write: bool) -> Fault | None:
        super()._begin(what, is_write=is_write)
        hit = what.startswith(self.operation)
        self.failed += hit
        return Fault(at=0, kind="error") if hit else None


@contextmanager
def failing_storage(operation: str) -> Iterator[None]:
    storage = Storage(operation)
    with wrap_backends(storage.wrap):
        yield
    assert storage.failed, f"this rank does nothing that begins with {operation}: {storage.log}"


def raising(target: object, attribute: str) -> AbstractContextManager[object]:
    """Have a method of a part of the state raise."""
    return mock.patch.object(target, attribute, side_effect=ValueError("of the state"))


def files(url: str) -> dict[str, str]:
    return {str(f.relative_to(url)): hashlib.sha256(f.read_bytes()).hexdigest() for f in Path(url).rglob("*") if f.is_file()}


class Failing(Job):
    """Another job, of whose first save and load each rank in turn fails at something.

    Every rank raises: the rank its own error, and the others one that names it, without waiting for the deadline. What was saved before
    stays as it is, nothing is committed at the place of the failed save, and the next save and load work. ``spoiled`` makes the state such
    that it cannot be saved. ``late``: a rank that does not call makes the others raise, too, at the deadline.
    """

    def __init__(self, job: Job, spoiled: Callable[[Job], AbstractContextManager[object]], *, late: bool) -> None:
        self.job, self.spoiled, self.late = job, spoiled, late
        self.train, self.digests = job.train, job.digests  # type: ignore[method-assign]

    def save(self, url: str) -> None:
        before = f"{url}/before"
        self.job.save(before)
        dist.barrier()
        there = files(before)
        ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "state": lambda: self.spoiled(self.job),
            "write": lambda: failing_storage("write"),
        }
        for way, fault in ways.items():
            for who in range(dist.get_world_size()):
                self.fails(lambda way=way, who=who: self.job.save(f"{url}/{way}-{who}"), fault, who)  # type: ignore[misc]
                assert files(before) == there
                assert not list(Path(url, f"{way}-{who}").rglob("checkpoint.json")), "it is committed"
        for who in range(dist.get_world_size()):
            self.fails(lambda: self.job.load(before), lambda: failing_storage("read_into data/"), who)
        if self.late:
            self.comes_late(url)
        self.job.load(before)  # a load that failed may have changed some of the state
        self.job.save(f"{url}/next")

    def load(self, url: str) -> None:
        self.job.load(f"{url}/next")

    def fails(self, call: Callable[[], None], fault: Callable[[], AbstractContextManager[object]], who: int) -> None:
        """A call during which a rank fails."""
        rank, error = dist.get_rank(), None
        with fault() if rank == who else nullcontext():
            try:
                call()
            except Exception as err:  # noqa: BLE001  the rank's own may be of any class
                error = err
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, repr(error))
        assert error is not None and not isinstance(error, DeadlineError), errors
        assert rank == who or (isinstance(error, CkptError) and f"rank {who}" in str(error)), errors

    def comes_late(self, url: str) -> None:
        """Rank 1 calls when rank 0 has given up, and is told so."""
        error, rank = None, dist.get_rank()
        with mock.patch.dict(os.environ, CKPT_TIMEOUT="4"):
            for turn in range(2):
                try:
                    if rank == turn:
                        self.job.save(f"{url}/late")
                except CkptError as err:
                    error = err
                dist.barrier()
        assert isinstance(error, DeadlineError) and "rank 1" in str(error), error
        assert not list(Path(url, "late").rglob("checkpoint.json")), "it is committed"


def failing(make: Maker, spoiled: Callable[[Job], AbstractContextManager[object]], *, late: bool = False) -> Maker:
    return lambda seed: Failing(make(seed), spoiled, late=late)
