"""Values of a state that say themselves what they are stored as: a box of a named tensor of the job, or a named object. The state's own
names for them, which differ between pipeline stages, say nothing.

Megatron-Core makes them (``sharded_state_dict``). They are known by their fields, so that Megatron-Core need not be there:

    key, data, local_shape, global_shape, global_offset     ``ShardedTensor``: ``data`` is that box of the tensor ``key``, behind
      prepend_axis_num, flattened_range                     ``prepend_axis_num`` axes of size 1, or a flat range of it
    key, data, global_shape, global_offset                  ``ShardedObject``: plain values and tensors, kept as they are
    key, data, build_fn, merge_fn                           ``ShardedTensorFactory``: makes the two above of a tensor, and back
    unwrap                                                  ``LocalNonpersistentObject``: neither saved nor loaded

``replica_id`` that is not 0 in all its parts: another rank saves the same. A load fills ``data`` of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckpt.errors import StateError
from ckpt.plan.layout.geometry import flat_to_boxes

from . import lazy
from .sharded import Part, Sharded, of_boxes

_LOCAL = "LocalNonpersistentObject"


def is_named(value: object) -> bool:
    """Whether a value says itself what it is stored as."""
    kind: Any = type(value)
    return _names_itself(kind)


@lru_cache(maxsize=4096)
def _names_itself(kind: Any) -> bool:
    has = getattr(kind, "__dataclass_fields__", {}).keys()
    if not has:
        return bool(kind.__name__ == _LOCAL and hasattr(kind, "unwrap"))
    return has >= {"key", "data", "replica_id"} and (has >= {"global_shape", "global_offset"} or has >= {"build_fn", "merge_fn"})


@dataclass(eq=False, slots=True)
class NamedValues:
    """Those of one walk over a state: boxes by tensor, objects by stored name, and factories with what they have built."""

    boxes: dict[str, list[Any]] = field(default_factory=dict)
    objects: dict[str, list[Any]] = field(default_factory=dict)
    factories: list[tuple[Any, Any]] = field(default_factory=list)

    def add(self, value: Any) -> None:
        if hasattr(value, "build_fn"):
            built = value.build()
            self.factories.append((value, built))
            for each in _named_in(built):
                self.add(each)
        elif hasattr(value, "local_shape"):
            self.boxes.setdefault(value.key, []).append(value)
        elif type(value).__name__ != _LOCAL:
            self.objects.setdefault(stored_name(value), []).append(value)


def stored_name(value: Any) -> str:
    """The name of an object, as Megatron-Core's own checkpoints have it."""
    offset, shape = (".".join(map(str, numbers)) for numbers in (value.global_offset, value.global_shape))
    return f"{value.key}/shard_{offset}_{shape}"


def is_main(value: Any) -> bool:
    """Whether this rank saves it."""
    replica = value.replica_id
    return not (replica if isinstance(replica, int) else any(replica))


def _named_in(value: Any) -> Iterator[Any]:
    if is_named(value):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _named_in(child)


def place(name: str, values: Sequence[Any], rank: int, *, main: bool = False) -> Sharded:
    """The place of the boxes that this rank has of one tensor; or only of those that it saves."""
    shape, parts = tuple(values[0].global_shape), list[Part]()
    for value in values:
        if not isinstance(value.data, lazy.Tensor) or value.data.is_meta:
            text = f"the {type(value).__name__} has no data"
            raise StateError(text, where=f"tensor {name}", hint="give it a tensor first: value.init_data(device)")
        if (value.data.dtype, tuple(value.global_shape)) != (values[0].data.dtype, shape):
            text = f"this rank gives it dtype {values[0].data.dtype} and shape {shape}, and {value.data.dtype} and {value.global_shape}"
            raise StateError(text, where=f"tensor {name}", hint="each key is the name of one tensor")
        parts += _parts(value) if is_main(value) or not main else ()
    return of_boxes(name, shape, parts, rank, tensors=[value.data for value in values])


def _parts(value: Any) -> Iterator[Part]:
    """Offset, sizes and memory of each box: several for a flat range."""
    front, start, data = value.prepend_axis_num, tuple(value.global_offset), value.data.detach()
    local = (*(1,) * front, *value.local_shape)
    if value.flattened_range is None:
        yield (start, local), data[(None,) * front]
        return
    at = first = value.flattened_range.start
    for box in flat_to_boxes(local, first, value.flattened_range.stop):
        memory = data.reshape(-1)[at - first : at - first + box.numel].view(box.shape)
        yield (tuple(a + b for a, b in zip(start, box.offset, strict=True)), box.shape), memory
        at += box.numel


def same_boxes(values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of values that are the same box in memory of their own: the second gets what the first has got."""
    first: dict[tuple[Any, ...], Any] = {}
    for value in values:
        flat = value.flattened_range
        key = tuple(value.global_offset), tuple(value.local_shape), None if flat is None else (flat.start, flat.stop)
        other = first.setdefault(key, value)
        if other is not value:
            yield other, value


def plain(value: Any) -> Any:
    """A state with the data of each of them in its place."""
    if is_named(value):
        return value.unwrap() if type(value).__name__ == _LOCAL else value.data
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def merge(factory: Any, built: Any) -> None:
    """Bring what was loaded into the tensor that a factory has made copies of; views of it have it already."""
    own = factory.data.untyped_storage().data_ptr()
    if any(box.data.untyped_storage().data_ptr() != own for box in _named_in(built) if hasattr(box, "local_shape")):
        with lazy.torch.no_grad():
            factory.data.copy_(factory.merge_fn(plain(built)))
