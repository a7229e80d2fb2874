"""Commands that torchrun or srun starts in several processes: they divide the work, the first one speaks, all end with one exit code."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckpt import errors
from ckpt.errors import CkptError, RankFailedError

from .interrupts import INTERRUPTED
from .output import Output
from .requirements import require_torch

if TYPE_CHECKING:
    from ckpt.coordination.divided_work import DividedWork

_OWN = {"threads", "memory", "as_json", "quiet"}
"""Parameters that each process may have as it likes."""


@contextmanager
def divided(url: str, output: Output, *, apart: bool = False) -> Iterator[tuple[DividedWork | None, Output]]:
    """Around the work of a command and what it says of it: this process's part, None if it was started alone, and where it says something.
    ``apart``: the command divides by RANK and WORLD_SIZE also where nothing says how the processes reach each other.

    Raises:
        CkptError: on the first process, what happened on any. The others end silently, once that process has spoken.
    """
    from ckpt.coordination.launched import launched

    processes = launched(apart=apart)
    if processes is None:
        yield None, output
        return
    context = click.get_current_context()
    command = str(context.info_name)
    require_torch(f"`ckpt {command}` in several processes")
    from ckpt.coordination.divided_work import DividedWork

    work = DividedWork(processes)
    code = 0
    try:
        work.join(command, url, _arguments(context.params))
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


def _arguments(parameters: Mapping[str, Any]) -> dict[str, str]:
    return {f"--{name.replace('_', '-')}": repr(value) for name, value in parameters.items() if name not in _OWN}


def _as_its_cause(err: BaseException) -> BaseException:
    """The error of another process as the class that it was there, so that it has its name and exit code."""
    kind = getattr(errors, err.cause or "", None) if isinstance(err, RankFailedError) else None
    if not (isinstance(err, RankFailedError) and isinstance(kind, type) and issubclass(kind, CkptError)):
        return err
    return kind(err.message, where=err.where, hint=err.hint)


def _code_of(err: BaseException) -> int:
    err = _as_its_cause(err)
    if isinstance(err, click.exceptions.Exit | CkptError):
        return err.exit_code
    return INTERRUPTED if isinstance(err, KeyboardInterrupt | click.Abort) else 1
