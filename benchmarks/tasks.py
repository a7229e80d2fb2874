"""What the ranks do for the scenarios."""

from __future__ import annotations

import gc
import logging
import warnings
from typing import Any, Literal

import torch.distributed as dist

from .contestants import CONTESTANTS, Job
from .measure import RankCost, cost_of
from .pool import Rank
from .states import Recipe, State, build

Operation = Literal["save", "load"]


class WrongBytesError(RuntimeError):
    """A contestant's load did not give what was saved."""


def prepare(rank: Rank, *, recipe: Recipe) -> tuple[int, int]:
    """Build this rank's state in place of the one before; its bytes, and those of a checkpoint of it."""
    warnings.filterwarnings("ignore")  # DCP's advice is not about what is measured here
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    rank.kept.clear()
    gc.collect()
    gc.freeze()  # the collections between operations need not walk through all of torch
    state = build(recipe, rank.groups[recipe.ranks])
    rank.kept.update(state=state, recipe=recipe)
    return state.nbytes, state.total


def run(rank: Rank, *, operation: Operation, contestant: str, directory: str, check: bool = False) -> RankCost:
    """One operation of one contestant on the state that was prepared; ``check`` compares what a load brought.

    The barriers before and after are not counted.

    Raises:
        WrongBytesError: a load did not bring back what was built.
    """
    state, recipe = rank.kept["state"], rank.kept["recipe"]
    job = Job(state=state, group=rank.groups[recipe.ranks], rank=rank.number, ranks=recipe.ranks)
    if operation == "load":
        state.clear()
    gc.collect()
    dist.barrier(job.group)
    act = getattr(CONTESTANTS[contestant], operation)
    cost = cost_of(lambda: act(job, directory))
    dist.barrier(job.group)
    if operation == "load" and check:
        _check(state, contestant)
    return cost


def _check(state: State, contestant: str) -> None:
    wrong = state.find_difference()
    if wrong is not None:
        raise WrongBytesError(f"{contestant} did not load {wrong} as it was saved")


def versions(rank: Rank) -> dict[str, Any]:
    """Versions of what takes part."""
    from importlib.metadata import version

    import torch

    import ckpt

    return {"ckpt": ckpt.__version__, "torch": torch.__version__} | {name: version(name) for name in ("numpy", "pyarrow", "xxhash")}


def forget(rank: Rank) -> None:
    """Free the prepared state."""
    rank.kept.clear()
    gc.collect()
