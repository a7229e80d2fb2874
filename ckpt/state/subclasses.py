"""Tensor subclasses that are made of other tensors (``__tensor_flatten__``): quantised weights, optimizer states in 8 bits.

The inner tensors are stored under ``name#field``. Beside them, where the state has the tensor, lies a *description*: a mapping with the
class by name, dtype, shape and context as plain values. A load compares it with that of its target and copies into the target's inner
tensors. So a class is needed by name only where the state has no tensor yet, and then only one that the program has imported.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpt.errors import LayoutError, StateError
from ckpt.plan import tree
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.tree import Node
from ckpt.plan.values import CLASS

from . import lazy
from .dtensor import is_dtensor, is_wrapper
from .tensors import raw_view

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

log = logging.getLogger("ckpt")

TENSORS = "tensors"
"""The key of a description for the stored inner tensors, where the state does not have them by their names."""


def wrapper_of(tensor: torch.Tensor) -> Any:
    """This rank's tensor of the class."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def inner_tensors(wrapper: Any) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper is made of, by field; those of a wrapper inside have both fields, as ``a#b``."""
    tensors: dict[str, torch.Tensor] = {}
    for field in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, field)
        if is_wrapper(inner):
            tensors |= {f"{field}#{below}": tensor for below, tensor in inner_tensors(wrapper_of(inner)).items()}
        else:
            tensors[field] = inner.detach()
    return tensors


def dequantized(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The plain tensor that a wrapper says it is, in its dtype; a DTensor as that is."""
    wrapper = wrapper_of(tensor)
    try:
        plain = wrapper.detach().dequantize()
    except Exception as err:
        text = f"the dequantize() of a {_name(type(wrapper))} fails: {type(err).__name__}: {err}"
        raise StateError(text, where=f"tensor {path}", hint="leave it out, or have a plain tensor in its place") from err
    if type(plain) is not lazy.Tensor or plain.shape != wrapper.shape:
        text = f"the dequantize() of a {_name(type(wrapper))} gives a {type(plain).__qualname__} of another kind or shape"
        raise StateError(text, where=f"tensor {path}", hint="leave it out, or have a plain tensor in its place")
    plain = plain.to(wrapper.dtype)
    if not is_dtensor(tensor):
        return plain
    return _around(plain, tensor)


# ------------------------------------------------------------------------------------------------------ descriptions


def describe(tensor: torch.Tensor, path: str) -> dict[str, Node]:
    """The description of a wrapper. In its context the shape of a DTensor's local tensor counts as that of the whole."""
    wrapper = wrapper_of(tensor)
    names, context = wrapper.__tensor_flatten__()
    inside = {name: describe(inner, f"{path}#{name}") for name in names if is_wrapper(inner := getattr(wrapper, name))}
    node: dict[str, Node] = {
        CLASS: _name(type(wrapper)),
        "dtype": str(wrapper.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "context": _context_node(context, wrapper.shape, tensor.shape, f"{path} (context)"),
    }
    return {**node, "inside": inside} if inside else node


def is_description(node: Node) -> bool:
    return type(node) is dict and CLASS in node


def difference(stored: Node, tensor: torch.Tensor, path: str) -> str | None:
    """How a stored description, or whatever else is stored, differs from that of a wrapper; None if it does not."""
    mine = describe(tensor, path)
    if not is_description(stored):
        return f"a {mine[CLASS]} in the state, and its inner tensors are not in the checkpoint"
    return _first_difference({key: value for key, value in stored.items() if key != TENSORS}, mine, "")


def _first_difference(stored: Node, mine: Node, at: str) -> str | None:
    if tree.text(stored) == tree.text(mine):
        return None
    if type(stored) is type(mine) is dict and tree.tag_of(stored) is tree.tag_of(mine) is None:
        for key in dict.fromkeys((*mine, *stored)):
            if (at, key) == ("context", "requires_grad"):  # of TransformerEngine's: whether it is trained is no part of it
                continue
            named = "class" if key == CLASS else f"{at}.{key}".removeprefix(".")
            text = _first_difference(stored.get(key), mine.get(key), named)
            if text is not None:
                return text
        return None
    return f"{at} {tree.shorten(stored)} in the checkpoint, {tree.shorten(mine)} in the state"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _context_node(context: Any, old: Sequence[int], new: Sequence[int], path: str) -> Node:
    """A context as plain values, with the shape ``new`` for ``old``. What is not plain can be compared, and is not made again."""

    def leaf(value: object, at: str) -> Node:
        if isinstance(value, enum.Enum):
            return {"object": f"{_name(type(value))}.{value.name}"}
        if isinstance(value, type) or (callable(value) and "<" not in getattr(value, "__qualname__", "<")):
            return {"object": _name(value)}  # type: ignore[arg-type]  # functions have both names, too
        if hasattr(value, "update_quantized"):  # TransformerEngine's: what will quantise the next values, which is the program's to say
            return {"object": _name(type(value))}
        parts: dict[str, object] | None = None
        if is_dataclass(value):
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            parts = value._asdict()
        return None if parts is None else {"object": _name(type(value)), "fields": tree.encode(_reshaped(parts, old, new), at, leaf)}

    return tree.encode(_reshaped(context, old, new), path, leaf)


def _reshaped(context: Any, old: Sequence[int], new: Sequence[int]) -> Any:
    """A context with the shape ``new`` wherever it has ``old``. A device is of its kind: each rank has its own."""
    if type(context) is lazy.torch.Size:
        return lazy.torch.Size(new) if context == lazy.torch.Size(old) else context
    if type(context) is lazy.torch.device:
        return lazy.torch.device(context.type)
    if type(context) is dict:
        return {key: _reshaped(value, old, new) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_reshaped(value, old, new) for value in context)
    return context


# ------------------------------------------------------------------------------------------------------------ layouts


def inner_layouts(
    name: str, wrapper: Any, layout: TensorLayout, shape: Sequence[int]
) -> dict[str, tuple[torch.Tensor, TensorLayout, tuple[int, ...]]]:
    """Inner tensors, their layouts and global shapes, where the wrapper has ``layout`` in a global tensor of ``shape``.

    One that is cut along a dimension is taken to have its parts where the class itself has them: a slice of the wrapper shows which
    inner tensors it cuts, and in which dimension.
    """
    inner = inner_tensors(wrapper)
    if not layout.splits:
        return {field: (tensor, layout, tuple(tensor.shape)) for field, tensor in inner.items()}
    (split, *others) = layout.splits
    if not isinstance(split, Shard):
        raise _uncut(name, wrapper, f"is split as {split}")
    if others:
        raise _uncut(name, wrapper, "is split over several dimensions of the mesh")
    dim = split.dim % len(shape)
    parts = layout.mesh.size(split.over)
    ranges = [split.part(shape[dim], parts, index)[0] for index in range(parts)]
    sizes = [stop - start for start, stop in ranges]
    if not all(sizes):
        raise _uncut(name, wrapper, f"has no elements on some of its {parts} ranks")
    whole, sliced, undivided = _slice(name, wrapper, dim)
    placed = {}
    for field, tensor in inner.items():
        if field not in sliced:
            raise _uncut(name, wrapper, f"has no {field} once it is sliced")
        cut = _cut(whole[field], sliced[field])
        scaled = [Fraction(tensor.shape[d], wrapper.shape[dim]) * size for d in cut[:1] for size in sizes]
        if field in undivided or any(size.denominator > 1 for size in scaled):
            raise _uncut(name, wrapper, f"has {field} of shape {tuple(tensor.shape)}, which does not divide as its rows {sizes}")
        of_parts = tuple(map(int, scaled))
        inner_shape = tuple(sum(of_parts) if d in cut else n for d, n in enumerate(tensor.shape))
        splits = tuple(Shard(d, split.over, of_parts) for d in cut)
        placed[field] = tensor, TensorLayout(layout.mesh, splits, layout.at), inner_shape
    return placed


Inner: TypeAlias = "Mapping[str, torch.Tensor]"


def _slice(name: str, wrapper: Any, dim: int) -> tuple[Inner, Inner, Collection[str]]:
    """The inner tensors of a wrapper, of the first of its equal parts, and names of those that do not divide: of the fewest parts that
    the class makes and in which all divide. A wrapper that has no such parts, as one of a single block, is tried as half of one twice as
    long."""
    size, whole, first, reason = wrapper.shape[dim], inner_tensors(wrapper), None, "has one row here"
    for count in (n for n in range(2, size + 1) if size % n == 0):
        part = _part(wrapper, dim, 0, size // count)
        if isinstance(part, str):
            reason = part
        else:
            undivided = [field for field in whole if field in part and not _divides(whole[field], part[field], count)]
            if not undivided and part.keys() >= whole.keys():
                return whole, part, ()
            first = first or (whole, part, undivided)
    try:
        twice = _twice(wrapper, dim)
        inner = inner_tensors(twice)
        for start in (0, size):
            part = _part(twice, dim, start, size)
            if isinstance(part, str) or any(
                not _equal(part[field], _rows_of(inner[field], tensor, dim, start)) for field, tensor in whole.items()
            ):
                break
        else:
            return inner, whole, ()
    except Exception as err:  # noqa: BLE001  as below: why its own parts do not do says more
        log.debug("%s: a %s twice as long cannot be made: %s", name, _name(type(wrapper)), err)
    if first is None:
        raise _uncut(name, wrapper, reason)
    return first


def _part(wrapper: Any, dim: int, start: int, length: int) -> Inner | str:
    """The inner tensors of one of a wrapper's equal parts; why not, if the class makes none."""
    reasons = []
    for method in ("narrow", "split"):  # TransformerEngine's MXFP8 is cut by the latter alone
        try:
            whole = wrapper.detach()
            part = whole.narrow(dim, start, length) if method == "narrow" else whole.split(length, dim)[start // length]
            if type(part) is type(wrapper):
                return inner_tensors(part)
            reasons.append(f"gives a {type(part).__qualname__} when it is sliced")
        except Exception as err:  # noqa: BLE001  classes refuse as they like
            reasons.append(f"cannot be sliced ({type(err).__name__}: {err})")
    return reasons[0]


def _twice(wrapper: Any, dim: int) -> Any:
    """A wrapper twice as long, of other bytes: none of its rows are alike, as those of zeros are."""
    names, context = wrapper.__tensor_flatten__()
    shape = tuple(2 * size if d == dim else size for d, size in enumerate(wrapper.shape))
    inner = {name: getattr(wrapper, name).detach() for name in names}
    for name, tensor in inner.items():
        if tensor.dim() == wrapper.dim():
            twice = lazy.torch.cat([tensor, tensor], dim)
            count = twice.numel() * twice.element_size()
            some = lazy.torch.arange(251, dtype=lazy.torch.uint8, device=tensor.device).repeat(count // 251 + 1)[:count]
            inner[name] = some.view(tensor.dtype).view(twice.shape)
    stride = lazy.torch.empty(shape, device="meta").stride()
    return type(wrapper).__tensor_unflatten__(inner, _reshaped(context, wrapper.shape, shape), lazy.torch.Size(shape), stride)


def _rows_of(twice: torch.Tensor, tensor: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    """The half of an inner tensor of a wrapper twice as long that begins with the first row, or later; all of one that is no longer."""
    return twice if twice.shape == tensor.shape else twice.chunk(2, dim)[start > 0]


def _cut(whole: torch.Tensor, part: torch.Tensor) -> list[int]:
    """The dimensions in which a part of a wrapper has less of an inner tensor."""
    return [d for d, (before, now) in enumerate(zip(whole.shape, part.shape, strict=True)) if now != before]


def _divides(whole: torch.Tensor, part: torch.Tensor, count: int) -> bool:
    """Whether ``part`` is the first of ``count`` equal parts of an inner tensor in one dimension, or all of it: not rows that are padded to
    as many."""
    cut = _cut(whole, part)
    if len(cut) > 1 or any(part.shape[d] * count != whole.shape[d] for d in cut):
        return False
    return whole.data_ptr() == part.data_ptr() or (whole.dim() < 2 and _equal(whole[tuple(map(slice, part.shape))], part))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and lazy.torch.equal(raw_view(one.contiguous()), raw_view(other.contiguous()))


def _uncut(name: str, wrapper: object, why: str) -> LayoutError:
    return LayoutError(
        f"a {_name(type(wrapper))} that {why}: the owners of the elements of its inner tensors are unknown",
        where=f"tensor {name}",
        hint="shard it along rows, in whole blocks; or replicate it",
    )


# -------------------------------------------------------------------------------------------------------- new tensors


def rebuilt(node: Mapping[str, Any], inner: Mapping[str, torch.Tensor], shape: Sequence[int], path: str) -> torch.Tensor:
    """A wrapper of ``shape`` as a description says, made of these inner tensors, by field."""
    kind = _loaded_class(node[CLASS], path)
    if '"object":' in tree.text(node["context"]):
        text = f"the context of its {node[CLASS]} has objects, which are not made from a checkpoint"
        raise StateError(text, where=path, hint="have the tensor in the state before the load: it is filled in place")
    given = {field: tensor for field, tensor in inner.items() if "#" not in field}
    for field, inside in node.get("inside", {}).items():
        below = {name.partition("#")[2]: tensor for name, tensor in inner.items() if name.partition("#")[0] == field}
        given[field] = rebuilt(inside, below, shape if inside["shape"] == node["shape"] else inside["shape"], f"{path}#{field}")
    context = _reshaped(tree.decode(node["context"], _no_reference), node["shape"], shape)
    stride = lazy.torch.empty(tuple(shape), device="meta").stride()
    made: torch.Tensor = kind.__tensor_unflatten__(given, context, lazy.torch.Size(shape), stride)
    if tuple(made.shape) != tuple(shape) or str(made.dtype) != f"torch.{node['dtype']}":
        text = f"{node[CLASS]} makes a {made.dtype} of shape {tuple(made.shape)} of what was a {node['dtype']} of shape {tuple(shape)}"
        raise StateError(text, where=path, hint="use the version of the class that saved it")
    if any(tensor.data_ptr() != inner[field].data_ptr() for field, tensor in inner_tensors(made).items()):
        raise StateError(f"{node[CLASS]} copies what it is made of, so it cannot be filled", where=path, hint="have it in the state")
    return made


def created(
    node: Mapping[str, Any], fields: Mapping[str, tuple[Sequence[int], torch.dtype]], like: torch.Tensor, device: Any, path: str
) -> torch.Tensor:
    """A tensor as a description says, with memory for its inner tensors, of which global shapes and dtypes are given. It lies as ``like``
    does."""
    at = "meta" if is_dtensor(like) else device
    empty = {field: lazy.torch.empty(tuple(shape), dtype=dtype, device=at) for field, (shape, dtype) in fields.items()}
    full = rebuilt(node, empty, node["shape"], path)
    if not is_dtensor(like):
        return full
    if tuple(like.shape) != tuple(full.shape):
        raise _uncut(path, full, f"has another shape than its parameter, {tuple(like.shape)}")
    shape = tuple(like._local_tensor.shape)
    part: Any = full
    try:
        for dim, size in enumerate(shape):
            part = part if size == full.shape[dim] else part.narrow(dim, 0, size)
    except Exception as err:
        raise _uncut(path, full, f"cannot be sliced ({type(err).__name__}: {err})") from err
    inner = {f: lazy.torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for f, tensor in inner_tensors(part).items()}
    local = rebuilt(node, inner, shape, path)
    return _around(local, like)


def _around(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor that lies as another one of its shape."""
    return type(like).from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _loaded_class(name: str, path: str) -> Any:
    """The class of this name in a module that the program has imported. Nothing is imported because a checkpoint names it."""
    parts = name.split(".")
    for number in range(len(parts) - 1, 0, -1):
        kind: Any = sys.modules.get(".".join(parts[:number]))
        for attribute in parts[number:] if kind is not None else ():
            kind = getattr(kind, attribute, None)
        if isinstance(kind, type) and issubclass(kind, lazy.Tensor) and hasattr(kind, "__tensor_unflatten__"):
            return kind
    hint = "import the package that defines it, in the version that saved it, before the load"
    raise StateError(f"no module of this program has the tensor class {name}", where=path, hint=hint)


def _no_reference(kind: str, payload: Any) -> object:
    raise StateError(f"the context of a tensor subclass has a {kind}", hint="run `ckpt verify`")
