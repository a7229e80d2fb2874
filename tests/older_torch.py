"""What tests use of torch that its oldest supported version has not: ``make matrix`` runs them there."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Generator
from importlib.metadata import version
from typing import Any

import pytest

LACKS = (
    "this version of torch has no dtype",
    "module 'torch' has no attribute 'float",
    "does not support uneven sharding for now",
    "_StridedShard requires even sharding",
    "No module named 'torch.distributed._mesh_layout'",
)
"""How ckpt and torch say that this torch has not what a test needs."""


def older() -> bool:
    return tuple(map(int, version("torch").split(".")[:2])) < (2, 13)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """A test whose cause of failure is that torch lacks a dtype or a layout is skipped where torch is older than that of development."""
    try:
        return (yield)
    except Exception as err:
        if older() and any(text in f"{type(err).__name__}: {err}" for text in LACKS):
            pytest.skip(str(err).splitlines()[-1])
        raise


def adapt() -> None:
    """``no_dist`` of DCP's functions: before it, they found out by themselves that there is one process, and warned of it."""
    if not older():
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
