"""What is in a state besides tensors, modules and optimizers: objects with a ``state_dict``, values that differ between ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.errors import MismatchError, StateError
from ckpt.plan.tree import SCALARS, Node, join

_CONTAINERS = (dict, list, tuple)


def values_in(value: object, path: str) -> Iterator[tuple[str, object]]:
    """What lies in dicts, lists and tuples, each with its path; or the value itself."""
    if isinstance(value, _CONTAINERS):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from values_in(child, join(path, key))
    else:
        yield path, value


# Objects with ``state_dict`` and ``load_state_dict`` in a state, and the containers around them.
#
# Objects take what was stored as they like, and may refuse it: they are asked before anything else changes. A dict, list or set of the
# state stays the same object and gets new contents.


def is_stateful(value: object) -> bool:
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not isinstance(value, type)


def state_of(value: Any, path: str) -> Any:
    """What an object of the state gives of itself."""
    try:
        return value.state_dict()
    except (AttributeError, NotImplementedError) as err:
        kind = type(value)
        hint = "leave it out of the state, or put what it is made of there"
        if kind.__module__.startswith("accelerate."):
            hint = "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), or leave it out of the state"
        text = f"the state_dict() of a {kind.__qualname__} fails: {type(err).__name__}: {err}"
        raise StateError(text, where=path, hint=hint) from err


def restore_in_place(old: Any, new: Any) -> Any:
    """Put ``new`` into the containers that ``old`` is made of, as far as both are alike, and return what stands for it now.

    An object with ``state_dict`` and ``load_state_dict`` among the old values takes the new one with ``load_state_dict``. Where the
    kinds differ, the answer is ``new``.
    """
    if type(old) in SCALARS:
        return new
    if is_stateful(old):
        old.load_state_dict(new)
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        items = {key: restore_in_place(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [*map(restore_in_place, old, new), *new[len(old) :]]
        return old
    if isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
        return old
    return new


def like(template: Any, new: Any) -> Any:
    """``new`` with mappings of the types that ``template`` has: an ``OrderedDict``, ``defaultdict`` or ``Counter`` is stored as a dict."""
    if isinstance(template, dict) and isinstance(new, dict):
        made = copy.copy(template)
        made.clear()
        made.update({key: like(template.get(key), value) for key, value in new.items()})
        return made
    if isinstance(template, (list, tuple)) and type(new) is type(template):
        return type(new)([*map(like, template, new), *new[len(template) :]])
    return new


@dataclass(frozen=True, kw_only=True, eq=False)
class StatefulObject:
    """An object with ``load_state_dict`` at a path of the state: ``take`` gives it the stored state, ``old`` is what it had before."""

    path: str
    target: Any
    take: Callable[[], None]
    old: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Refusal:
    """An object at ``path`` raised ``error``. ``undone``: it and those asked before it have taken back their old state."""

    path: str
    error: Exception
    undone: bool


def take_all(objects: Sequence[StatefulObject]) -> Refusal | None:
    """Let the objects take their stored state. If one refuses, it and those before it get back what they had."""
    taken: list[tuple[StatefulObject, Any]] = []
    for each in objects:
        old = None
        with suppress(Exception):  # a lock, a file, what only is there before the first load: no reason not to load
            old = copy.deepcopy(each.old)
        taken.append((each, old))
        try:
            each.take()
        except Exception as err:  # noqa: BLE001  whatever an object of the user's raises: the caller raises it
            undone = [_given_back(before, old) for before, old in reversed(taken)]
            return Refusal(path=each.path, error=err, undone=all(undone))
    return None


def _given_back(each: StatefulObject, old: Any) -> bool:
    if old is None:
        return False
    try:
        each.target.load_state_dict(old)
    except Exception:  # noqa: BLE001  an object that refuses its own state: the error of the load says that the state was touched
        return False
    return True


# Values that are meant to differ between ranks, and objects that are made of several kinds of state.

Reshard = Callable[[Sequence[Any], int, int], Any]
"""``reshard(values, rank, world_size) -> value``: the value for a rank, made of the values that all ranks saved, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankChoice:
    """What a rank takes of a value that was saved per rank: the values of ``ranks``, in this order, which are given to ``take``."""

    ranks: Sequence[int]
    take: Callable[[list[Any]], None]


class PerRank:
    """Wraps a value of which each rank has its own.

    ``value`` is anything that a state may hold without sharding: JSON values, tensors, nested containers, or objects with
    ``state_dict`` and ``load_state_dict``, but no modules and optimizers. Loading on as many ranks as saved gives each rank its own value
    back: objects take theirs, dicts and lists stay the same objects, tensors are new ones. Loading on another number of ranks calls
    ``reshard``, and is an error without it. :class:`ckpt.training.Generators` and :class:`ckpt.training.LoaderState` know better what is to
    happen then for random number generators and data loaders.

    Example::

        state["rng"] = ckpt.PerRank(torch.get_rng_state(), reshard=lambda values, rank, world: values[rank % len(values)])
        ckpt.load(url, state)
        torch.set_rng_state(state["rng"].value)
    """

    def __init__(self, value: Any, *, reshard: Reshard | None = None) -> None:
        self.value: Any = value
        self.reshard = reshard

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def saved(self, rank: int, ranks: Sequence[int]) -> Any:
        """What ``rank``, one of the job's ``ranks``, leaves in the checkpoint."""
        return self.value

    def choose(self, nodes: Mapping[int, Node], world_size: int, rank: int, ranks: Sequence[int]) -> RankChoice | None:
        """What ``rank``, one of the job's ``ranks``, takes of the ``nodes`` that were saved by ``world_size`` ranks, which count from 0;
        None if its own is missing.

        Raises:
            MismatchError: it is unknown which rank takes what. Nothing was changed.
        """
        position, count = list(ranks).index(rank), len(ranks)
        if world_size == count:
            return RankChoice(ranks=[position], take=lambda values: self._put(values[0])) if position in nodes else None
        reshard = self.reshard
        if reshard is None:
            raise MismatchError(f"saved per rank by {world_size} ranks, loaded by {count}; give PerRank(value, reshard=...) to say how")
        return RankChoice(ranks=list(nodes), take=lambda values: self._put(reshard(values, position, count)))

    def _put(self, value: object) -> None:
        self.value = restore_in_place(self.value, value)


class ReceivedState:
    """Takes whatever state is stored at its place, in memory of its own: ``value``."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: all that comes is new."""
        return {}

    def load_state_dict(self, value: Any) -> None:
        """Keep it."""
        self.value = value


class Compound:
    """An object whose state is of several kinds, such as values of the job and values of each rank. For subclasses."""

    def parts(self) -> dict[str, Any]:
        """What is saved in its place."""
        raise NotImplementedError

    def slots(self) -> dict[str, Any]:
        """What a load fills: live objects under the names that ``parts`` gives. Asked for before it is known that the checkpoint fits."""
        raise NotImplementedError

    def loaded(self, slots: dict[str, Any]) -> None:
        """Take what the load has filled."""
        raise NotImplementedError
