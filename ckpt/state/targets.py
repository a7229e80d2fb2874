"""What a load will do on this rank, and the leaves of a state: each tensor or value is tied to what the checkpoint has for it.

Binding changes nothing: what it finds is in ``Binding``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt.catalog import Catalog, TensorEntry, job_tensors
from ckpt.errors import CorruptError, FormatError, MismatchError, StateError
from ckpt.needs import require_torch
from ckpt.plan import tree
from ckpt.plan.match import Selection, misfit
from ckpt.plan.tree import MISSING, OF_TORCH, Node
from ckpt.plan.values import CLASS, Nodes, made_of_others

from . import lazy
from .dtensor import is_dtensor, is_sharded_tensor, is_wrapper, states_boxes
from .shard_table import ShardTable, StateOf
from .sharded import Sharded
from .subclasses import TENSORS, difference, is_description, rebuilt
from .tensors import LocalShard, LocalTensor, raw_view, torch_dtype
from .torch_objects import decode_inline, is_frozen
from .walk import StatefulObject, like, values_in

if TYPE_CHECKING:
    import torch

# Targets of a load that share some of their elements without being tied: what is written later overwrites what came before.
#
#     memory      ┌──┬──┬──┬──┬──┬──┬──┬──┐
#     a = m[:5]   └──────────────┘              elements 3 and 4 belong to both
#     b = m[3:]            └──────────────┘
#
# Tied tensors, the same memory under two names, are one target (``ShardTable``). Views that lie between each other's rows share nothing.
#
# A state that was saved with such views has the same values for the elements that they share. So the later target is read beside its
# memory, and put there when the earlier ones are filled: if that changes one of them, the checkpoint has other values for it.

MOST_PAIRS = 100_000
"""Pairs of views that are compared, of one state: each takes some microseconds."""
_MOST_WORK = 100_000
"""Steps that numpy may take to find an element of two views; more are needed only by views that nobody makes."""


class _AddressRange(NamedTuple):
    start: int
    stop: int
    number: int
    """Of the target."""
    memory: torch.Tensor


def shared_elements(targets: Sequence[LocalTensor]) -> list[tuple[int, int]]:
    """Pairs of targets, by their numbers, that share an element. Reads nothing of the memory."""
    parts = [(number, memory) for number, target in enumerate(targets) for _, memory in target.parts]
    starts = np.array([0 if memory.is_meta else memory.data_ptr() for _, memory in parts], dtype=np.uint64)
    sizes = np.array([memory.nbytes if memory.is_contiguous() else _span(memory) for _, memory in parts], dtype=np.uint64)
    order = np.lexsort((sizes, starts))
    order = order[(starts[order] > 0) & (sizes[order] > 0)]
    stops = (starts + sizes)[order]
    if not len(order) or not (starts[order][1:] < np.maximum.accumulate(stops)[:-1]).any():
        return []  # as nearly always: then no object is made for any of them
    return _compared([_AddressRange(int(starts[i]), int(starts[i] + sizes[i]), *parts[i]) for i in order.tolist()])


def _span(memory: torch.Tensor) -> int:
    """Bytes from the first element of a view to its last one."""
    if not memory.numel():
        return 0
    return (sum((n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True)) + 1) * memory.element_size()


def _compared(extents: Sequence[_AddressRange]) -> list[tuple[int, int]]:
    """``shared_elements`` of extents by increasing start: each is compared with those before it that end after it begins."""
    pairs: dict[tuple[int, int], None] = {}
    earlier, compared = list[_AddressRange](), 0
    for extent in extents:
        earlier = [other for other in earlier if other.stop > extent.start]
        for other in earlier:
            compared += 1
            pair = min(other.number, extent.number), max(other.number, extent.number)
            if compared > MOST_PAIRS or other.number == extent.number or pair in pairs or other.memory.device != extent.memory.device:
                continue
            dense = other.memory.is_contiguous() and extent.memory.is_contiguous()
            if dense or _share(other.memory, extent.memory, unknown=False):
                pairs[pair] = None
        earlier.append(extent)
    return sorted(pairs)


def _share(one: torch.Tensor, other: torch.Tensor, *, unknown: bool) -> bool:
    """Whether two views have an element in common; ``unknown`` where that is too hard to tell."""
    try:
        return np.shares_memory(_addresses(one), _addresses(other), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # numpy gave up
        return unknown


def overlaps_itself(memory: torch.Tensor) -> bool:
    """Whether two elements of a view lie at one address: then no values can be loaded into it but some."""
    steps = sorted((stride, size) for size, stride in zip(memory.shape, memory.stride(), strict=True) if size > 1)
    span = 0  # of what the smaller strides reach: a stride beyond it cannot come back to it
    for stride, size in steps:
        if stride <= span:
            break
        span += stride * (size - 1)
    else:
        return False
    if memory.is_meta or not memory.numel():
        return False  # what it is given when it gets memory is dense
    # Two elements at one address differ first in some dimension: of the one that is ahead there, and the other moved to the start,
    # each lies in one of these two views.
    for dim, size in enumerate(memory.shape):
        at_start = memory[(0,) * dim]
        if size > 1 and _share(at_start[:1], at_start[1:], unknown=True):
            return True
    return False


class _Interface:
    """What numpy asks for the place of an array's elements."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _addresses(memory: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array that is only asked where its elements lie: it may be memory of a GPU."""
    size = memory.element_size()
    interface = {
        "version": 3,
        "data": (memory.data_ptr(), False),
        "shape": tuple(memory.shape),
        "strides": tuple(stride * size for stride in memory.stride()),
        "typestr": f"|V{size}",
    }
    return np.asarray(_Interface(interface))


Setter = Callable[[Any], None]


@dataclass(eq=False)
class Binding:
    """What a load will do on this rank, and everything that does not fit.

    ``targets``: name in the state → (memory, stored tensor). ``used``: stored names that go somewhere. ``values``: paths of JSON
    values that are taken.
    """

    targets: dict[str, tuple[LocalTensor, TensorEntry]] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    """Rules that were found beside the caller's own (``bind.optimizer_renames``)."""
    missing: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    """Lines about shapes and dtypes that differ; ``misfits`` has those about all else that does not fit."""
    misfits: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    values: list[str] = field(default_factory=list)
    objects: list[StatefulObject] = field(default_factory=list)
    """What takes its state as it likes: asked first, while all tensors of the state are as they were."""
    options: list[StatefulObject] = field(default_factory=list)
    """Of optimizers' groups: set before ``objects`` are asked, since a scheduler may set the learning rate when it takes its state."""
    trials: list[tuple[str, Node, Callable[[Any], object]]] = field(default_factory=list)
    """Extra states, by path, that their modules only ignore or refuse at first: a load tries them before anything changes."""
    create: list[Callable[[], None]] = field(default_factory=list)
    without_memory: list[tuple[LocalTensor, str | torch.device]] = field(default_factory=list)
    """What ``create`` gives memory to, and on which device."""
    apply: list[Callable[[], None]] = field(default_factory=list)


class Binder:
    """Binds single tensors and values; what walks the containers of a state, or an optimizer, calls it."""

    def __init__(self, catalog: Catalog, shard_table: ShardTable, selection: Selection, *, cast: bool) -> None:
        self.catalog = catalog
        self.shard_table = shard_table
        self.selection = selection
        self.cast = cast
        self.binding = Binding()
        self._used = self.binding.used.add
        self.entries = selection.view(job_tensors(catalog))
        self.nodes = Nodes(catalog.state, selection)
        self._absent: list[tuple[str, LocalTensor]] = []
        self._filled: dict[int, tuple[str, TensorEntry]] = {}  # id of a memory → the first name that it is filled under
        self._meta: list[tuple[LocalTensor, torch.Tensor]] = []

    def settle(self) -> None:
        """A tied name that the checkpoint lacks is not missing if the memory is filled under another name. What is missing gets no
        memory. Of targets that share elements the later ones are filled beside their memory."""
        # Targets that share elements with an earlier one are read beside it, and put into place when the earlier one is filled.
        names, later = list(self.binding.targets), dict[int, list[LocalTensor]]()
        for first, second in shared_elements([local for local, _ in self.binding.targets.values()]):
            later.setdefault(second, []).append(self.binding.targets[names[first]][0])
        for number in sorted(later, reverse=True):  # apply begins with the last that is inserted: each is put after the earlier ones
            self._put_later(names[number], later[number])
        if not self._absent and not self._meta:
            return
        filled = {id(local) for local, _ in self.binding.targets.values()}
        for name in (name for name, local in self._absent if id(local) not in filled):
            fields = self.fields_of(name)
            if not fields:
                self.binding.missing.append(name)
                continue
            self.binding.used.update(entry.name for entry in fields.values())
            self.binding.values.append(name)
            self.binding.misfits.append(f"{name}: a tensor made of {', '.join(fields)} in the checkpoint, a plain tensor in the state")
        wanted = [(local, tensor) for local, tensor in self._meta if id(local) in filled]
        self.binding.create += [partial(self.materialise, local, tensor) for local, tensor in wanted]
        self.binding.without_memory += [(local, real_device(tensor)) for local, tensor in wanted]

    def beside(self, name: str, local: LocalTensor, entry: TensorEntry) -> LocalTensor:
        """Memory of its own for a target, which is filled in its place."""
        beside = LocalTensor(local.info, [LocalShard(h.box, real_like(h.memory, h.memory.dtype)) for h in local.parts], name)
        self.binding.targets[name] = (beside, entry)
        return beside

    def _put_later(self, name: str, earlier: Sequence[LocalTensor]) -> None:
        local, entry = self.binding.targets[name]
        beside = self.beside(name, local, entry)

        def put() -> None:
            before = [(other, [part.memory.detach().clone() for part in other.parts]) for other in earlier]
            with lazy.torch.no_grad():
                for part, fresh in zip(local.parts, beside.parts, strict=True):
                    part.memory.copy_(fresh.memory)
            for other, values in before:
                for part, value in zip(other.parts, values, strict=True):
                    if not lazy.torch.equal(raw_view(part.memory.detach().contiguous()), raw_view(value.contiguous())):
                        raise MismatchError(
                            "the two share elements in the state, for which the checkpoint has different values",
                            where=f"tensor {name} and {other.state_name}",
                            hint="give each of them its own memory, or leave one out with only=",
                        )

        self.binding.apply.insert(0, put)

    def plain(self, node: Node, path: str, put: Setter) -> None:
        if node is MISSING:
            self.binding.missing.append(path)
            return
        self.binding.values.append(path)
        if tree.refers(node):
            stored = "a PerRank" if tree.tag_of(node) == "$per_rank" else "tensors"
            self.binding.misfits.append(f"{path}: {stored} in the checkpoint, a plain value in the state")
            return
        if not lazy.imported:
            check_torch(node, path)
        self.binding.apply.append(lambda: put(tree.decode(node, inline_only)))

    def tensor(self, state_name: str, tensor: torch.Tensor | Sharded) -> None:
        """A tensor of the state: filled in place; on the meta device it gets memory first."""
        if self.selection.only and not self.selection.wants(state_name):
            return
        if self.selection.trainable and is_frozen(tensor):  # first: a class that cannot be stored is no obstacle here
            self.left_alone(state_name, tensor)
            return
        local = self.shard_table.add(state_name, tensor)
        self.target(state_name, local)
        if isinstance(tensor, lazy.Tensor) and not is_sharded_tensor(tensor) and tensor.is_meta:
            self._meta.append((local, tensor))

    def wrapper(self, state_name: str, tensor: torch.Tensor, node: Node, param: StateOf | None = None) -> None:
        """A tensor of the state that is made of others: these are filled in place. ``node`` is what the checkpoint says of it."""
        if param is None and not self.selection.wants(state_name):
            return
        if param is None and self.selection.trainable and is_frozen(tensor):
            self.left_alone(state_name, tensor)
            return
        fields = self.fields_of(state_name)
        self.binding.used.update(entry.name for entry in fields.values())
        if node is MISSING and not fields and state_name not in self.entries:
            self.binding.missing.append(state_name)
            return
        self.binding.values.append(state_name)
        problem = difference(node, tensor, state_name)
        if problem is not None:
            if state_name in self.entries:
                self._used(self.entries[state_name].name)
                if self.catalog.record is None:
                    problem += "; other software pickles such tensors, which is not read: load it with that, and save it again"
            self.binding.misfits.append(f"{state_name}: {problem}")
            return
        if tensor.is_meta:
            hint = "move the module with to_empty(device=...) and make its tensors there before the load"
            raise StateError(f"a {type(tensor).__qualname__} on the meta device has no memory", where=f"tensor {state_name}", hint=hint)
        for field_name, local in self.shard_table.add_fields(state_name, tensor, param).items():
            self.target(f"{state_name}#{field_name}", local)

    def fields_of(self, state_name: str) -> Mapping[str, TensorEntry]:
        """The stored inner tensors of a tensor, by field."""
        return self._fields.get(state_name, {})

    @cached_property
    def _fields(self) -> dict[str, dict[str, TensorEntry]]:
        fields: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.entries.items():
            for at in (i for i, c in enumerate(name) if c == "#"):  # all, as a name of the user's may have some, too
                fields.setdefault(name[:at], {})[name[at + 1 :]] = entry
        return fields

    def left_alone(self, state_name: str, tensor: torch.Tensor | Sharded) -> None:
        """A tensor of the state that keeps its values, whether the checkpoint has some or not."""
        if type(tensor) not in lazy.PLAIN and is_wrapper(tensor):
            self.binding.used.update(entry.name for entry in self.fields_of(state_name).values())
            self.binding.values.append(state_name)
            return
        entry = self.entries.get(self.shard_table.stored_name(state_name, tensor))
        if entry is not None:
            self._used(entry.name)

    def target(self, state_name: str, local: LocalTensor) -> None:
        """Match a placed tensor with its stored one."""
        name = self.shard_table.names[state_name]
        entry = self.entries.get(name)
        if entry is None:
            self._absent.append((name, local))
            return
        self._used(entry.name)
        info = local.info
        if entry.dtype is not info.dtype or entry.shape != info.shape or entry.logical is not None:  # if not, nothing can be wrong
            problem = misfit(info, entry, cast=self.cast)
            if problem is not None:
                self.binding.shapes.append(f"{name}: {problem}")
                return
            if entry.dtype != info.dtype:
                self.binding.cast.append(name)
        if any(not memory.is_contiguous() and overlaps_itself(memory) for _, memory in local.parts):
            text = "its elements share memory (it is expanded, or strided over itself), so it cannot be loaded into"
            raise StateError(text, where=f"tensor {name}", hint="put tensor.clone() into the state")
        first, other = self._filled.setdefault(id(local), (name, entry))
        if other is entry:
            self.binding.targets[name] = (local, entry)
        elif (entry.alias or entry.name) != (other.alias or other.name):
            self.compare(name, local, entry, first, other)

    def compare(self, name: str, local: LocalTensor, entry: TensorEntry, first: str, other: TensorEntry) -> None:
        """Two names of one memory that are stored apart must be equal: by their digests, or the second is read beside the first."""
        same = self.same_bytes(local, entry, other)
        if same is not None:
            if not same:
                self.binding.misfits.append(f"{name}: the state ties it to {first}, the checkpoint has other values for it")
            return
        beside = self.beside(name, local, entry)

        def check() -> None:
            if not all(lazy.torch.equal(raw_view(a.memory), raw_view(b.memory)) for a, b in zip(local.parts, beside.parts, strict=True)):
                raise MismatchError(
                    "the state ties this tensor to another one, but the checkpoint has different values for the two",
                    where=f"tensor {name} and {first}",
                    hint="untie them in the model, or leave one out with only=",
                )

        self.binding.apply.insert(0, check)

    def same_bytes(self, local: LocalTensor, one: TensorEntry, other: TensorEntry) -> bool | None:
        """Whether two stored tensors are equal where this rank needs them, by the digests of their chunks; None if these cannot tell."""
        if one.grid.cuts is None or (one.grid.cuts, one.dtype) != (other.grid.cuts, other.dtype):
            return None
        chunks = sorted({int(n) for part in local.parts for n in one.grid.overlapping(part.box)})
        pairs = zip(self.catalog.extents(one, chunks), self.catalog.extents(other, chunks), strict=True)
        digests = [(a.digest, b.digest) for a, b in pairs]
        return None if any(None in pair for pair in digests) else all(a == b for a, b in digests)

    def materialise(self, local: LocalTensor, tensor: torch.Tensor) -> None:
        """Give memory to a meta tensor, in place: every reference to it sees the new memory."""
        if tensor.device.type != "meta":
            return  # tied: done under another name
        real = real_like(tensor, tensor.dtype)
        if isinstance(tensor, lazy.Parameter):
            real = lazy.Parameter(real, requires_grad=tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)  # swapped too
        if is_dtensor(real) and is_dtensor(tensor):  # boxes that the local tensor states
            real._local_tensor.__dict__.update(tensor._local_tensor.__dict__)
        try:
            lazy.torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        except RuntimeError as err:
            hint = "module.to_empty(device=...) before the load"
            raise StateError(f"a meta tensor cannot be given memory: {err}", where=f"tensor {local.state_name}", hint=hint) from err
        self.shard_table.refresh(local, tensor)

    def decoded(self, node: Node, path: str, put: Setter, template: object = None, device: str | torch.device = "cpu") -> None:
        """Rebuild a stored value, tensors included, and hand it over. ``template`` shows how its tensors are laid out now, ``device`` where
        those go that it lacks."""
        if node is MISSING:
            self.binding.missing.append(path)
            return
        foreign = {str(tree.tag_of(leaf)) for _, leaf in tree.leaves(node)} & _OWN_WALKS
        if foreign:
            self.binding.misfits.append(f"{path}: {_OF_KIND[min(foreign)]} in the checkpoint, an object with a state_dict in the state")
            return
        fresh: dict[str, torch.Tensor] = {}
        likes = {at: value for at, value in values_in(template, path) if isinstance(value, lazy.Tensor)}
        if any(made_of_others(node)):
            node = self.joined(node, path, likes, fresh, device)
        for where, leaf in tree.leaves(node):
            if isinstance(leaf, dict) and "$tensor" in leaf and leaf["$tensor"] not in fresh:
                self.fresh(leaf["$tensor"], likes.get(f"{path}.{where}"), fresh, device)
        if not lazy.imported:
            check_torch(node, path)
        self.binding.values.append(path)

        def special(kind: str, payload: Any) -> object:
            return fresh[payload] if kind == "$tensor" else inline_only(kind, payload)

        self.binding.apply.append(lambda: put(like(template, tree.decode(node, special))))

    def joined(
        self, node: Node, path: str, likes: Mapping[str, torch.Tensor], fresh: dict[str, torch.Tensor], device: str | torch.device
    ) -> Node:
        """The node with a reference in place of each tensor that is made of others, which is made now."""
        if is_description(node):
            if is_dtensor(now := likes.get(path)):
                hint = "put it into the state itself, beside the object"
                raise StateError(f"a DTensor over a {node[CLASS]} in an object's state_dict cannot be made", where=path, hint=hint)
            for leaf in node[TENSORS].values():
                self.fresh(leaf["$tensor"], None, fresh, device if now is None else now.device)
            inner = {field: fresh[leaf["$tensor"]] for field, leaf in node[TENSORS].items()}
            fresh[path] = rebuilt(node, inner, node["shape"], path)
            return {"$tensor": path}
        items, pairs = tree.items_of(node), tree.pairs_of(node)
        if items is not None:
            below = [self.joined(child, tree.child_path(path, i), likes, fresh, device) for i, child in enumerate(items)]
            return below if isinstance(node, list) else {"$tuple": below}
        if pairs is None:
            return node
        return tree.mapping_node([(k, self.joined(child, tree.child_path(path, k), likes, fresh, device)) for k, child in pairs])

    def fresh(self, stored: str, now: torch.Tensor | None, fresh: dict[str, torch.Tensor], device: str | torch.device) -> None:
        """New memory for a tensor inside a stateful object: as it is stored, or laid out as the one that is there ``now``."""
        name = self.selection.renamed(stored)
        entry = self.referred(stored)
        if now is not None and (is_dtensor(now) or self.shard_table.layout is not None):
            new = lazy.torch.empty_like(now)
        else:
            new = self.room_for(entry, device if now is None else real_device(now))
        fresh[stored] = new
        if name not in self.shard_table.tensors:
            self.target(name, self.shard_table.add(name, new))

    def referred(self, stored: str) -> TensorEntry:
        """The stored tensor that a value of the checkpoint refers to."""
        entry = self.catalog.tensors.get(stored)
        if entry is None:
            raise CorruptError(
                f"a value of the checkpoint refers to the tensor {stored!r}, which the index does not have",
                where=self.catalog.url,
                hint="run `ckpt verify` to see what else is damaged, and load another step",
            )
        return entry

    def room_for(self, entry: TensorEntry, device: str | torch.device = "cpu") -> torch.Tensor:
        """Memory for a whole stored tensor, once it is known that all its bytes are there: an index may claim any size."""
        if not lazy.imported:
            require_torch(f"the tensor {entry.name} of the checkpoint")
        self.catalog.extents(entry, range(len(entry.grid)))
        return lazy.torch.empty(entry.logical or entry.shape, dtype=torch_dtype(entry.dtype), device=device)


_OF_KIND = {"$tensors": "a module", "$param_groups": "an optimizer", "$per_rank": "a PerRank"}
_OWN_WALKS = frozenset(_OF_KIND)
"""Kinds of node that only the same kind of object in the state can take."""


def real_device(tensor: torch.Tensor) -> str | torch.device:
    """Where a tensor's memory is, or is to be if it has none yet."""
    if tensor.device.type != "meta":
        return tensor.device
    return tensor.device_mesh.device_type if is_dtensor(tensor) else "cpu"


def real_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Zeros where a tensor states its boxes: what lies between them is in no checkpoint, and an optimizer steps it all the same.
    make = lazy.torch.zeros_like if states_boxes(tensor) else lazy.torch.empty_like
    return make(tensor.detach(), dtype=dtype, device=real_device(tensor))


def check_torch(node: Node, path: str) -> None:
    """Refuse values that only torch can make, in a process that has none: before anything changes."""
    if tree.refers(node, OF_TORCH):
        require_torch(f"{path} of the checkpoint")


def inline_only(kind: str, payload: Any) -> object:
    if kind == "$inline":
        return decode_inline(payload)
    raise FormatError(
        f"the checkpoint has a {kind} node ({payload!r:.80}) where plain values were expected",
        hint="the state was written by newer or other software, or is damaged: run `ckpt verify`",
    )
