"""A read-only look into a checkpoint, in one process, without torch.distributed. Nothing is read before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from ckpt import settings
from ckpt.catalog import Catalog, TensorEntry, job_tensors
from ckpt.errors import NamesError, NotFoundError, UsageError
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box

if TYPE_CHECKING:
    import torch

    from ckpt.engine.load.reader import TensorLoad


class StoredTensor:
    """A tensor of a checkpoint. Index it to read that part: ``t[0:128]``, ``t[:, 3]``, ``t[...]`` for all of it.

    ``torch.as_tensor(t)`` and ``numpy.asarray(t)`` read all of it too; NumPy knows no bfloat16.
    """

    def __init__(self, catalog: Catalog, entry: TensorEntry) -> None:
        self._catalog = catalog
        self._entry = entry

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape, without padding."""
        return self._entry.logical or self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        from ckpt.state.tensors import torch_dtype

        return torch_dtype(self._entry.dtype)

    def read(self) -> torch.Tensor:
        """The whole tensor, in host memory."""
        return self[...]

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read a part. Integers and slices (with steps) as for a torch tensor; only the chunks that they touch are read.

        Raises:
            CorruptError: the bytes are damaged.
            ConflictError: another save has replaced the checkpoint since it was opened: open it again.
            IndexError: the key is out of range, or has more entries than the tensor has dimensions.
            UsageError: it is neither integers nor slices with positive steps.
        """
        box, rest = _box_of(key, self.shape)
        return _read(self._catalog, self._entry, box)[rest]

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU, as DLPack numbers devices

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.read().numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, shape={list(self.shape)}, dtype={self._entry.dtype.name})"


class View(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint by name, and its other values. From :func:`ckpt.open`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getitem__(self, name: str) -> StoredTensor:
        entry = self._catalog.tensors.get(name)
        if entry is None:
            import difflib

            inside = [known for known in self._catalog.tensors if known.startswith(f"{name}#")]  # of a tensor that is made of others
            near = inside or difflib.get_close_matches(name, self._catalog.tensors, 3)
            raise NamesError(  # a KeyError, so that ``get`` and ``in`` work
                f"the checkpoint has no tensor {name!r}",
                where=self._catalog.url,
                hint=f"near it: {', '.join(near)}" if near else "`ckpt inspect` lists the names",
            )
        return StoredTensor(self._catalog, entry)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.tensors)

    def __len__(self) -> int:
        return len(self._catalog.tensors)

    @property
    def url(self) -> str:
        return self._catalog.url

    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors, by name."""
        for entry in self._catalog.tensors.values():
            yield StoredTensor(self._catalog, entry)

    def state(self) -> Any:
        """The saved state as nested Python values, with a :class:`StoredTensor` in place of each tensor.

        A module is a mapping from its tensors' names; an optimizer has ``state`` (parameter name → values) and ``param_groups``.
        """
        return _tidy(tree.decode(self._catalog.state, self._special))

    def per_rank(self, path: str, rank: int) -> Any:
        """The value that rank ``rank`` saved in the ``PerRank`` object at ``path`` (``"rng"``, ``"loader.position"``)."""
        nodes = self._catalog.ranks.get(rank, {})
        if path not in nodes:
            known = ", ".join(sorted(nodes)[:5]) or "none"
            raise NotFoundError(
                f"rank {rank} saved no PerRank value {path!r}",
                where=self._catalog.url,
                hint=f"PerRank values of this rank: {known}; ranks count from 0",
            )
        return tree.decode(nodes[path], self._special)

    def _special(self, kind: str, payload: Any) -> object:
        if kind == "$tensor":
            return self[payload]
        if kind == "$tensors":
            prefix = f"{payload}." if payload else ""
            return _Tensors({n[len(prefix) :]: self[n] for n in job_tensors(self._catalog) if n.startswith(prefix)})
        if kind == "$inline":
            from ckpt.state.torch_objects import decode_inline

            return decode_inline(payload)
        if kind == "$param_groups":
            return _ParamGroups({"params": g["params"]} | cast(dict[str, Any], tree.decode(g["options"], self._special)) for g in payload)
        return StoredPerRank(sorted(self._catalog.ranks))

    def __repr__(self) -> str:
        return f"View({self.url!r}, {len(self)} tensors)"


def with_tensors(value: Any, tensor: Callable[[StoredTensor], Any]) -> Any:
    """A value of :meth:`View.state` with what ``tensor`` gives for each stored one; dicts without what each rank saved for itself."""
    if isinstance(value, StoredTensor):
        return tensor(value)
    if isinstance(value, dict):
        return {k: with_tensors(v, tensor) for k, v in value.items() if not isinstance(v, StoredPerRank)}
    if type(value) in (list, tuple):
        return type(value)(with_tensors(v, tensor) for v in value)
    return value


def read_state(view: View, *, threads: int | None = None) -> Any:
    """The state as it was saved, with all tensors in host memory, read together."""
    from ckpt.engine.load.reader import Reader, TensorLoad
    from ckpt.formats.native.catalog import replacement_noticed
    from ckpt.state import lazy

    loads: list[TensorLoad] = []

    def memory_of(stored: StoredTensor) -> torch.Tensor:
        memory = lazy.torch.empty(stored.shape, dtype=stored.dtype)
        loads.append(TensorLoad.of_box(stored._entry, Box.whole(stored.shape), memory))
        return memory

    state = with_tensors(view.state(), memory_of)
    with replacement_noticed(view._catalog):
        Reader(view._catalog, threads=settings.threads(threads)).load(loads)
    return state


class StoredPerRank:
    """Stands in :meth:`View.state` for a ``PerRank`` object; its values come from :meth:`View.per_rank`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)

    def __repr__(self) -> str:
        return f"StoredPerRank(ranks={list(self.ranks)})"


class _Tensors(dict[str, StoredTensor]):
    """The tensors of a module, or of an optimizer's state, by name."""


class _ParamGroups(list[dict[str, Any]]):
    """The parameter groups of an optimizer."""


def _tidy(value: Any) -> Any:
    """Put a module's extra states beside its tensors, and an optimizer's state under its parameters' names."""
    if isinstance(value, _ParamGroups):
        return list(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_tidy, value))
    if not isinstance(value, dict) or isinstance(value, _Tensors):
        return value
    tensors = value.get("")
    if isinstance(tensors, _Tensors):
        extra = {k: _tidy(v) for k, v in value.items() if k != ""}
        return {n: t for n, t in tensors.items() if not any(n.startswith(f"{k}.") for k in extra)} | extra
    inner = value.get("state")
    groups = value.get("param_groups")
    if isinstance(groups, _ParamGroups) and isinstance(inner, dict) and isinstance(inner.get(""), _Tensors):
        states: dict[str, dict[str, Any]] = {k: dict(v) for k, v in inner.items() if isinstance(v, dict) and k != ""}
        params = {name for group in groups for name in group["params"]}
        for name, tensor in inner[""].items():
            param, _, key = name.rpartition(".")
            if param in params:  # not a tensor in a list or dict of the parameter's state: that is there already
                states.setdefault(param, {})[key] = tensor
        return value | {"state": states, "param_groups": list(groups)}
    return {k: _tidy(v) for k, v in value.items()}


def _box_of(key: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The smallest box that an index touches, and what to index that box with."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    if len(keys) > len(shape):
        raise IndexError(f"{len(keys)} indices for a tensor of {len(shape)} dimensions")
    offset: list[int] = []
    sizes: list[int] = []
    rest: list[Any] = []
    for k, size in zip([*keys, *[slice(None)] * (len(shape) - len(keys))], shape, strict=True):
        if isinstance(k, slice):
            start, stop, step = k.indices(size)
            if step < 1:
                raise UsageError("a slice needs a positive step")
            offset.append(start if stop > start else 0)
            sizes.append(max(stop - start, 0))
            rest.append(slice(None, None, step))
        elif type(k) is not bool and isinstance(k, Integral):
            number = int(k)
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of range for a dimension of {size}")
            offset.append(number % size)
            sizes.append(1)
            rest.append(0)
        else:
            raise UsageError(f"index a stored tensor with integers and slices, not {type(k).__name__}", hint="read it first: t[...]")
    return Box(tuple(offset), tuple(sizes)), tuple(rest)


def _read(catalog: Catalog, entry: TensorEntry, box: Box) -> torch.Tensor:
    from ckpt.engine.load.reader import Reader, TensorLoad
    from ckpt.formats.native.catalog import replacement_noticed
    from ckpt.state import lazy
    from ckpt.state.tensors import torch_dtype

    with replacement_noticed(catalog):
        catalog.extents(entry, entry.grid.overlapping(box))  # the bytes are there: before memory for them is asked for
        memory = lazy.torch.empty(box.shape, dtype=torch_dtype(entry.dtype))
        Reader(catalog, threads=settings.threads(None)).load([TensorLoad.of_box(entry, box, memory)])
    return memory
