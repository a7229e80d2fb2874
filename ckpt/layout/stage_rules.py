"""Which rule of a layout makes one tensor of those that the ranks of several stages each claim. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .mesh import Mesh
from .tensor_layout import TensorLayout


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
