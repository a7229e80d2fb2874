"""Layouts for plain tensors: rules from names to placements, for Megatron-style models whose tensors do not know their own place.

A rule is ``(glob, placement, …)``; the first glob that matches a tensor's name decides, and a name that no rule matches is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from ckpt.errors import LayoutError, UsageError

from .mesh import Mesh, Numbered
from .placement_base import Placement, dimension
from .placements import Shard
from .tensor_layout import TensorLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

Rule: TypeAlias = "tuple[str, Unpack[tuple[Placement, ...]]]"
"""A glob and its placements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedShard:
    """A local tensor's place: the stored name, the global shape, the layout, and the box that the local tensor is of the global
    one when stacked."""

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    logical: tuple[int, ...] | None = None
    stack: tuple[int, int] | None = None
    """``(dim, index)``: the local tensor is element ``index`` of new dimension ``dim``."""


@dataclass(frozen=True, slots=True)
class _Number:
    """One number found in a name: whose it is, on which coordinate, and the global value."""

    rule: Numbered
    coordinate: int
    value: int | None


class Layout:
    """A mesh and rules; see the module's docstring.

    Args:
        mesh: names and sizes of the parallel dimensions, the last one's ranks being neighbours: ``{"pp": 2, "dp": 2, "tp": 2}``.
        rules: ``(glob, placement, …)`` in order of preference.
        numbered: names with local numbers, from :func:`pipeline` and :func:`experts`.
        meshes: further meshes over the same ranks, for rules with :class:`OnMesh`.

    Example::

        Layout({"pp": 2, "tp": 2}, rules=[("*.wq.weight", Shard(0, "tp")), ("*.wo.weight", Shard(1, "tp")), ("*", Replicate())],
               numbered=[pipeline("layers.{n}", layers=8, stages=2)])
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | Mesh,
        rules: Sequence[Rule],
        *,
        numbered: Sequence[Numbered] = (),
        meshes: Mapping[str, Mapping[str, int] | Mesh] | None = None,
    ) -> None:
        if isinstance(rules, Mapping):
            rules = list(rules.items())
        for rule in rules:
            if not isinstance(rule, (tuple, list)) or not rule or not isinstance(rule[0], str):
                raise LayoutError(
                    f"not a rule: {rule!r}", hint='a rule is a tuple of a glob and placements: ("*.wq.weight", Shard(0, "tp"))'
                )
        self.mesh: Mesh = Mesh.of(mesh)
        self.meshes: dict[str, Mesh] = {name: Mesh.of(sizes) for name, sizes in (meshes or {}).items()}
        self.rules: list[tuple[str, tuple[Placement, ...]]] = [(rule[0], tuple(rule[1:])) for rule in rules]
        self.numbered: tuple[Numbered, ...] = tuple(numbered)
        for glob, placements in self.rules:
            for p in placements:
                if not isinstance(p, Placement) or not p.in_rules:
                    raise LayoutError(f"the rule for {glob!r} has {p!r} of {type(p).__module__}", hint="placements are classes of ckpt")
        for other in self.meshes.values():
            if set(other.ranks) != set(self.mesh.ranks):
                raise LayoutError(f"meshes {self.mesh} and {other} are over different ranks")
        for n in self.numbered:
            if len(n.ids) != self._mesh(n.mesh).size(n.over):
                raise LayoutError(
                    f"{n.pattern!r} has numbers for {len(n.ids)} coordinates, {n.over!r} has {self._mesh(n.mesh).size(n.over)}"
                )

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise LayoutError unless the layout is for exactly these ranks."""
        if set(self.mesh.ranks) != set(ranks):
            raise LayoutError(
                f"the layout's mesh {self.mesh} is for {len(self.mesh.ranks)} ranks ({_few(self.mesh.ranks)}), the call is made by "
                f"{len(ranks)} ({_few(ranks)})",
                hint="give the sizes of this job's parallel dimensions; ranks of another numbering go into ckpt.Mesh(names, sizes, ranks)",
            )

    def __repr__(self) -> str:
        return f"Layout({self.mesh}, {len(self.rules)} rules)"

    def _mesh(self, name: str | None) -> Mesh:
        if name is None:
            return self.mesh
        if name not in self.meshes:
            raise LayoutError(f"the layout has no mesh {name!r}", hint=f"its further meshes are {sorted(self.meshes)}")
        return self.meshes[name]

    def place(self, name: str, local_shape: tuple[int, ...], rank: int) -> ResolvedShard:
        """Where the tensor that ``rank`` calls ``name`` belongs.

        Raises:
            LayoutError: no rule matches, the shape does not fit the rule, or the layout gives the rank no part of it.
        """
        try:
            return self._place(name, local_shape, rank)
        except LayoutError as err:
            raise LayoutError(err.message, where=f"tensor {name}, rank {rank}", hint=err.hint) from err

    def _place(self, name: str, local_shape: tuple[int, ...], rank: int) -> ResolvedShard:
        if rank not in self.mesh.ranks:
            raise LayoutError(f"the rank is not in the layout's mesh {self.mesh}")
        placements = next((placements for glob, placements in self.rules if fnmatchcase(name, glob)), None)
        if placements is None:
            raise LayoutError("no rule of the layout matches", hint='add a rule, or ("*", Replicate()) as the last one')
        stored, numbers = self._renumber(name, rank)
        mesh_names = [p.mesh_name() for p in placements] + [n.rule.mesh for n in numbers]
        mesh = self._mesh(next((mesh_name for mesh_name in mesh_names if mesh_name), None))
        at = self._at(placements, numbers, mesh, rank)
        splits = tuple(split for p in placements if (split := p.as_split()) is not None)
        layout = TensorLayout(mesh, splits, at)
        shape = _global_shape(placements, layout, local_shape)
        logical: tuple[int, ...] | None = None
        for p in placements:
            real = p.real_shape(shape if logical is None else logical)
            logical = logical if real is None else real
        if layout.coordinate(rank) is None:
            raise _not_here(layout)
        wanted = layout.local_shape(shape, rank)
        if wanted != local_shape:
            raise LayoutError(
                f"by the layout this rank's part of a tensor of shape {shape} has shape {wanted}, but the tensor has {local_shape}",
                hint="correct the rule, or add Uneven(dim, size) where the parts differ",
            )
        stacked = [n for n in numbers if n.rule.stack is not None]
        if len(stacked) > 1:
            raise LayoutError("two numbers of its name are to be stacked", hint="leave stack=None in one of the two")
        if stacked:
            return self._stack(stored, shape, layout, logical, stacked[0])
        return ResolvedShard(name=stored, shape=shape, layout=layout, logical=logical)

    def on_stages(self, name: str, layout: TensorLayout, rank: int) -> TensorLayout:
        """The layout of a DTensor, on the stages that the rule for its name gives it: those of a pipeline each have their own mesh,
        whose dimensions have the names that they have here. Itself, if no rule gives it stages."""
        placements = next((p for glob, p in self.rules if fnmatchcase(name, glob)), ())
        mesh = self._mesh(next((mesh_name for p in placements if (mesh_name := p.mesh_name())), None))
        at: dict[str, tuple[int, ...]] = {}
        for p in placements:
            at |= p.coordinates(mesh)
        if not at or layout.at or not layout.mesh.is_slice_of(mesh, rank):
            return layout
        staged = TensorLayout(mesh, layout.splits, tuple(sorted(at.items())))
        if staged.coordinate(rank) is None:
            raise _not_here(staged, f"tensor {name}, rank {rank}")
        return staged

    def _renumber(self, name: str, rank: int) -> tuple[str, list[_Number]]:
        numbers = []
        for rule in self.numbered:
            match = rule.regex().search(name)
            if match is None:
                continue
            mesh = self._mesh(rule.mesh)
            coordinate = mesh.place(rank)[mesh.axis(rule.over)]
            fields = match.groupdict()
            chunks = rule.ids[coordinate]
            chunk, local = int(fields.get("chunk") or 0), fields.get("n")
            if chunk >= len(chunks) or (local is not None and int(local) >= len(chunks[chunk])):
                raise LayoutError(f"{rule.pattern!r} has no number for it on coordinate {coordinate} of {rule.over!r}")
            value = None if local is None else chunks[chunk][int(local)]
            to = rule.to.replace(".{n}", "").replace("{n}", "") if rule.stack is not None else rule.to.replace("{n}", str(value))
            name = (name[: match.start()] + to + name[match.end() :]).strip(".")
            numbers.append(_Number(rule, coordinate, value))
        return name, numbers

    def _at(
        self, placements: tuple[Placement, ...], numbers: list[_Number], mesh: Mesh, rank: int
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        at: dict[str, tuple[int, ...]] = {}
        for rule in self.numbered:
            if rule.stage and rule.over in mesh.names:
                at[rule.over] = (mesh.place(rank)[mesh.axis(rule.over)],)
        for n in numbers:
            if n.value is not None and n.rule.over in mesh.names:
                at[n.rule.over] = (n.coordinate,)
        for p in placements:
            at |= p.coordinates(mesh)
        return tuple(sorted(at.items()))

    def _stack(
        self, name: str, shape: tuple[int, ...], layout: TensorLayout, logical: tuple[int, ...] | None, number: _Number
    ) -> ResolvedShard:
        """The layout of the stacked tensor: a new dimension, cut over the number's mesh dimension; ids must be contiguous blocks."""
        rule, ndim = number.rule, len(shape) + 1
        assert rule.stack is not None and number.value is not None
        dim = dimension(rule.stack, ndim, rule)
        flat = [i for coordinate in rule.ids for chunk in coordinate for i in chunk]
        if flat != list(range(len(flat))) or any(len(coordinate) != 1 for coordinate in rule.ids):
            raise LayoutError(
                f"{rule.pattern!r} cannot be stacked: a coordinate's numbers are not one contiguous block", hint="leave stack=None"
            )
        sizes = tuple(len(coordinate[0]) for coordinate in rule.ids)
        splits = tuple(s.stacked(dim, ndim) for s in layout.splits)
        at = tuple((over, allowed) for over, allowed in layout.at if over != rule.over)
        stacked = TensorLayout(layout.mesh, (Shard(dim, rule.over, sizes), *splits), at)
        grown = (*shape[:dim], len(flat), *shape[dim:])
        real = None if logical is None else (*logical[:dim], len(flat), *logical[dim:])
        return ResolvedShard(name=name, shape=grown, layout=stacked, logical=real, stack=(dim, number.value))


def check_layout(layout: object, ranks: Sequence[int]) -> None:
    """What a call is given as its layout, if it is."""
    if not isinstance(layout, Layout):
        raise UsageError(f"layout must be a ckpt.Layout, not {type(layout).__name__}", hint="see docs/layouts.md")
    layout.check_ranks(ranks)


def _not_here(layout: TensorLayout, where: str | None = None) -> LayoutError:
    hint = "correct the rule's Stage, such as Stage(\"pp\", (0, -1)) for both ends, or take the tensor out of this rank's state"
    return LayoutError(f"the layout has it on {dict(layout.at)} only, where this rank is not", where=where, hint=hint)


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _global_shape(placements: tuple[Placement, ...], layout: TensorLayout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The global shape of a tensor of which a rank holds ``shape``."""
    stated = next((given for p in placements if (given := p.stated_shape()) is not None), None)
    if stated is not None:
        return stated
    # Splits are undone from the last to the first: given sizes are those of what the splits before left.
    for split in reversed(layout.splits):
        shape = split.global_shape(shape, layout.mesh)
    for p in placements:
        if p.as_split() is None:
            shape = p.global_shape(shape, layout.mesh)
    return shape


# Which rule of a layout makes one tensor of those that the ranks of several stages each claim. Pure.


def stage_rule(name: str, layouts: Sequence[TensorLayout], names: Iterable[str], ranks: Sequence[int]) -> str:
    """What to do if these layouts, which differ, are of one tensor. ``names``: of all tensors; ``ranks``: all of the job."""
    first = layouts[0]
    places = [dict(layout.at) for layout in layouts]
    differing = [over for over, at in first.at if any(place.get(over) != at for place in places)]
    alike = all(
        replace(layout, at=first.at) == first and place.keys() == places[0].keys() for layout, place in zip(layouts, places, strict=True)
    )
    if alike and len(differing) == 1:
        stages = sorted({i for place in places for i in place[differing[0]]})
        return f'if it is one tensor on several stages, add ckpt.Stage("{differing[0]}", {_tuple(stages)}) to the placements of its rule'
    general = (
        'if it is one tensor on several pipeline stages, a layout with a rule such as ckpt.Stage("pp", (0, -1)) says so, also of a DTensor'
    )
    meshes = [layout.mesh for layout in layouts]
    alone = len({rank for mesh in meshes for rank in mesh.ranks}) == sum(len(mesh.ranks) for mesh in meshes)
    if not alone or any(layout.at for layout in layouts):
        return general
    if len({(layout.mesh.names, layout.mesh.sizes, layout.splits) for layout in layouts}) > 1:
        return f"{general} that has the same placements and mesh dimensions on each of them, which this one has not"
    wide = _with_stages(meshes, ranks)
    if wide is None:
        return f"{general}, with the names that its meshes' dimensions have"
    sizes = ", ".join(f'"{over}": {size}' for over, size in zip(wide.names, wide.sizes, strict=True))
    stages = sorted(wide.place(mesh.ranks[0])[wide.axis("pp")] for mesh in meshes)
    # State that an optimizer keeps lies as its parameter does, by the rule for the parameter.
    param = max((other for other in names if f".{other}." in name), key=len, default=name)
    rules = f'[("{param}", ckpt.Stage("pp", {_tuple(stages)})), ("*", ckpt.Replicate())]'
    return (
        f"if it is one tensor on several pipeline stages, give layout=ckpt.Layout({{{sizes}}}, rules={rules}), or add the first rule to "
        "yours: it is then compared and stored once"
    )


def _with_stages(meshes: Sequence[Mesh], ranks: Sequence[int]) -> Mesh | None:
    """The mesh of ranks 0, 1, … with a dimension "pp" of which each of these meshes is a slice."""
    names, sizes = meshes[0].names, meshes[0].sizes
    stages, rest = divmod(len(ranks), math.prod(sizes))
    if "pp" in names or rest or [*ranks] != [*range(len(ranks))]:
        return None
    wider = (Mesh((*names[:at], "pp", *names[at:]), (*sizes[:at], stages, *sizes[at:])) for at in range(len(names) + 1))
    return next((wide for wide in wider if all(mesh.is_slice_of(wide, mesh.ranks[0]) for mesh in meshes)), None)


def _tuple(stages: Sequence[int]) -> str:
    return f"({', '.join(map(str, stages))})"
