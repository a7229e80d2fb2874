"""What ranks tell the leader about their tensors, and the leader's check that it all makes one checkpoint. Pure.

Ranks that hold the same tensors have the same table. A table is sent in parts, one for all tensors that lie on the same ranks, and equal
parts are sent once: so the leader reads each tensor of the job about once, one part per pipeline stage or group of experts and one for what
all ranks have, however many kinds of ranks there are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from ckpt.dtypes import dtype
from ckpt.errors import ConsistencyError, CoverageError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.layout import stage_rule
from ckpt.plan.layout.partition import numbers_in, runs_of
from ckpt.plan.layout.tensor_layout import TensorLayout, Tiling, joined_layout, states_boxes
from ckpt.text import parse_json

from .ownership import ChunkAssignment, TensorSpec, assign

_TILING_HINT = (
    "correct the layout; of tensors that state their boxes themselves (global_offsets, __create_chunk_list__) one rank states each, "
    "and replicas of it are DTensors with Replicate"
)
PARTS = 8
"""Parts of one table, at most: each is a message of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The tensors of some ranks, and tied names (name → stored name)."""

    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]

    def parts(self) -> list[Table]:
        """The tensors of the same ranks together, in at most ``PARTS`` tables: each says as much without the others.

        Who writes a tensor depends on the tensors that lie on the same ranks alone (``assign``), so no part needs another one.
        """
        # Why parts: with pipeline and expert parallelism nearly every rank has a different set of tensors, so whole tables would all differ
        # and the leader would read ranks × tensors entries. Cut by (mesh, coordinates), the part of stage 0, the part of stage 1 and the
        # part that all ranks share repeat from rank to rank; each is sent and read once.
        groups: dict[object, list[TensorSpec]] = {}
        by_layout: dict[int, list[TensorSpec]] = {}
        for t in self.tensors:
            members = by_layout.get(id(t.layout))
            if members is None:
                members = by_layout[id(t.layout)] = groups.setdefault((t.layout.mesh, t.layout.at), [])
            members.append(t)
        largest = sorted(groups.values(), key=lambda members: (-len(members), members[0].name))
        few = [*largest[: PARTS - 1], *([list(chain.from_iterable(largest[PARTS - 1 :]))] if len(largest) >= PARTS else [])] or [[]]
        place = {t.name: number for number, members in enumerate(few) for t in members} if self.aliases else {}
        aliases: list[dict[str, str]] = [{} for _ in few]
        for name, target in self.aliases.items():
            aliases[place.get(target, 0)][name] = target
        return [Table(tensors=tuple(members), aliases=tied) for members, tied in zip(few, aliases, strict=True)]

    def to_bytes(self) -> bytes:
        """Equal for equal tables: names are sorted, layouts and kinds of tensors numbered in order of first use."""
        # Tables are compared by the digest of these bytes, so equal tables must encode equally: whatever order the
        # state's dictionaries had, names are sorted, and everything else is numbered in the order of the names.
        layouts: dict[TensorLayout, int] = {}
        by_layout: dict[int, int] = {}
        kinds: dict[tuple[object, ...], int] = {}
        names, numbers = [], []
        for t in sorted(self.tensors, key=attrgetter("name")):
            layout = by_layout.get(id(t.layout))
            if layout is None:
                layout = by_layout[id(t.layout)] = layouts.setdefault(t.layout, len(layouts))
            names.append(t.name)
            kind = (t.dtype.name, t.shape, layout, t.logical)
            numbers.append(kinds.setdefault(kind, len(kinds)))
        data = {
            "layouts": [layout.to_json() for layout in layouts],
            "kinds": list(kinds),
            "names": names,
            "numbers": numbers,
            "aliases": dict(sorted(self.aliases.items())),
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Table:
        return cls.from_json(parse_json(data))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Table:
        """The parsed bytes of :meth:`to_bytes`."""
        layouts = [_layout(json.dumps(x)) for x in raw["layouts"]]
        kinds = [
            (dtype(kind), tuple(shape), layouts[number], None if logical is None else tuple(logical))
            for kind, shape, number, logical in raw["kinds"]
        ]
        tensors = tuple(TensorSpec(name, *kinds[number]) for name, number in zip(raw["names"], raw["numbers"], strict=True))
        return cls(tensors=tensors, aliases=raw["aliases"])


def tables_to_bytes(tables: Iterable[tuple[Iterable[int], bytes]]) -> bytes:
    """All tables of a job, each as :meth:`Table.to_bytes` gives it, with the ranks that have it."""
    return b"[" + b",".join(b"[%b,%b]" % (json.dumps(runs_of(ranks)).encode(), table) for ranks, table in tables) + b"]"


def tables_from_bytes(data: bytes) -> list[tuple[list[int], Table]]:
    return [(numbers_in(runs), Table.from_json(raw)) for runs, raw in parse_json(data)]


def split_tables(tensors: Iterable[TensorSpec], aliases: Mapping[str, str], own: Collection[str]) -> tuple[Table, Table]:
    """The table of the tensors that other ranks know too, and that of this rank's own, whose names are in ``own``."""
    both: tuple[list[TensorSpec], list[TensorSpec]] = [], []
    for tensor in tensors:
        both[tensor.name in own].append(tensor)
    shared, alone = (
        Table(tensors=tuple(both[is_own]), aliases={name: target for name, target in aliases.items() if (name in own) is is_own})
        for is_own in (False, True)
    )
    return shared, alone


@lru_cache(maxsize=1024)
def _layout(text: str) -> TensorLayout:
    """Equal layouts of several tables are one object: to compare two that list thousands of ranks takes long."""
    return TensorLayout.from_json(parse_json(text))


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """All tensors of the job, how each is stored, and who writes what."""

    tensors: dict[str, TensorSpec]
    assignments: dict[str, ChunkAssignment]
    aliases: dict[str, str]


@dataclass(eq=False)
class _Claim:
    """What the tables say of one tensor: the first one's word, and the numbers of the tables that have it."""

    tensor: TensorSpec
    assignment: ChunkAssignment | Tiling
    tables: list[int]


def join_tables(tables: Sequence[tuple[Sequence[int], Table]], *, merge_flat_shards: bool = False, stored: bool = True) -> Joined:
    """Check that the tables of all ranks (each with the ranks that have it) make one checkpoint.

    Not ``stored``: a live state, of which nobody writes anything. Then there are no assignments, which take most of the time, and
    layouts alone say whether there is a hole.
    """
    claims: dict[str, _Claim] = {}
    stated: dict[str, list[_Claim]] = {}
    problems: list[str] = []
    for number, (ranks, table) in enumerate(tables):
        assignments = assign(table.tensors, merge_flat_shards=merge_flat_shards) if stored else _tilings(table.tensors)
        for t in table.tensors:
            if states_boxes(t.layout):
                stated.setdefault(t.name, []).append(_Claim(t, assignments[t.name], [number]))
                continue
            claim = claims.get(t.name)
            if claim is None:
                claims[t.name] = _Claim(t, assignments[t.name], [number])
                continue
            if claim.tensor != t:
                _report_difference(claim, t, tables, number, problems)
            claim.tables.append(number)
            # Ranks outside the tensor's mesh may have it in their tables, but perhaps know only some of the mesh's tensors. They would
            # balance the load over too few, and name other writers than the mesh's own ranks do. Whether a table of these ranks says who
            # writes the tensor: ranks beside its mesh may know only some of the mesh's tensors
            if any(t.layout.coordinate(r) is not None for r in ranks):
                claim.assignment = assignments[t.name]
    _join_stated(stated, claims, tables, problems, stored=stored)
    aliases: dict[str, str] = {}
    for _, table in tables:
        for name, target in table.aliases.items():
            if aliases.setdefault(name, target) != target or name in claims:
                problems.append(f"tensor {name}: tied to {target} on some ranks only")
    if problems:
        raise ConsistencyError(
            _list_problems("the ranks do not agree", problems),
            hint="pass the same state on every rank; a layout's Shard that does not divide needs Uneven(dim, size) or Shard(sizes=...); "
            "tied DTensors are known best by the module itself",
        )
    _check_present(claims, tables)
    tensors = {name: claim.tensor for name, claim in claims.items()}
    assignments = {n: c.assignment for n, c in claims.items() if isinstance(c.assignment, ChunkAssignment)} if stored else {}
    return Joined(tensors=tensors, assignments=assignments, aliases=aliases)


def whole_where_present(tables: Sequence[tuple[Sequence[int], Table]]) -> list[tuple[Sequence[int], Table]]:
    """The tables, where a tensor that is whole on the ranks of its mesh lies on those alone that have it, such as an expert's weight or a
    stage's under the name that it has in a file."""
    present: dict[str, list[int]] = {}
    for ranks, table in tables:
        for t in table.tensors:
            present.setdefault(t.name, []).extend(ranks)
    layouts = {ranks: TensorLayout.replicated(ranks) for ranks in {tuple(sorted(ranks)) for ranks in present.values()}}

    def placed(t: TensorSpec) -> TensorSpec:
        ranks = tuple(sorted(present[t.name]))
        return replace(t, layout=layouts[ranks]) if not t.layout.splits and {*ranks} < t.layout.ranks() else t

    return [(ranks, replace(table, tensors=tuple(map(placed, table.tensors)))) for ranks, table in tables]


def _join_stated(
    stated: Mapping[str, Sequence[_Claim]],
    claims: dict[str, _Claim],
    tables: Sequence[tuple[Sequence[int], Table]],
    problems: list[str],
    *,
    stored: bool,
) -> None:
    """Make one claim of those of ranks that know their own boxes alone."""
    for name, each in stated.items():
        first, numbers = each[0], [number for claim in each for number in claim.tables]
        if any(claim.tensor != replace(first.tensor, layout=claim.tensor.layout) for claim in each):
            for claim in each[1:]:
                _report_difference(first, claim.tensor, tables, claim.tables[0], problems, boxes=True)
            continue
        if name in claims:
            _report_difference(claims[name], first.tensor, tables, first.tables[0], problems)
            continue
        from .external_assignment import joined_assignment  # few states have such tensors

        by_layout = {claim.tensor.layout: claim.assignment for claim in each}  # replicas have one, perhaps in several tables
        layout = joined_layout(name, list(by_layout))
        tensor = replace(first.tensor, layout=layout)
        cut = [assignment for assignment in by_layout.values() if isinstance(assignment, ChunkAssignment)]
        claims[name] = _Claim(tensor, joined_assignment(cut) if stored else layout.tiling(tensor.shape), numbers)


def _tilings(tensors: Iterable[TensorSpec]) -> dict[str, Tiling]:
    """How the layout of each tensor cuts it. Tensors that are cut alike share one object."""
    known: dict[tuple[int, tuple[int, ...]], Tiling] = {}
    tilings = {}
    for t in tensors:
        key = id(t.layout), t.shape
        if key not in known:
            known[key] = t.layout.tiling(t.shape)
        tilings[t.name] = known[key]
    return tilings


def _report_difference(
    claim: _Claim,
    other: TensorSpec,
    tables: Sequence[tuple[Sequence[int], Table]],
    number: int,
    problems: list[str],
    *,
    boxes: bool = False,
) -> None:
    """Note, or raise, what two tables say differently of one tensor. ``boxes``: each lists its own, so layouts may differ."""
    mine, theirs = ranks_of(tables, claim.tables), ranks_of(tables, [number])
    for what in ("shape", "dtype", "logical"):
        a, b = getattr(claim.tensor, what), getattr(other, what)
        if a != b:
            a, b = (a.name, b.name) if what == "dtype" else (a, b)
            word = "padding" if what == "logical" else what
            problems.append(f"tensor {other.name}: {word} {a} on {ranks_text(mine)}, {b} on {ranks_text(theirs)}")
            return
    if boxes:
        return
    layouts = [*dict.fromkeys(t.layout for _, table in tables for t in table.tensors if t.name == other.name)]
    names = {t.name for _, table in tables for t in table.tensors}
    everyone = sorted({rank for ranks, _ in tables for rank in ranks})
    raise CoverageError(
        f"{ranks_text(mine)} and {ranks_text(theirs)} both claim tensor {other.name} {Box.whole(other.shape)}: stored twice",
        hint=f"{stage_rule(other.name, layouts, names, everyone)}; if the ranks have different values, use ckpt.PerRank",
    )


def _check_present(claims: Mapping[str, _Claim], tables: Sequence[tuple[Sequence[int], Table]]) -> None:
    """Every rank that a tensor's layout gives a part to must have the tensor: else there is a hole."""
    known: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # by the identity of the layout: to hash very many takes time
    problems = []
    tiled: set[tuple[int, tuple[int, ...]]] = set()
    for name, claim in claims.items():
        key = id(claim.tensor.layout), tuple(claim.tables)
        if key not in known:
            known[key] = sorted(claim.tensor.layout.ranks() - set(ranks_of(tables, claim.tables)))
        absent = known[key]
        if absent:
            problems.append(_hole(name, claim, absent))
        elif claim.assignment.boxes is not None and (id(claim.assignment), claim.tensor.shape) not in tiled:
            tiled.add((id(claim.assignment), claim.tensor.shape))
            fault = claim.assignment.fault(claim.tensor.shape)
            if fault is not None:
                raise CoverageError(f"tensor {name}: {fault.box} is stored {fault.times} times", hint=_TILING_HINT)
    if problems:
        raise CoverageError(
            _list_problems("parts of tensors are missing", problems),
            hint="put the tensor into the state of these ranks, or correct the layout; a value of one rank alone goes into ckpt.PerRank",
        )


def _hole(name: str, claim: _Claim, absent: list[int]) -> str:
    partition = claim.assignment
    gone = np.isin(partition.owners if isinstance(partition, ChunkAssignment) else partition.holders[:, 0], absent)
    lost = np.flatnonzero(gone)
    boxes = f"{partition.box(int(lost[0]))}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "") if len(lost) else "a replica"
    return f"tensor {name}: {ranks_text(absent)} should hold {boxes}, but {'does' if len(absent) == 1 else 'do'} not have it"


def ranks_of(tables: Sequence[tuple[Sequence[int], Table]], numbers: Iterable[int]) -> list[int]:
    return sorted(r for n in numbers for r in tables[n][0])


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7``."""
    runs = runs_of(ranks)
    text = ", ".join(f"{first}-{first + count - 1}" if count > 1 else f"{first}" for first, count in runs[:20])
    text += ", …" if len(runs) > 20 else ""
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _list_problems(what: str, problems: Sequence[str], limit: int = 5) -> str:
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n  ".join([f"{what}:", *problems[:limit], *more])
