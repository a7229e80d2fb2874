"""Fills the tensors of a receiver from a live state: what it wants, what it has itself, and where the pieces of others go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import torch

from ckpt.catalog import TensorEntry
from ckpt.engine.load.whole_chunks import Stored, copy_box
from ckpt.plan.layout.geometry import Box
from ckpt.plan.match import common_box
from ckpt.plan.transfers import Share, TransferPlan, Want, plan_transfers, wanted_digest
from ckpt.state.tensors import LocalTensor, raw_view, reads_otherwise

from .holdings import LiveCatalog
from .pull import piece_boxes
from .renaming import Target, source_targets


@dataclass(frozen=True, kw_only=True, eq=False)
class FillPlan:
    """``targets[i]`` is filled by want i of ``transfers``; the memory in ``padding``, which has more than the source, is zeroed first.
    ``bound`` are the tensors of the state; ``targets`` are the same, or those that these are made of in other names."""

    bound: Sequence[Target]
    catalog: LiveCatalog
    targets: Sequence[Target]
    padding: Sequence[torch.Tensor]
    transfers: TransferPlan

    def with_memory(self) -> FillPlan:
        """The same when tensors that had no memory (meta tensors) have got theirs."""
        targets, padding, _ = resolved(self.bound, self.catalog)
        return replace(self, targets=targets, padding=padding)


def is_packable(targets: Iterable[Target]) -> bool:
    """Whether the memory of all of these has the source's dtypes, and exists: then it has what the source has sent."""
    return all(target.info.dtype == entry.dtype and not any(part.memory.is_meta for part in target.parts) for target, entry in targets)


@dataclass(eq=False)
class PlanCache:
    """The last plan of this receiver: a transfer between the same layouts makes no new one."""

    source: object = None
    key: tuple[object, ...] = ()
    transfers: TransferPlan | None = None


def plan_filling(
    targets: Iterable[Target],
    catalog: LiveCatalog,
    *,
    rank: int,
    near: Set[int],
    domain: Set[int] = frozenset(),
    relays: Callable[[str], Sequence[int]] | None = None,
    cache: PlanCache | None = None,
    source: object = None,
) -> FillPlan:
    """What goes into ``targets`` from whom. Changes nothing. ``source`` tells catalogs apart: with an equal one, names, shapes and holders
    are equal, and the transfers of ``cache`` are taken where the boxes are equal too. ``relays`` gives those that have all boxes of a
    digest (``wanted_digest``)."""
    bound = list(targets)
    targets, padding, boxes = resolved(bound, catalog)
    key = (rank, near, domain, *((entry.alias or entry.name, wanted) for (_, entry), wanted in zip(targets, boxes, strict=True)))
    known = None if cache is None or source is None or (cache.source, cache.key) != (source, key) else cache.transfers
    if relays is None and known is not None:
        return FillPlan(bound=bound, catalog=catalog, targets=targets, padding=padding, transfers=known)
    wants = [
        Want(entry.name, catalog.number(entry), entry.dtype.itemsize, entry.grid, catalog.holders(entry), wanted)
        for (_, entry), wanted in zip(targets, boxes, strict=True)
    ]
    passing = relays(wanted_digest(wants)) if relays is not None else ()
    transfers = plan_transfers(wants, rank=rank, near=near, domain=domain, relays=passing)
    if cache is not None and not passing:
        cache.source, cache.key, cache.transfers = source, key, transfers
    return FillPlan(bound=bound, catalog=catalog, targets=targets, padding=padding, transfers=transfers)


def resolved(bound: Iterable[Target], catalog: LiveCatalog) -> tuple[list[Target], list[torch.Tensor], list[tuple[Box, ...]]]:
    """Targets among the tensors of the source, memory that is zeroed first, and the boxes of each target."""
    targets: list[Target] = []
    padding: list[torch.Tensor] = []
    boxes: list[tuple[Box, ...]] = []
    for target, entry in bound:
        view = catalog.views.get(entry.alias or entry.name) if catalog.views else None
        if view is None:
            targets.append((target, entry))
            boxes.append(_wanted(target, entry, padding))
            continue
        made = source_targets((target, entry), view, catalog, padding)
        targets += made
        boxes += [tuple([part.box for part in each.parts]) for each, _ in made]
    return targets, padding, boxes


def _wanted(target: LocalTensor, entry: TensorEntry, padding: list[torch.Tensor]) -> tuple[Box, ...]:
    """The boxes of a tensor that its parts get; the memory of parts that reach beyond it is added to ``padding``."""
    if entry.shape == target.info.shape:
        return tuple([part.box for part in target.parts])
    stored = common_box(target.info, entry)
    boxes = []
    for part in target.parts:
        if stored.contains(part.box):
            boxes.append(part.box)
            continue
        padding.append(part.memory)
        if (common := part.box.intersect(stored)) is not None:
            boxes.append(common)
    return tuple(boxes)


class Filling:
    """Puts bytes into the targets of a plan, from any thread. ``copied`` counts bytes of the own memory."""

    def __init__(self, plan: FillPlan) -> None:
        self.plan = plan
        self.copied = 0
        self.placed = 0
        """Bytes of all boxes that are filled."""
        self._lock = threading.Lock()

    def copy_own(self, source: Mapping[str, LocalTensor], beat: Callable[[], None]) -> None:
        """Copy what this rank has itself: ``source`` are its tensors by their names in the catalog. Memory that is in both stays."""
        for place, box in self.plan.transfers.own:
            target, entry = self.plan.targets[place]
            for part in source[entry.alias or entry.name].parts:
                common = part.box.intersect(box) if part.box != box else box
                if common is not None or not box.shape:
                    common = box if common is None else common
                    _copy(part.memory[common.relative_to(part.box.offset).slices], target.view(common))
            self.copied += box.numel * entry.dtype.itemsize
            self._count(box.numel * entry.dtype.itemsize)
            beat()

    def place(self, share: Share, piece: int, view: memoryview) -> None:
        """Put the boxes of a verified piece to their places, converting dtypes that differ."""
        data = np.frombuffer(view, dtype=np.uint8)
        total = 0
        for place, request, start, stop in piece_boxes(share, piece):
            target, entry = self.plan.targets[place]
            box = share.requests.box(request, len(entry.shape))
            copy_box(Stored(data[start:stop], 0, box, entry.dtype), box, target)
            total += stop - start
        self._count(total)

    def pack(self, share: Share, piece: int, view: memoryview) -> None:
        """The opposite of ``place``: pack what the memory has of a piece into ``view``."""
        for place, request, start, stop in piece_boxes(share, piece):
            target, entry = self.plan.targets[place]
            box = share.requests.box(request, len(entry.shape))
            values = target.gather(box).detach()
            raw = raw_view(values.resolve_conj().resolve_neg() if reads_otherwise(values) else values)
            torch.frombuffer(view[start:stop], dtype=raw.dtype).view(box.shape).copy_(raw)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.placed += nbytes


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.dtype != target.dtype or reads_otherwise(source) or reads_otherwise(target):
        _ = target.copy_(source)
    elif source.data_ptr() != target.data_ptr() or source.device != target.device:
        _ = raw_view(target).copy_(raw_view(source))
