"""Parts of a command's work as tasks of Ray: ``--executor ray``. Ray decides where and when a task runs; it starts none of our
processes, and no task waits for another.

A task is a generator: it yields a sign every few seconds and its row at the end, so that the command sees progress and has a deadline for
silence. It is not Ray that repeats a lost task: a generator that Ray repeats must yield the same again, and signs of life do not.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt import settings
from ckpt.errors import CkptError, CorruptError, DeadlineError, RankFailedError, UsageError
from ckpt.needs import attribute, needed
from ckpt.net.channel import Row
from ckpt.net.divided_work import PartOrder
from ckpt.settings import __version__
from ckpt.telemetry.progress import ProgressCallback
from ckpt.text import parse_json

log = logging.getLogger("ckpt")

ATTEMPTS = 3
"""Times that a part is begun: with three, two machines may be lost under it."""
TASK = "ckpt.cli.task_process:signs_of_part"
"""What a task runs, by name, as a launcher names a program: it begins with the command line, which also leads here."""
LOOK = 1.0
"""Seconds that the command waits for the next sign of any task before it looks at its deadlines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayTasks:
    """Where a command's parts run: ``count`` of them, each on ``cpus`` CPUs. ``arguments`` are those of the command line. ``connection``
    ends when the parts are done."""

    count: int
    cpus: int
    arguments: Sequence[str]
    connection: ExitStack = field(default_factory=ExitStack)

    def run(self, orders: Sequence[PartOrder], report: ProgressCallback) -> dict[int, Row]:
        """Run all parts, and report the bytes that they have done: see ``RunParts`` in ``divided_work``."""
        # Ray prints messages of the cluster on stdout, which is the report's. The thread that does so ends with the connection.
        with redirect_stdout(sys.stderr), self.connection:
            return _Watch(self, orders).run(report)

    def start(self, order: PartOrder) -> Any:
        """The signs of a task that does this part."""
        import ray

        variables = {name: value for name, value in os.environ.items() if name.startswith("CKPT_")}
        call = {"version": __version__, "arguments": list(self.arguments), "folder": os.getcwd(), "variables": variables}
        task = ray.remote(num_returns="streaming", max_retries=0, num_cpus=self.cpus, name="ckpt")(attribute(TASK))
        return task.remote(json.dumps({**call, "order": order.to_json()}))


@contextmanager
def ray_tasks(arguments: Sequence[str], *, count: int | None, cpus: int) -> Iterator[RayTasks]:
    """Connect to the cluster that RAY_ADDRESS names, or that runs on this machine; with neither, start one here for the length of the
    block. ``count`` is by default as many tasks as the cluster can run at once."""
    try:
        with needed("ray", "ray"):
            import ray
    except ImportError as err:
        raise UsageError(str(err), hint="or start the command under torchrun or srun") from err
    with ExitStack() as connection:
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False, logging_level=logging.WARNING)
            except Exception as err:  # a bare one where Ray does not start in time
                raise UsageError(f"Ray cannot be reached or started: {err}", hint="look at RAY_ADDRESS, and at `ray status`") from err
            connection.callback(ray.shutdown)
        room = [int(node["Resources"].get("CPU", 0)) // cpus for node in ray.nodes() if node["Alive"]]
        if not sum(room):
            raise UsageError(f"no machine of the Ray cluster has {cpus} CPUs for a task", hint="give a smaller --threads; see `ray status`")
        yield RayTasks(count=count or sum(room), cpus=cpus, arguments=arguments, connection=connection)


class _Watch:
    """The tasks of one command, until each has given its row."""

    def __init__(self, tasks: RayTasks, orders: Sequence[PartOrder]) -> None:
        self._tasks = tasks
        self._orders = {order.number: order for order in orders}
        self._attempts = dict.fromkeys(self._orders, 0)
        self._signs: dict[int, Any] = {}
        self._heard: dict[int, float] = {}
        """When the last sign of a part came, of those that have begun."""
        self._progress = dict.fromkeys(self._orders, (0, 0))
        self._rows: dict[int, Row] = {}

    def run(self, report: ProgressCallback) -> dict[int, Row]:
        import ray

        timeout = settings.timeout(None)
        try:
            for number in self._orders:
                self._start(number)
            began = time.monotonic()
            while self._signs:
                if self._take_signs():
                    report(*map(sum, zip(*self._progress.values(), strict=True)))
                    began = time.monotonic()
                self._check_deadlines(began, timeout)
            return self._rows
        finally:
            for signs in self._signs.values():
                with suppress(ray.exceptions.RayError):
                    ray.cancel(signs, force=True)

    def _start(self, number: int) -> None:
        self._attempts[number] += 1
        self._signs[number] = self._tasks.start(self._orders[number])

    def _take_signs(self) -> bool:
        """Wait for signs for a moment; whether there was any."""
        import ray

        numbers = {signs: number for number, signs in self._signs.items()}
        ready, _ = ray.wait(list(numbers), num_returns=1, timeout=LOOK, fetch_local=False)
        for signs in ready:
            number = numbers[signs]
            try:
                self._take(number, parse_json(ray.get(next(signs), timeout=settings.timeout(None))))
            except StopIteration:
                raise RankFailedError(f"the task of part {number} ended without a word", hint="look at Ray's logs of it") from None
            except ray.exceptions.RayTaskError as err:  # not raised by our code, whose errors come as a sign
                raise RankFailedError(f"the task of part {number} failed in Ray: {err.cause}", hint="look at Ray's logs of it") from err
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as err:
                self._repeat(number, err)
        return bool(ready)

    def _take(self, number: int, sign: Mapping[str, Any]) -> None:
        self._heard[number] = time.monotonic()
        if "error" in sign:
            raise _error_of(number, sign["host"], sign["error"])
        self._progress[number] = tuple(sign["progress"])
        if "row" in sign:
            self._rows[number] = sign["row"]
            del self._signs[number]

    def _repeat(self, number: int, err: Exception) -> None:
        """Do a part again whose process was lost."""
        reason = (str(err).splitlines() or [""])[0]
        if self._attempts[number] == ATTEMPTS:
            message = f"part {number} was lost {ATTEMPTS} times with the process that did it: {type(err).__name__}: {reason}"
            raise RankFailedError(message, hint="look at Ray's logs: out of memory? A smaller --memory or more --tasks need less")
        log.warning("part %d was lost with the process that did it, and is done again (%s: %s)", number, type(err).__name__, reason)
        self._orders[number] = replace(self._orders[number], repeats=True)
        self._heard.pop(number, None)
        self._start(number)

    def _check_deadlines(self, began: float, timeout: float) -> None:
        now = time.monotonic()
        silent = [number for number, heard in self._heard.items() if number in self._signs and now - heard > timeout]
        if silent:
            raise DeadlineError(f"nothing was heard of the task of part {silent[0]} for {timeout:g} s", hint="look at that machine")
        if now - began > timeout:
            hint = "`ray status` shows what the cluster has free; CKPT_TIMEOUT is the time that a task may wait for room"
            raise DeadlineError(f"Ray has begun none of {len(self._signs)} tasks within {timeout:g} s", hint=hint)


def _error_of(number: int, host: str, error: Mapping[str, Any]) -> CkptError:
    """As ``failed_on``, for a task: damage stays damage, all else names the class that it was."""
    message = f"{error['message']} (part {number}, on {host})"
    if error["type"] == CorruptError.__name__:
        return CorruptError(message, where=error["where"], hint=error["hint"])
    failed = RankFailedError(message, where=error["where"], hint=error["hint"])
    failed.ranks, failed.causes = (number,), (error["type"],)
    return failed
