"""The scenarios.

Invariant: the contestants take turns, repetition by repetition, so that noise of the machine hits all; the first repetition is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import tasks
from .measure import Sample
from .places import Place, size_of
from .pool import Pool
from .states import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """``size`` is bytes of state per rank, ``ranks`` how many, ``repeat`` the repetitions that count. ``scale_layers`` 0 is all."""

    size: int
    ranks: int
    repeat: int
    small_tensors: int
    large_layers: int = 126
    large_ranks: int = 16_384
    scale_ranks: int = 16_384
    scale_layers: int = 0
    steady_saves: int = 2000


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contestant's samples of one operation. ``state_bytes`` are the bytes that it is about: of the checkpoint's tensors for a save, of
    all ranks' tensors for a load. ``stored`` is the size of the checkpoint's files."""

    scenario: str
    place: str
    ranks: str
    operation: tasks.Operation
    contestant: str
    state_bytes: int
    stored: int
    samples: list[Sample] = field(default_factory=list)


Tell = Callable[[str], None]


def same_layout(
    name: str, recipe: Recipe, contestants: Sequence[str], pool: Pool, place: Place, repeat: int, tell: Tell
) -> list[Measurement]:
    """Save, then load what was saved into the same layout."""
    prepared = pool.run(tasks.prepare, on=recipe.ranks, recipe=recipe)
    held, total = sum(nbytes for nbytes, _ in prepared), prepared[0][1]
    found: dict[tuple[str, str], Measurement] = {}
    for repetition, contestant in turns(("ckpt", "raw") if place.remote else contestants, repeat):
        directory = place.fresh(contestant)
        arguments: dict[str, Any] = {"on": recipe.ranks, "contestant": contestant, "directory": directory}
        for operation in ("save", "load"):
            if operation == "load":
                place.cool(directory)
            sample = Sample.of(pool.run(tasks.run, operation=operation, check=True, **arguments))
            tell(f"{name} on {recipe.ranks}, {place.label}: {contestant} {operation} {sample.wall:.2f} s, {sample.cpu:.2f} s CPU")
            if repetition == 0:
                found[contestant, operation] = Measurement(
                    scenario=name,
                    place=place.label,
                    ranks=str(recipe.ranks),
                    operation=operation,
                    contestant=contestant,
                    state_bytes=total if operation == "save" else held,
                    stored=size_of(directory),
                )
            else:
                found[contestant, operation].samples.append(sample)
        place.fresh(contestant)
    return list(found.values())


def reshard(source: Recipe, target: Recipe, pool: Pool, place: Place, repeat: int, tell: Tell) -> list[Measurement]:
    """Save in one layout, load into another. torch.save cannot do this; raw reads as many bytes."""
    pool.run(tasks.prepare, on=source.ranks, recipe=source)
    directories = {}
    for contestant in ("ckpt", "dcp", "raw"):
        directories[contestant] = place.fresh(contestant)
        pool.run(tasks.run, on=source.ranks, operation="save", contestant=contestant, directory=directories[contestant])
    directories["ckpt partial"] = directories["ckpt alone"] = directories["ckpt"]
    pool.run(tasks.forget, on=source.ranks)
    held = sum(nbytes for nbytes, _ in pool.run(tasks.prepare, on=target.ranks, recipe=target))
    label = f"{source.ranks}→{target.ranks}, {source.label} → {target.label}"
    found = {
        contestant: Measurement(
            scenario="reshard",
            place=place.label,
            ranks=label,
            operation="load",
            contestant=contestant,
            state_bytes=held,
            stored=size_of(directory),
        )
        for contestant, directory in directories.items()
    }
    for repetition, contestant in turns(list(found), repeat):
        place.cool(directories[contestant])
        costs = pool.run(
            tasks.run,
            on=target.ranks,
            operation="load",
            contestant=contestant,
            directory=directories[contestant],
            check=contestant != "raw",
        )
        sample = Sample.of(costs)
        tell(f"reshard {label}, {place.label}: {contestant} load {sample.wall:.2f} s, {sample.cpu:.2f} s CPU")
        if repetition > 0:
            found[contestant].samples.append(sample)
    for contestant in found:
        place.fresh(contestant)
    return list(found.values())


def turns(contestants: Sequence[str], repeat: int) -> Iterator[tuple[int, str]]:
    """Repetitions 0 to ``repeat``, and in each all contestants, every time beginning with another one."""
    for repetition in range(repeat + 1):
        shift = repetition % len(contestants)
        for contestant in (*contestants[shift:], *contestants[:shift]):
            yield repetition, contestant


ALL = ("ckpt", "dcp", "torch.save", "raw")


def sharded(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Measurement]:
    """A model with its Adam state as DTensors, like FSDP2's."""
    recipe = Recipe(kind="sharded", ranks=settings.ranks, size=settings.size * settings.ranks)
    return same_layout("sharded", recipe, ALL, pool, place, settings.repeat, tell)


def replicated(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Measurement]:
    """The same state as plain tensors, equal on all ranks, like DDP's; on twice as many ranks too."""
    found = []
    for ranks in (settings.ranks, 2 * settings.ranks):
        recipe = Recipe(kind="replicated", ranks=ranks, size=settings.size)
        found += same_layout("replicated", recipe, ALL, pool, place, settings.repeat, tell)
    return found


def small(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Measurement]:
    """Many tensors of 64 bytes, on one rank."""
    recipe = Recipe(kind="small", ranks=1, size=settings.small_tensors)
    return same_layout("small", recipe, ALL, pool, place, settings.repeat, tell)


def resharded(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Measurement]:
    """The sharded state into shards of the other dimension, onto one rank more, onto one, and from FSDP over tensor parallelism to FSDP."""
    n, size = settings.ranks, settings.size * settings.ranks

    def rows(ranks: int, dim: int = 0, tensor_parallel: int = 1) -> Recipe:
        return Recipe(kind="sharded", ranks=ranks, size=size, dim=dim, tensor_parallel=tensor_parallel)

    pairs = [(rows(n), rows(n, dim=1)), (rows(n), rows(n + 1)), (rows(2 * n), rows(1)), (rows(2 * n, tensor_parallel=2), rows(2 * n))]
    return [m for source, target in pairs for m in reshard(source, target, pool, place, settings.repeat, tell)]


MOVING: dict[str, Callable[[Settings, Pool, Place, Tell], list[Measurement]]] = {
    "sharded": sharded,
    "replicated": replicated,
    "small": small,
    "reshard": resharded,
}
"""The scenarios that move bytes."""
