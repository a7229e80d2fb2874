"""Inside of a job that is being proved: notes what each step has done, saves where the proof asks for it, and ends the process there.

``CKPT_PROVE`` names the folder of this run; without it a :class:`ckpt.Checkpointer` imports nothing of this. In the folder lies a plan,
and each rank writes its notes beside it (``comparison``). What the state does not show is noted, too, as it is what users forget: batches
of data loaders, the global random generators, and objects of this process with a ``state_dict`` that the state does not have.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import numpy as np
import torch
import xxhash
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt import settings
from ckpt.errors import UsageError
from ckpt.net.group import Group
from ckpt.plan.layout.layout import Layout
from ckpt.plan.tree import leaves, text
from ckpt.state.collect import collect
from ckpt.state.tensors import as_bytes, local_of
from ckpt.state.torch_objects import scan_state
from ckpt.state.walk import Compound, is_stateful, values_in
from ckpt.text import parse_object
from ckpt.training.data import ResumableLoader
from ckpt.training.ema import Average
from ckpt.training.rng import Generators, standard_streams

from .comparison import Name, Noted

PLAN, ROOTS = "plan.json", "roots"
_WAIT = 60.0
"""Seconds that a rank waits for the others to come to the end, since one of them may be their store."""
_TEXT = 60
"""Characters of a plain value that are noted as they are; more are noted as a digest."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is to do: end after step ``until``, having saved it if ``saves``; of ``ranks`` ranks."""

    until: int
    saves: bool
    ranks: int

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(json.dumps(asdict(self)), encoding="utf-8")


def observe(name: str, value: object) -> None:
    """Note something of this step for a proof, such as the loss or the numbers of the samples; without a proof it does nothing.

    A number is compared between different numbers of ranks as the mean of all, to rounding. Of a tensor, array or list the rows count, as a
    set of all ranks. It belongs to the step that is noted next, by ``Checkpointer.step`` or ``save``.
    """
    if "CKPT_PROVE" in os.environ and (witness := attend()) is not None:
        witness.observe("observed", name, value)


def attend() -> Witness | None:
    """What notes the steps of this process; None if nobody asked."""
    folder = settings.variable("CKPT_PROVE") or None
    return None if folder is None else _witness(folder)


def attended(root: str, group: Group, layout: Layout | None, *, joint: bool) -> tuple[Witness, str]:
    """What notes the steps of a Checkpointer, and where that has its checkpoints in this run: the user's own stay as they are."""
    if joint:
        raise UsageError("a proof runs one job, and this is a member of several", where=root, hint="prove it without member=")
    witness = _witness(settings.variable("CKPT_PROVE", ""))
    return witness, witness.redirect(root, group, layout)


@lru_cache(maxsize=1)
def _witness(folder: str) -> Witness:
    return Witness(Path(folder))


class Witness:
    """One rank's end of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.plan = Plan(**parse_object((folder / PLAN).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as err:
            raise UsageError(f"CKPT_PROVE names no run of a proof: {err}", where=str(folder), hint="`ckpt prove` sets it") from err
        self._observed: dict[Name, Noted] = {}
        self._datasets: dict[int, tuple[str, object]] = {}
        self._noted: set[int] = set()
        self._root: str | None = None
        self._group: Group = Group(0, (0,))
        self._layout: Layout | None = None
        _watch_loaders(self)

    def redirect(self, root: str, group: Group, layout: Layout | None) -> str:
        if self._root is not None:
            raise UsageError("a proof follows one Checkpointer of a job, and this is the second", where=root)
        self._root, self._group, self._layout = root, group, layout
        return str(self._folder / ROOTS / quote(root, safe=""))

    def observe(self, kind: str, name: str, value: object) -> None:
        noted, before = number_or_rows(value), self._observed.get((kind, name))
        if before is not None:  # several of one step
            noted = [*(before if isinstance(before, list) else [str(before)]), *(noted if isinstance(noted, list) else [str(noted)])]
        self._observed[kind, name] = noted

    def batch(self, dataset: object, value: object) -> None:
        """A data loader has given a batch. Loaders go by the classes of their datasets."""
        if id(dataset) not in self._datasets:
            name, known = type(dataset).__name__, [name for name, _ in self._datasets.values()]
            count = sum(1 for other in known if other.partition("#")[0] == name)
            self._datasets[id(dataset)] = (f"{name}#{count}" if count else name, dataset)
        self.observe("batch", self._datasets[id(dataset)][0], value)

    def note(self, n: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None = None, *, restored: bool = False) -> bool:
        """Note what is there after step ``n``, once. Whether the run ends here."""
        if restored or n not in self._noted:
            items = dict(self._observed) if not restored else {}
            items |= {("metric", name): float(value) for name, value in (metrics or {}).items()}
            items |= self._state_items(state)
            if not restored:
                self._noted.add(n)
                self._observed.clear()
            by_kind: dict[str, dict[str, Noted]] = {}
            for (kind, name), value in items.items():
                by_kind.setdefault(kind, {})[name] = value
            with (self._folder / f"rank-{self._group.rank}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": n, "restored": restored, "items": by_kind}) + "\n")
        return not restored and n >= self.plan.until

    def _state_items(self, state: Mapping[str, Any]) -> dict[Name, Noted]:
        scan, items = scan_state(state), dict[Name, Noted]()
        collected = collect(state, rank=self._group.rank, ranks=self._group.ranks, layout=self._layout)
        objects = dict(values_in(state, ""))
        kinds = {f"{path}.": "parameter" for path, _ in scan.modules} | {f"{path}.state.": "optimizer state" for path, _ in scan.optimizers}
        kinds |= {f"{path}.": "generator" for path, value in objects.items() if isinstance(value, Generators) and value._named is not None}
        ignored = tuple(f"{path}." for path, value in objects.items() if isinstance(value, Generators) and value._named is None)
        for name, tensor in collected.shard_table.tensors.items():
            if not f"{name}.".startswith(ignored):
                kind = next((kind for start, kind in kinds.items() if name.startswith(start)), "tensor")
                items[kind, name] = digest([part.memory for part in tensor.parts])
        values = [*leaves(collected.state), *(leaf for path, node in collected.own.items() for leaf in leaves(node, path))]
        for name, node in values:
            refers = isinstance(node, dict) and any(key in node for key in ("$tensor", "$tensors", "$per_rank"))
            if not refers and not f"{name}.".startswith(ignored):
                shown = text(node)
                items["value", name] = shown if len(shown) <= _TEXT else digest(shown)
        for path, optimizer in scan.optimizers:
            for i, group in enumerate(optimizer.param_groups):
                items["learning rate", f"{path}.param_groups[{i}]"] = float(group["lr"]) if "lr" in group else 0.0
        items |= {("generator", name): digest(stream.get()) for name, stream in standard_streams().items()}
        return items | {("not in the state", name): digests for name, digests in _left_out(objects.values()).items()}

    def leave(self) -> NoReturn:
        """End the process at once, as a crash would: nothing that the script does after its loop can repair what a resume lacks."""
        (self._folder / f"ended-{self._group.rank}").touch()
        end = time.monotonic() + _WAIT
        while len(list(self._folder.glob("ended-*"))) < self.plan.ranks and time.monotonic() < end:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# ---- what the state does not show


def _watch_loaders(witness: Witness) -> None:
    """Have the witness hear of each batch of torch's data loaders, for which there is no hook: only in a process that is being proved."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def watch(kind: Any) -> None:
        given = kind.__next__

        def noted(self: Any) -> Any:
            batch = given(self)
            witness.batch(self._dataset, batch)
            return batch

        kind.__next__ = noted

    kinds: list[Any] = [_BaseDataLoaderIter]
    for kind in kinds:  # torchdata's have a method of their own
        kinds += kind.__subclasses__()
    for kind in kinds:
        if "__next__" in vars(kind):
            watch(kind)


def _left_out(objects: Iterable[object]) -> dict[str, Noted]:
    """Objects of this process that could be saved and are not in the state, by class: a digest of each, in no order."""
    known = set[int]()
    for value in objects:
        known.add(id(value))
        if isinstance(value, torch.nn.Module):
            known.update(id(tensor) for tensor in _tensors(value))
        if isinstance(value, Compound):
            known.update(map(id, vars(value).values()))  # LoaderState, for one, has the loader
    there = gc.get_objects()
    kinds = {kind for kind in {*map(type, there)} if _may_be_saved(kind)}
    candidates = [value for value in there if type(value) in kinds and id(value) not in known]
    inner = {id(child) for value in candidates if isinstance(value, torch.nn.Module) for child in list(value.modules())[1:]}
    digests_of: dict[str, list[str]] = {}
    for value in candidates:
        if id(value) in inner or (isinstance(value, torch.nn.Module) and all(id(tensor) in known for tensor in _tensors(value))):
            continue
        try:
            state = value.parts() if isinstance(value, Average) else value.state_dict()
        except Exception:  # noqa: BLE001  an object that is only half made, or of another use of the name
            continue
        digests_of.setdefault(type(value).__qualname__, []).append(digest(state))
    return {name: digests[0] if len(digests) == 1 else sorted(digests) for name, digests in digests_of.items()}


def _may_be_saved(kind: Any) -> bool:
    """Whether objects of a class have a state that one would save."""
    if issubclass(kind, torch.nn.Module | Optimizer | LRScheduler | Average | ResumableLoader):
        return True
    ours = f"{kind.__module__}.".startswith("ckpt.")
    return (
        not ours and not issubclass(kind, type) and all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))
    )


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


# ---- values as numbers, rows and digests


def number_or_rows(value: object) -> Noted:
    """A number, the digests of the rows of a batch, or a digest of the whole."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not value.shape:
        value = value.item()
    if isinstance(value, bool | int | float):
        return float(value)
    columns = list(_columns(value))
    sizes = {len(column) for column in columns}
    if len(sizes) != 1 or not (size := sizes.pop()):
        return [digest(value)]
    return [digest([column[i] for column in columns]) for i in range(size)]


def _columns(value: Any) -> Iterator[Any]:
    """What has a row for each sample: tensors and arrays, and lists of plain values."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _columns(value[key])
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield (local_of(value) if isinstance(value, torch.Tensor) else value) if value.shape else [value]
    elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | np.ndarray | Mapping | list | tuple) for v in value):
        for child in value:
            yield from _columns(child)
    else:
        yield value if isinstance(value, list | tuple) else [value]


def digest(value: object) -> str:
    """The same for equal values, of any nesting. Objects count by their class alone."""
    hashed = xxhash.xxh3_64()
    _feed(hashed, value)
    return hashed.hexdigest()


def _feed(hashed: xxhash.xxh3_64, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        local = local_of(value.detach())
        hashed.update(f"{local.dtype}{tuple(local.shape)}".encode())
        hashed.update(as_bytes(local))
    elif isinstance(value, np.ndarray | np.generic):
        hashed.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        hashed.update(b"{")
        for key in sorted(value, key=repr):
            hashed.update(f"{key!r}:".encode())
            _feed(hashed, value[key])
        hashed.update(b"}")
    elif isinstance(value, list | tuple):
        hashed.update(b"[")
        for child in value:
            _feed(hashed, child)
        hashed.update(b"]")
    elif is_stateful(value):
        _feed(hashed, value.state_dict())
    elif isinstance(value, set | frozenset):
        _feed(hashed, sorted(map(repr, value)))
    else:
        plain = value is None or isinstance(value, str | bytes | bool | int | float | complex)
        hashed.update(f"{value!r};".encode() if plain else f"{type(value).__qualname__};".encode())


__all__ = ["Plan", "Witness", "attend", "observe"]
