"""What tests use of torch that its oldest supported version has not: ``make matrix`` runs them there."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def adapt() -> None:
    """``no_dist`` of DCP's functions: before it, they found out by themselves that there is one process, and warned of it."""
    if tuple(map(int, version("torch").split(".")[:2])) >= (2, 13):
        return  # DCP takes long to import
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict_loader

    for module, name in ((dcp, "save"), (dcp, "load"), (state_dict_loader, "_load_state_dict")):
        function = getattr(module, name)
        if "no_dist" not in inspect.signature(function).parameters:
            setattr(module, name, _without_no_dist(function))


def _without_no_dist(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, no_dist: bool = False, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
            return function(*args, **options)

    return call
