"""One rank's part of a sharded tensor, out of a pickled ShardedTensor or DTensor: the boxes that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .stand_ins import Made
from .values import StoredPart, StoredView, counts, shape_of

if TYPE_CHECKING:
    from .values import Values


def sharded_tensor(v: Values, made: Made) -> StoredPart:
    """A ``ShardedTensor``: its state is (local shards, metadata of all, process group, sharding spec, whether it checks on init)."""
    shards, metadata, *_ = made.state
    said = metadata.attributes()
    boxes = []
    for shard in shards:
        found = shard.attributes()
        placed = found["metadata"].attributes()
        view = _view(v, found["tensor"], counts(placed["shard_sizes"]))
        boxes.append((counts(placed["shard_offsets"]), view))
    return StoredPart(dtype=v.dtype_name(made.args[1]), shape=shape_of(said["size"], 16), boxes=tuple(boxes))


def dtensor(v: Values, made: Made) -> StoredPart:
    """A ``DTensor``: its local tensor, and a spec with the mesh, this rank's place on it, and a placement for each mesh dimension."""
    state = made.attributes()
    spec = state["_spec"].attributes()
    shape, where = shape_of(made.args[2], 16), _coordinate(v, spec["mesh"])
    mesh = _mesh_shape(v, spec["mesh"])
    offset, sizes = [0] * len(shape), list(shape)
    for placement, parts, at in zip(spec["placements"], mesh, where, strict=True):
        kind = placement.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind != "Shard":
            v.refuse(f"a DTensor with the placement {kind}")
        dim = placement.attributes()["dim"]
        if at >= parts:
            v.damaged(f"a DTensor at place {at} of {parts}")
        step = -(-sizes[dim] // parts)  # as torch.chunk: the last ranks may have less, or nothing
        begin = min(at * step, sizes[dim])
        offset[dim] += begin
        sizes[dim] = min(step, sizes[dim] - begin)
    view = _view(v, state["_local_tensor"], tuple(sizes))
    return StoredPart(dtype=v.dtype_name(made.args[1]), shape=shape, boxes=((tuple(offset), view),))


def _view(v: Values, value: Any, shape: tuple[int, ...]) -> StoredView:
    found = v.meaning(value)
    if type(found) is not StoredView or found.shape != shape:
        v.damaged(f"a part of a tensor that should have the shape {list(shape)} and has not")
    return found


def _coordinate(v: Values, mesh: Made) -> tuple[int, ...]:
    found = mesh.attributes().get("_coordinate_on_dim")
    if found is None:
        v.refuse("a DTensor that does not say where on the mesh its rank was")
    return counts(found)


def _mesh_shape(v: Values, mesh: Made) -> tuple[int, ...]:
    """How many ranks each dimension of a DeviceMesh has: torch 2.9 and later keep a layout, earlier ones a tensor of ranks."""
    said = mesh.attributes()
    if type(said.get("_layout")) is Made:
        layout = said["_layout"].attributes()
        if "axes" in layout:
            sizes = [counts(axis.attributes()["shape"]) for axis in layout["axes"]]
            return tuple(_product(s) for s in sizes)
        if "shape" in layout:
            return tuple(n if type(n) is int else _product(counts(n)) for n in layout["shape"])
    ranks = v.meaning(said.get("mesh", said.get("_mesh")))
    if type(ranks) is not StoredView:
        v.refuse("a DTensor whose mesh has no shape that is known")
    return ranks.shape


def _product(sizes: tuple[int, ...]) -> int:
    found = 1
    for n in sizes:
        found *= n
    return found
