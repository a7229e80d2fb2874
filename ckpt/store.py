"""The key-value store of a job (``torch.distributed.Store``), and a part of it for one group of ranks."""

from __future__ import annotations

from typing import Any, Protocol, cast


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def part_of(base: Any, name: str, rank: int) -> Store:
    """A part of the job's store for a group of this name, on a connection of its own: whoever waits for a key in the job's store does not
    hold up a save in the background.

    The name is the same on all ranks; several groups may have the same ranks. A store may outlive its group (torchrun's does), and the
    next group may have the same name: it must not read what the last one left. So each life of a name has its own part.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    life = base.add(f"ckpt/{name}/life/{rank}", 1)
    return cast(Store, PrefixStore(f"ckpt/{name}/{life}", _cloned(base)))


def _cloned(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # not every kind of store can
        return store
