"""Commands whose work several processes divide: those that torchrun or srun starts, or tasks of Ray. One process speaks, and all end with
one exit code."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import CkptError, RankFailedError, UsageError
from ckpt.needs import require_torch

from .interrupts import INTERRUPTED
from .output import Command, OneOf, Output, ParamType

if TYPE_CHECKING:
    from ckpt.net.divided_work import DividedWork, TaskPart
    from ckpt.net.group import LaunchedProcesses

_ALONE = "ckpt.alone"
_WAITED = 5.0
"""Seconds of waiting for the other processes after which a user hears of it: there may be none, in a shell that has the variables of a
job that it was started from."""
_OWN = {"threads", "memory", "as_json", "quiet"}
"""Parameters that each process may have as it likes."""
ARGUMENTS = "ckpt.arguments"
"""Where the context has the command line, for tasks that run it again."""
_EXECUTOR, _TASKS = "ckpt.executor", "ckpt.tasks"
_PART: ContextVar[TaskPart | None] = ContextVar("part", default=None)
"""The part that this thread does, if it runs the command as a task."""
_SINGLE = "ckpt.part"


@contextmanager
def task_part(part: TaskPart) -> Iterator[None]:
    """Run a command in the block as a task that does this part."""
    token = _PART.set(part)
    try:
        yield
    finally:
        _PART.reset(token)


def divisible(command: Command) -> Command:
    """The options ``--no-distributed``, ``--part``, ``--executor`` and ``--tasks`` of a command whose work several processes divide.
    Nothing is passed to the command."""
    alone = "Do all of the work in this process, even under torchrun or srun."
    options = (
        _noted(_EXECUTOR, "--executor", type=OneOf(("ray",)), metavar="NAME", help="ray: divide the work into tasks of Ray."),
        _noted(_TASKS, "--tasks", type=click.IntRange(min=1), metavar="N", help="Tasks. [default: as many as can run at once]"),
        _noted(_ALONE, "--no-distributed", is_flag=True, help=alone),
        _noted(_SINGLE, "--part", type=PartOfArray(), metavar="I/N", help="Do part I of N (from 0), as an element of an array job."),
    )
    for add in reversed(options):
        command = add(command)
    return command


class PartOfArray(ParamType):
    """``3/16`` as the tuple (3, 16)."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        number, _, count = str(value).partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            self.fail(f"{value!r} is not a part: parts are counted from 0, so 16 parts are 0/16 to 15/16", param, ctx)
        return int(number), int(count)


def _noted(key: str, name: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option that ``divided`` finds in the context."""

    def note(context: click.Context, _: click.Parameter, value: object) -> None:
        context.meta[key] = value

    return click.option(name, expose_value=False, callback=note, **attributes)


def is_alone() -> bool:
    """Whether the command that runs was given ``--no-distributed``."""
    return bool(click.get_current_context().meta.get(_ALONE))


def single_part() -> tuple[int, int] | None:
    """What the command that runs was given as ``--part``."""
    part: tuple[int, int] | None = click.get_current_context().meta.get(_SINGLE)
    return part


@contextmanager
def divided(url: str, output: Output, *, apart: bool = False, single: bool = True) -> Iterator[tuple[DividedWork | None, Output]]:
    """Around the work of a command and what it says of it: this process's part, None if it was started alone, and where it says something.
    ``apart``: the command divides by RANK and WORLD_SIZE also where nothing says how the processes reach each other. ``single``: each part
    can be done without the others."""
    part = _PART.get()
    context = click.get_current_context()
    if part is not None:
        yield part, replace(output, muted=True)
        return
    if single_part() is not None:
        yield _single_work(context, apart=apart, single=single), output
        return
    from ckpt.net.group import launched

    processes = None if is_alone() else launched(apart=apart)
    if context.meta.get(_EXECUTOR) is not None:
        if processes is not None:
            raise UsageError("--executor starts the processes, and a launcher has started some", hint=f"choose one; {processes.alone}")
        with _tasked(context) as work:
            yield work, output
        return
    if context.meta.get(_TASKS) is not None:
        raise UsageError("--tasks is only valid with --executor", hint="--executor ray")
    if processes is None:
        yield None, output
        return
    command = str(context.info_name)
    require_torch(f"`ckpt {command}` in several processes")
    from ckpt.net.divided_work import LaunchedWork

    work = LaunchedWork(processes)
    code = 0
    try:
        with _waiting_noticed(processes):
            work.join(
                command, url, {f"--{name.replace('_', '-')}": repr(value) for name, value in context.params.items() if name not in _OWN}
            )
        yield work, replace(output, muted=not work.leads)
    except BaseException as err:
        code = _code_of(err)
        if not isinstance(err, click.exceptions.Exit):
            work.fail(err)
        if work.leads:
            raise _as_its_cause(err) from None
        first = work.await_end()
        if first is None:
            raise
        code = first or code
    finally:
        if work.leads:
            atexit.register(work.end, code)  # after the last word
    if not work.leads:
        context.exit(code if code else work.await_end() or 0)


def _single_work(context: click.Context, *, apart: bool, single: bool) -> DividedWork | None:
    if given := [
        name for name, key in (("--no-distributed", _ALONE), ("--executor", _EXECUTOR), ("--tasks", _TASKS)) if context.meta.get(key)
    ]:
        raise UsageError(f"--part and {given[0]} exclude each other")
    if not single:
        hint = "start all processes together with srun or torchrun, or use --executor ray"
        raise UsageError(f"`ckpt {context.info_name}` commits when all parts are done, which no part alone can know", hint=hint)
    if apart:
        return None
    from ckpt.net.divided_work import SinglePart

    return SinglePart(*(single_part() or (0, 1)))


@contextmanager
def _waiting_noticed(processes: LaunchedProcesses) -> Iterator[None]:
    """Say for whom this process waits, and how to do without, if the block takes long."""
    others = "the other process" if processes.size == 2 else f"the other {processes.size - 1} processes"
    text = f"waiting for {others} at {processes.host}:{processes.port}: the environment makes this one {processes.rank} of {processes.size}"
    timer = threading.Timer(_WAITED, click.echo, (f"{text}; {processes.alone}",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _tasked(context: click.Context) -> Iterator[DividedWork]:
    """The work of a command in tasks. A task reserves a CPU for each of its threads."""
    from ckpt.net.divided_work import TaskedWork

    from .ray_tasks import ray_tasks

    with ray_tasks(context.meta[ARGUMENTS], count=context.meta.get(_TASKS), cpus=context.params.get("threads") or 1) as tasks:
        try:
            yield TaskedWork(tasks.count, tasks.run)
        except CkptError as err:
            raise _as_its_cause(err) from None


def _as_its_cause(err: BaseException) -> BaseException:
    """The error of another process as the class that it was there, so that it has its name and exit code."""
    if not isinstance(err, RankFailedError) or err.cause_class() is RankFailedError:
        return err
    return err.cause_class()(err.message, where=err.where, hint=err.hint)


def _code_of(err: BaseException) -> int:
    err = _as_its_cause(err)
    if isinstance(err, click.exceptions.Exit | CkptError):
        return err.exit_code
    return INTERRUPTED if isinstance(err, KeyboardInterrupt | click.Abort) else 1
