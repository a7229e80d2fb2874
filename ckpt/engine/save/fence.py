"""What keeps a state as it is while it is captured: steps of optimizers, replays of CUDA graphs and ``fence`` wait for all captures of the
process that go on, whatever they are for. And what keeps the background from slowing training down.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ckpt.engine.devices import watch_graphs
from ckpt.state import lazy
from ckpt.state.collect import seen
from ckpt.telemetry.callbacks import Stall

if TYPE_CHECKING:
    from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")

# Ranges in the traces of profilers that the user runs, so that what a save does stands beside the kernels of training. Without
# torch.profiler and without CUDA nothing is recorded: what it costs then is a look at two flags.


def in_trace(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function's calls are a range ``name`` in traces of torch.profiler, and of NVTX where CUDA is in use."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
            profiled = lazy.imported and getattr(lazy.torch.autograd.profiler, "_is_profiler_enabled", False)
            nvtx = lazy.imported and lazy.torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if not profiled and not nvtx:
                return function(*args, **kwargs)
            with ExitStack() as stack:
                if profiled:
                    stack.enter_context(lazy.torch.profiler.record_function(name))
                if nvtx:
                    lazy.torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
                    stack.callback(lazy.torch.cuda.nvtx.range_pop)
                return function(*args, **kwargs)

        return ranged

    return decorate


# How much of the interpreter a save in the background takes from training.
#
# Copying and hashing very many small tensors is Python, and Python threads take turns: work without a pause would leave a training loop of
# small operations a fifth of its speed. So the background rests after it, longer than it worked, unless somebody waits for it.

RESTS = 12
"""So many times as long as it worked."""
LONGEST = 0.05
"""Seconds of one rest."""


class CpuBackoff:
    """The pace of one save. Without haste, :meth:`work` rests after its block; ``haste`` is set when somebody waits, and ends all rests."""

    def __init__(self) -> None:
        self.haste = threading.Event()

    @contextmanager
    def work(self) -> Iterator[None]:
        # CPU time of this thread, not wall time: while it waits for storage or for the lock it takes nothing away
        # from training, and needs no rest for that.
        began = time.thread_time()
        yield
        if not self.haste.is_set():
            self.haste.wait(min(RESTS * (time.thread_time() - began), LONGEST))


class Outcome(Future[R]):
    """A future that remembers whether its error was reported to anybody. It cannot be cancelled: a save ends on all ranks or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.error_reported = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> R:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = self.error(timeout)
        self.error_reported = self.error_reported or error is not None
        return error

    def error(self, timeout: float | None = None) -> BaseException | None:
        """The error, for code that reports it to nobody."""
        try:
            return super().exception(timeout)
        except FuturesTimeoutError as err:  # a class of its own before Python 3.11
            raise TimeoutError(str(err)) from None


@dataclass(eq=False)
class CaptureFence:
    """What a state's changes wait for while it is captured in the background. ``captured`` is a :class:`concurrent.futures.Future` without
    a result; it raises what went wrong."""

    stall: Stall
    """How long this rank has waited: in the call, in ``fence``, ``wait`` and ``result``, and optimizers in ``step``."""
    backoff: CpuBackoff
    captured: Outcome[None] = field(default_factory=lambda: Outcome[None]())

    @in_trace("ckpt.wait")
    def wait(self) -> None:
        """Wait until the state may change again. Raises what capturing raised."""
        self.backoff.haste.set()
        with self.stall:
            self.captured.result()

    def up(self, *, on_devices: bool) -> None:
        """From now on everything waits that may change the state. ``on_devices``: some of it is on GPUs."""
        if lazy.imported:  # else there is no optimizer
            watch_steps()
        if on_devices:
            watch_graphs(fence)
        with _lock:
            _capturing.add(self)

    def down(self, error: BaseException | None) -> None:
        """The state may change again: it is captured, or that failed."""
        with _lock:
            _capturing.discard(self)
        if error is None:
            self.captured.set_result(None)
        else:
            self.captured.set_exception(error)


_capturing: set[CaptureFence] = set()
_lock = threading.Lock()
"""Of ``_capturing``."""


def fence() -> None:
    """Wait until every save in the background of this process has captured its state. Raises nothing: the saves' handles do."""
    with _lock:
        fences = list(_capturing)
    if fences:
        _outwait(fences)


@in_trace("ckpt.wait")
def _outwait(fences: Sequence[CaptureFence]) -> None:
    for each in fences:
        each.backoff.haste.set()
        with each.stall:
            each.captured.error()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seen.add(optimizer)
    fence()


@cache
def watch_steps() -> None:
    """Make every optimizer's step wait for what is being captured.

    Once for the life of the process: torch goes through its table of hooks while a step waits in one of them, so that no hook may be
    removed from there, or added, at the end of a capture.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_step)


def _forget_parent() -> None:
    """In a forked child no thread of the parent goes on: there is nothing to wait for."""
    global _lock
    _lock = threading.Lock()
    _capturing.clear()


os.register_at_fork(after_in_child=_forget_parent)
