"""A live state in other names: a translation makes new tensors of boxes of the source's, and targets of it fill through strided views.

    source           qkv [12, 8]  rows 0-7 q, 8-9 k, 10-11 v        k [2, 8] = qkv[8:10]        (a view: ckpt.plan.views)
    a rank has       k[:, 0:4], as memory M
    it asks for      qkv[8:10, 0:4], and what comes goes to M, seen as that box

So transfers, digests and copies know the source's tensors alone: a target of a translated tensor is turned into targets of those that it is
made of, whose memory is the same. Nothing is put together elsewhere and then copied.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from ckpt.catalog import Grid, TensorEntry
from ckpt.converters.selection import OutputTensor, SelectOptions, Views, choose
from ckpt.engine.load.whole_chunks import Stored, copy_box, wanted_boxes
from ckpt.errors import CkptError, ConsistencyError, UsageError
from ckpt.net.channel import Row
from ckpt.plan.layout.geometry import Box
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.reads import common_box
from ckpt.plan.transfers import Share, TransferPlan, Want, plan_transfers, wanted_digest
from ckpt.plan.views import LogicalTensor, ViewPiece
from ckpt.state.targets import Binding
from ckpt.state.tensors import LocalShard, LocalTensor, raw_view, reads_otherwise

from .holdings import LiveCatalog
from .pull import piece_boxes

Target = tuple[LocalTensor, TensorEntry]
"""Memory of the receiver, and the tensor of the source that goes there."""


def in_other_names(catalog: LiveCatalog, views: Views, *, strict: bool) -> LiveCatalog:
    """The same state as the translation ``views`` gives it. No element moves."""
    chosen = choose(catalog, SelectOptions(views=views))
    if strict and chosen.left_out:
        listed = ", ".join(sorted(chosen.left_out)[:20])
        message = f"these values cannot follow their tensors into other names: {listed}"
        raise UsageError(message, where=catalog.url, hint="leave them out of the old state, or pass strict=False")
    made = {name: wanted.view for name, wanted in sorted(chosen.tensors.items())}
    return replace(
        catalog,
        tensors={name: _entry(wanted) for name, wanted in chosen.tensors.items()},
        state=chosen.state,
        ranks=chosen.ranks,
        views=made,
        sources=catalog.tensors,
        translation=xxhash.xxh3_128_hexdigest(repr(list(made.items())).encode()),
    )


def refuse_pickles(binding: Binding, catalog: LiveCatalog) -> None:
    """Extra states that their modules may refuse once they have come are misfits: nobody can read them before."""
    for path, node, _ in binding.trials:
        if catalog.tensors[node["$tensor"]].shape != (0,):
            wanted = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 in its environment"
            binding.misfits.append(f"{path}: TransformerEngine unpickles this only with {wanted}")


def check_alike(rows: Mapping[int, Row]) -> None:
    """Leader: raise ConsistencyError unless all ranks translate alike; ``rows`` have the digests of their translations."""
    if len({row["translation"] for row in rows.values()}) > 1:
        raise ConsistencyError("the ranks translate the names in different ways", hint="give the same translation= on every rank")


def _entry(wanted: OutputTensor) -> TensorEntry:
    return wanted.entry(Grid(cuts=tuple((0, n) for n in wanted.shape), files=np.zeros(1, dtype=np.int32)))


def source_targets(target: Target, view: LogicalTensor, catalog: LiveCatalog, padding: list[torch.Tensor]) -> list[Target]:
    """A target of a translated tensor as targets of the tensors that it is made of, in the same memory. Memory of parts that reach beyond
    them is added to ``padding``."""
    local, wanted = target[0], common_box(target[0].info, target[1])
    parts: dict[str, list[LocalShard]] = {}
    for part in local.parts:
        box, filled = part.box.intersect(wanted), 0
        for piece in view.overlapping(box) if box is not None else ():
            memory = part.memory[piece.box.relative_to(part.box.offset).slices]
            parts.setdefault(piece.source, []).append(LocalShard(piece.part, _along_source(memory, piece)))
            filled += piece.box.numel
        if filled < part.box.numel:
            padding.append(part.memory)
    targets: list[Target] = []
    for name, shards in parts.items():
        entry = catalog.sources[name]
        spec = TensorSpec(name, local.info.dtype, entry.shape, catalog.layouts[entry.alias or name], entry.logical)
        targets.append((LocalTensor(spec, shards, local.state_name), entry))
    return targets


def _along_source(memory: torch.Tensor, piece: ViewPiece) -> torch.Tensor:
    """The memory of ``piece.box``, seen as the box ``piece.part`` of the source."""
    for axis in reversed([i for i, source in enumerate(piece.axes) if source is None]):
        memory = memory.select(axis, 0)
    sources = [source for source in piece.axes if source is not None]
    memory = memory.permute([sources.index(source) for source in sorted(sources)])
    for axis in range(len(piece.part.shape)):
        if axis not in sources:
            memory = memory.unsqueeze(axis)
    return memory


# What matching says of a checkpoint and a state, in the words of whoever called: a version and a state, or an old and a new state.

_INSPECT = "`ckpt inspect` shows what is stored; "


@contextmanager
def worded(*, stored: str, state: str = "the state", layout: str = "layout=") -> Iterator[None]:
    """Errors name what is taken from as ``stored``, and what it goes into as ``state``; hints name the argument ``layout``.

    Matching is that of a load, with some twenty messages. To hand two nouns down to all of them would be more than to name the things
    once, where it is known what they are.
    """
    try:
        yield
    except CkptError as err:
        err.message = _worded(err.message, stored, state, layout)
        err.hint = None if err.hint is None else _worded(err.hint, stored, state, layout)
        raise


def _worded(text: str, stored: str, state: str, layout: str) -> str:
    text = re.sub(r"\bthe checkpoint\b", stored, text.replace(_INSPECT, ""))
    return re.sub(r"(?<![\w.])layout=", layout, re.sub(r"\bthe state\b", state, text))


# Fills the tensors of a receiver: what it wants, what it has itself, and where the pieces of others go.


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
            if entry.shape == target.info.shape:  # all of it, without a look at each box
                boxes.append(tuple([part.box for part in target.parts]))
            else:
                boxes.append(tuple([box for _, box in wanted_boxes(target, entry, padding)]))
            continue
        made = source_targets((target, entry), view, catalog, padding)
        targets += made
        boxes += [tuple([part.box for part in each.parts]) for each, _ in made]
    return targets, padding, boxes


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
                    check_not_freed(part.memory, target.info.name)
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


def check_not_freed(memory: torch.Tensor, name: str | None = None) -> None:
    """Raise ConsistencyError if the storage of a tensor was freed: to read it would end the process."""
    if not memory.untyped_storage().nbytes() and memory.numel():
        message = "the memory of a tensor was freed before it was read, so its bytes are lost"
        hint = "keep the old state as it is until the call returns, and free nothing of it"
        raise ConsistencyError(message, where=None if name is None else f"tensor {name}", hint=hint)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.dtype != target.dtype or reads_otherwise(source) or reads_otherwise(target):
        _ = target.copy_(source)
    elif source.data_ptr() != target.data_ptr() or source.device != target.device:
        into, values = raw_view(target.detach()), raw_view(source.detach())
        row = values.shape[-1] * values.element_size() if values.dim() > 1 else 0
        # torch takes half as long again where not all rows lie together; but the C library copies rows of 1 or 2 KiB backwards.
        if into.is_cpu and values.is_cpu and torch.get_num_threads() == 1 and (values.is_contiguous() or not 1024 <= row <= 2048):
            np.copyto(into.numpy(), values.numpy())
        else:
            _ = into.copy_(values)
