"""Parameters out of the flat partitions of all ranks: masters and every other state that has an element for each of the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ckpt.catalog import Grid
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.external import grid_of
from ckpt.formats.external_elements import flat_pieces
from ckpt.formats.stand_ins import StoredView
from ckpt.formats.torchzip import StorageBlock, TensorTable
from ckpt.plan.layout.geometry import Box

from .files import MASTER, RankStates, same_groups
from .weights import FlatRun, padded, split_each, split_evenly

# Experts of DeepSpeed's MoE layers: every expert-parallel rank calls its own 0, 1, …, and keeps their states with its replicas.
#
# Data-parallel rank r is expert-parallel rank ``r mod n`` of n. (Source: ``deepspeed/utils/groups.py`` and ``_save_moe_checkpoint`` in
# ``runtime/engine.py`` of DeepSpeed 0.19.)

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..*)")


@dataclass(frozen=True, kw_only=True)
class SharedGroup:
    """Parameters of a flat group that some ranks share: ``shapes`` by the names that these use, ``names`` from these to the model's."""

    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    ranks: tuple[int, ...]


def owned_parameters(shapes: Mapping[str, tuple[int, ...]], count: int, ranks: Sequence[RankStates]) -> Iterator[SharedGroup]:
    """The parameters of a flat group that is cut for ``count`` of the ranks: for each set of ranks those that it has."""
    everyone = len(ranks)
    if count == everyone and not any(_EXPERT.fullmatch(name) for name in shapes):
        yield SharedGroup(shapes=shapes, names={name: name for name in shapes}, ranks=tuple(range(everyone)))
        return
    other = next((name for name in shapes if not _EXPERT.fullmatch(name)), None)
    if other is not None or not count or everyone % count:
        raise FormatError(
            f"the states of {other or 'experts'} are cut for {count} of {everyone} ranks, which is not known here",
            where=ranks[0].file.where,
            hint="load it with DeepSpeed and save it with ckpt",
        )
    parallel = everyone // count
    matches = {name: match for name in shapes if (match := _EXPERT.fullmatch(name)) is not None}
    local: dict[str, set[str]] = {}
    for match in matches.values():
        local.setdefault(match[1], set()).add(match[2])
    for expert_rank in range(parallel):
        names = {name: f"{m[1]}{expert_rank * len(local[m[1]]) + int(m[2])}{m[3]}" for name, m in matches.items()}
        yield SharedGroup(shapes=shapes, names=names, ranks=tuple(range(expert_rank, everyone, parallel)))


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """A parameter: its ``name`` in the model, and where its elements lie."""

    name: str
    shape: tuple[int, ...]
    fragments: tuple[FlatRun, ...]


def find_parameters(shapes: Sequence[Shapes], ranks: Sequence[RankStates]) -> list[Partitioned]:
    """Where the parameters of one pipeline stage lie: ``shapes`` of those of each flat group, in order."""
    same_groups(ranks)
    return _cut_each(shapes, ranks) if ranks[0].zero == 3 else _cut_evenly(shapes, ranks)


def _cut_each(shapes: Sequence[Shapes], ranks: Sequence[RankStates]) -> list[Partitioned]:
    first = ranks[0]
    _check_count(first, max(first.counts, default=0), len(ranks))
    together = {name: shape for group in shapes for name, shape in group.items()}
    numels = {name: math.prod(shape) for name, shape in together.items()}
    for rank in ranks:
        lengths = [m.shape[0] for m in rank.masters]
        if sum(lengths) != padded(numels, len(ranks)) or lengths != [m.shape[0] for m in first.masters]:
            message = f"the flat groups have {sum(lengths):,} elements, parts of the parameters {padded(numels, len(ranks)):,}"
            rank.file.damaged(message)
    fragments = split_each(numels, [m.shape[0] for m in first.masters], len(ranks))
    return [Partitioned(name=n, shape=s, fragments=tuple(fragments[n])) for n, s in together.items()]


def _cut_evenly(shapes: Sequence[Shapes], ranks: Sequence[RankStates]) -> list[Partitioned]:
    first = ranks[0]
    if len(shapes) != len(first.masters) or len(first.counts) != len(shapes):
        first.file.damaged(f"{len(first.masters)} flat groups, and parameters of {len(shapes)}")
    _check_count(first, max(first.counts, default=0), len(ranks))
    cut: list[Partitioned] = []
    for group, named in enumerate(shapes):
        gaps = first.gaps[group] if first.gaps is not None else (0,) * len(named)
        if len(gaps) != len(named):
            first.file.damaged(f"group {group} has {len(named)} parameters and {len(gaps)} paddings")
        for owned in owned_parameters(named, first.counts[group], ranks):
            cut += _of_group(owned, gaps, group, ranks)
    return cut


def _of_group(owned: SharedGroup, gaps: Sequence[int], group: int, ranks: Sequence[RankStates]) -> Iterator[Partitioned]:
    numels = {name: math.prod(shape) for name, shape in owned.shapes.items()}
    partition = max(n for r in owned.ranks for n in _lengths(ranks[r], group))
    total = sum(numels.values()) + sum(gaps)
    # Nothing in the files says where parameters lie: it follows from shapes and the rules of DeepSpeed. So every sum
    # that can be checked is checked, since a mistake here would shift all that follows.
    spare = partition * len(owned.ranks) - total
    if total and not 0 <= spare < 2 * len(owned.ranks):  # partitions end at multiples of two elements
        ranks[owned.ranks[0]].file.damaged(
            f"the partitions of group {group} have {partition * len(owned.ranks):,} elements, its parameters {total:,}"
        )
    fragments = split_evenly(numels, gaps, group, partition, owned.ranks)
    _check_slices(fragments, group, owned, ranks)
    for name, shape in owned.shapes.items():
        yield Partitioned(name=owned.names[name], shape=shape, fragments=tuple(fragments[name]))


def _lengths(rank: RankStates, group: int) -> list[int]:
    """Elements of a rank's flat tensors of a group: padded, or without padding."""
    views = [rank.file.meaning(value) for value in rank.keys[group].values()] if group < len(rank.keys) else []
    flat = [v.shape[0] for v in views if type(v) is StoredView and len(v.shape) == 1]
    return [rank.masters[group].shape[0], *(n for n in flat if n > 1)]


def _check_count(rank: RankStates, stated: int, counted: int) -> None:
    if stated != counted:
        raise CorruptError(
            f"optimizer states of {stated} ranks were saved, those of {counted} are there",
            where=rank.file.where,
            hint="a process did not save, or files were not copied: get them",
        )


def _check_slices(fragments: Mapping[str, Sequence[FlatRun]], group: int, owned: SharedGroup, ranks: Sequence[RankStates]) -> None:
    """What the files say of their fragments must be what was computed."""
    for number in owned.ranks:
        rank = ranks[number]
        if rank.slices is None:
            continue
        stated = dict(rank.slices[group]) if group < len(rank.slices) else {}
        computed = {name: (f.at, f.length) for name, parts in fragments.items() for f in parts if f.rank == number}
        if stated != computed:
            name = next(n for n in (*stated, *computed) if stated.get(n) != computed.get(n))
            rank.file.damaged(f"the fragment of {name} is {stated.get(name)} by the file, and {computed.get(name)} by the shapes")


# --------------------------------------------------------------------------------------------------------------- tensors


class StateTable:
    """Puts the states of parameters into a table. ``values`` are those that are no tensors, by parameter and key, with their file."""

    def __init__(self, table: TensorTable, ranks: Sequence[RankStates]) -> None:
        self.table = table
        self.ranks = ranks
        self.values: dict[str, dict[str, Any]] = {}
        self._checked: set[tuple[int, str]] = set()

    def add(self, partitioned: Partitioned, name: str, master: str, further: str | None) -> None:
        """All states of a parameter: ``name.exp_avg``, …, and its master as ``master`` and under a ``further`` name."""
        if not partitioned.fragments:
            return
        keys = {frozenset(self.ranks[f.rank].keys[f.group]) for f in partitioned.fragments}
        if len(keys) > 1:
            listed = " and ".join(sorted(", ".join(sorted(map(str, of))) or "none" for of in keys))
            self.ranks[0].file.damaged(f"the ranks have different states of {partitioned.name}: {listed}")
        if MASTER in next(iter(keys)):
            self._refuse(partitioned, MASTER, "a state of that name")
        grid, parts = self._grid(partitioned)
        self._flat(master, partitioned, grid, parts, {(f.rank, f.group): self._master(f) for f in partitioned.fragments})
        if further is not None:
            self.table.add_alias(further, master)
        for key in sorted(next(iter(keys)), key=str):
            self._state(name, str(key), key, partitioned, grid, parts)

    def _master(self, fragment: FlatRun) -> StoredView:
        return self.ranks[fragment.rank].masters[fragment.group]

    def _state(self, name: str, label: str, key: Any, partitioned: Partitioned, grid: Grid, parts: list[tuple[FlatRun, Box, int]]) -> None:
        values = {(f.rank, f.group): self.ranks[f.rank].file.meaning(self.ranks[f.rank].keys[f.group][key]) for f in partitioned.fragments}
        first = partitioned.fragments[0]
        value = values[first.rank, first.group]
        if key == "step":
            self._same_step(partitioned, name, values)
        if type(value) is not StoredView:
            self.values.setdefault(partitioned.name, {})[label] = (self.ranks[first.rank].file, value)
        elif value.shape == () or (math.prod(value.shape) == 1 and self._master(first).shape[0] != 1):
            self.table.add(f"{name}.{label}", self.ranks[first.rank].file.file, value)
        else:
            self._flat(f"{name}.{label}", partitioned, grid, parts, values)

    def _same_step(self, partitioned: Partitioned, name: str, values: Mapping[tuple[int, int], Any]) -> None:
        """The ranks that have parts of a parameter made the same number of steps. Those in tensors are not read here: they are replicas."""
        (first, value), *others = values.items()
        for (rank, _), other in others:
            if type(value) is StoredView and type(other) is StoredView and value.shape == other.shape == ():
                self.table.add_copy(f"{name}.step", self.ranks[rank].file.file, (), other)
            elif type(value) in (int, float) and value != other:
                self.ranks[rank].file.damaged(f"step {other} of {partitioned.name}, and {value} in {self.ranks[first[0]].file.path}")

    def _grid(self, partitioned: Partitioned) -> tuple[Grid, list[tuple[FlatRun, Box, int]]]:
        """The chunks of a parameter: for each its fragment, its box, and how far into the fragment it begins."""
        parts = []
        for fragment in partitioned.fragments:
            for box, begins in flat_pieces(partitioned.shape, fragment.start, fragment.start + fragment.length):
                parts.append((fragment, box, begins))
        files = [self.table.rows[self.ranks[f.rank].file.file] for f, _, _ in parts]
        grid, order = grid_of(
            partitioned.name, partitioned.shape, [(b.offset, b.shape) for _, b, _ in parts], files, self.ranks[0].file.where
        )
        return grid, [parts[i] for i in order]

    def _flat(
        self,
        name: str,
        partitioned: Partitioned,
        grid: Grid,
        parts: Sequence[tuple[FlatRun, Box, int]],
        values: Mapping[tuple[int, int], Any],
    ) -> None:
        views = {at: self._checked_view(name, partitioned, at, value) for at, value in values.items()}
        kinds = {view.dtype for view in views.values()}
        if len(kinds) > 1:
            self.ranks[0].file.damaged(f"{name} is {' and '.join(sorted(kinds))} on different ranks")
        blocks = []
        for fragment, box, begins in parts:
            view = views[fragment.rank, fragment.group]
            if fragment.at + fragment.length > view.shape[0]:
                message = f"{name} should reach to element {fragment.at + fragment.length:,} of a flat tensor of {view.shape[0]:,}"
                self.ranks[fragment.rank].file.damaged(message)
            at = (view.offset + fragment.at + begins) * view.itemsize
            blocks.append(StorageBlock(self.ranks[fragment.rank].file.file, view.storage, at, box.numel * view.itemsize))
        self.table.add_placed(name, kinds.pop(), partitioned.shape, grid, blocks)

    def _checked_view(self, name: str, partitioned: Partitioned, at: tuple[int, int], value: Any) -> StoredView:
        """A flat tensor that lies beside the master: as long as it, or as long with padding."""
        rank, group = at
        file = self.ranks[rank].file
        if type(value) is not StoredView or len(value.shape) != 1 or value.shape[0] not in _lengths(self.ranks[rank], group):
            shape = list(value.shape) if type(value) is StoredView else type(value).__name__
            self._refuse(
                partitioned, name.rpartition(".")[2], f"a state {shape} of a partition of {self.ranks[rank].masters[group].shape[0]:,}"
            )
        view = file.flat(value, name)
        if (file.file, view.storage.key) not in self._checked:
            self._checked.add((file.file, view.storage.key))
            file.archive.check(view.storage)
        return view

    def _refuse(self, partitioned: Partitioned, key: str, what: str) -> NoReturn:
        self.ranks[0].file.unknown(f"the optimizer has {what} ({key} of {partitioned.name})")
