"""Ranks: spawned gloo processes that live as long as the benchmark and run one task after another.

A task is a module-level function ``task(rank, **arguments)``; the first ``n`` ranks run it together. This module does not import torch: the
parent stays small, and the ranks import it after their threads are limited.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEADLINE = 1800.0
"""Seconds after which a task that did not end counts as hanging."""


class TaskError(RuntimeError):
    """A task raised on a rank, or a rank died or hangs."""


@dataclass(eq=False)
class Rank:
    """This process as the tasks see it. ``groups`` has the first n ranks under n, ``second`` other groups of the same, for what goes on in
    another thread; ``kept`` is what tasks leave for later ones."""

    number: int
    groups: dict[int, ProcessGroup]
    second: dict[int, ProcessGroup]
    kept: dict[str, Any] = field(default_factory=dict)


class Pool:
    """``count`` ranks. A context manager: they end with it."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(number, count, theirs), name=f"rank {number}"
            )  # no daemon: some contestants start a process
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        port = self._answers([0])[0]
        for pipe in self._pipes[1:]:
            pipe.send(port)
        self._answers(range(count))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10 if error is None else 0.1)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, task: Callable[..., Any], *, on: int, **arguments: Any) -> list[Any]:
        """Run a task on the first ``on`` ranks; what each returned.

        Raises:
            TaskError: it failed on one of them. The pool is of no use after that.
        """
        for pipe in self._pipes[:on]:
            pipe.send((task, on, arguments))
        return self._answers(range(on))

    def _answers(self, ranks: Sequence[int]) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(ranks):
            waiting = {self._pipes[r]: r for r in ranks if r not in found}
            ready = wait(list(waiting), DEADLINE)
            if not ready:
                raise TaskError(f"nothing was heard of ranks {sorted(waiting.values())} for {DEADLINE:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found[waiting[pipe]] = _answer(pipe, waiting[pipe])
        return [found[r] for r in ranks]


def _answer(pipe: Connection, rank: int) -> Any:
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise TaskError(f"rank {rank} died") from None
    if not ok:
        raise TaskError(f"rank {rank} raised\n{value}")
    return value


def _serve(number: int, count: int, pipe: Connection) -> None:
    """Life of a rank: until the pipe closes."""
    try:
        rank = _join(number, count, pipe)
        pipe.send((True, None))
        while True:
            task, on, arguments = pipe.recv()
            os.environ["LOCAL_WORLD_SIZE"] = str(on)  # as torchrun tells each rank, which takes its share of the cores by it
            pipe.send((True, task(rank, **arguments)))
    except EOFError:
        return
    except BaseException:  # noqa: BLE001  whatever it is, the parent raises it
        with suppress(BrokenPipeError):  # the parent has given up because of another rank
            pipe.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def _join(number: int, count: int, pipe: Connection) -> Rank:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    port = 0 if number == 0 else pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if number == 0:
        pipe.send((True, store.port))
    dist.init_process_group("gloo", store=store, rank=number, world_size=count)
    groups, second = ({n: dist.new_group(list(range(n))) for n in range(1, count + 1)} for _ in range(2))
    return Rank(number, _mine(number, groups), _mine(number, second))


def _mine(number: int, groups: dict[int, Any]) -> dict[int, ProcessGroup]:
    """The groups that this rank is in; for others torch gives a constant."""
    return {n: group for n, group in groups.items() if number < n}
