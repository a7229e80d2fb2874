"""Datasets for the tests of loaders; at the top of a module, so that workers find them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[int]):
    """The sample with number i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Numbers):
    """Numbers that knows how many it gave."""

    given = 0

    def __getitem__(self, index: int) -> int:
        self.given += 1
        return index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Queue(IterableDataset[int]):
    """A list of numbers that are left for this rank; each worker gives every nth of them. Its state is what is left."""

    def __init__(self, left: Sequence[int]) -> None:
        self.left = list(left)
        self.divided = False

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        if worker is not None and not self.divided:
            self.left = self.left[worker.id :: worker.num_workers]
        self.divided = True
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left), "divided": self.divided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.divided = list(state["left"]), state["divided"]


class Elastic(Queue):
    """A queue that can be split and merged."""

    def reshard(self, states: Sequence[Any], index: int, count: int) -> Any:
        return {"left": sorted(n for state in states for n in state["left"])[index::count], "divided": False}


class Buffered:
    """A loader of one's own, as for pretraining: a token buffer per data-parallel rank, and sources that all ranks share."""

    def __init__(self, tokens: Sequence[int], source: str = "web") -> None:
        self.tokens = torch.tensor(list(tokens), dtype=torch.int64)
        self.source = source
        self.read = 0

    def next(self, count: int) -> list[int]:
        found, self.tokens = self.tokens[:count].tolist(), self.tokens[count:]
        self.read += count
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "config": {"source": self.source, "weights": torch.ones(3)}, "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens, self.source, self.read = state["tokens"], state["config"]["source"], state["read"]


class Splitting(Buffered):
    def reshard(self, states: Sequence[Any], index: int, count: int) -> Any:
        every = torch.cat([state["tokens"] for state in states]).sort().values
        return {**states[0], "tokens": every[index::count].clone(), "read": sum(state["read"] for state in states) // count}
