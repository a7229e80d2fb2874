"""Ranges in the traces of profilers that the user runs, so that what a save does stands beside the kernels of training.

Without torch.profiler and without CUDA nothing is recorded: what it costs then is a look at two flags.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_trace(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function's calls are a range ``name`` in traces of torch.profiler, and of NVTX where CUDA is in use."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
            profiled = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
            nvtx = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if not profiled and not nvtx:
                return function(*args, **kwargs)
            with ExitStack() as stack:
                if profiled:
                    stack.enter_context(torch.profiler.record_function(name))
                if nvtx:
                    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
                    stack.callback(torch.cuda.nvtx.range_pop)
                return function(*args, **kwargs)

        return ranged

    return decorate
