"""What of a checkpoint is converted: its tensors, under which names, in which dtype, and the values beside them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.catalog import Catalog, Grid, TensorEntry
from ckpt.dtypes import DTYPES, DType
from ckpt.errors import NamesError, UsageError
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.plan.match import several
from ckpt.plan.values import CLASS, made_of_others
from ckpt.plan.views import LogicalTensor, ViewPiece, part, whole

from .selected_state import below, is_optimizer, optimizer_tensors, option_tensors, pruned, pruned_values, references, renamed_state

if TYPE_CHECKING:
    import torch


# Tensors that are computed from stored ones, box by box, while a conversion writes them: averages, sums with products.
#
# Invariant: ``repr`` of a ``Computed`` says all that the elements depend on besides the stored ones. The journal compares it.

FLOATING = ("float16", "bfloat16", "float32", "float64")
"""Names of the dtypes that arithmetic takes: others are bits, or need a scale that lies elsewhere."""


class Formula(Protocol):
    """How a box of a tensor is computed. Frozen, with a ``repr`` that says all parameters."""

    def boxes(self, box: Box) -> Sequence[Box]:
        """The box of each operand that ``box`` of the result is computed from."""

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fill ``out``, of the shape of ``box`` of the tensor ``name``. Operands have the shapes of their boxes; all are contiguous.

        Raises:
            MismatchError: the operands have values that the formula does not take.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """``view`` of stored tensors of catalog number ``source`` of an ``OutputSet``, read as ``dtype``."""

    source: int
    view: LogicalTensor
    dtype: DType


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The elements of an output tensor: ``formula`` of ``operands``."""

    formula: Formula
    operands: tuple[Operand, ...]


def operand(catalog: Catalog, source: int, view: LogicalTensor) -> Operand:
    """A view as an operand: in the dtype that its parts are stored in; in the widest of them, if these are several floating ones."""
    kinds = {catalog.tensors[piece.source].dtype for piece in view.pieces}
    dtype = max(kinds, key=lambda kind: (kind.itemsize, kind.name), default=DTYPES["float32"])
    if len(kinds) > 1 and dtype.itemsize < DTYPES["float32"].itemsize:
        dtype = DTYPES["float32"]
    return Operand(source=source, view=view, dtype=dtype)


def is_floating(catalog: Catalog, view: LogicalTensor) -> bool:
    """Whether arithmetic takes all that a view is made of."""
    return bool(view.pieces) and all(catalog.tensors[piece.source].dtype.name in FLOATING for piece in view.pieces)


Views = Callable[[Mapping[str, Sequence[int]]], Mapping[str, LogicalTensor]]
"""From the shapes of stored tensors to what shall be made of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputTensor:
    """One tensor that is to be written: ``view`` says of what it is made, ``dtype`` as what it is written.

    ``logical``, ``alias`` and ``rank`` are as in ``catalog.TensorEntry``; the alias is of another wanted tensor. With ``computed`` the
    elements come from there, and ``view`` only says how the tensor is cut.
    """

    name: str
    view: LogicalTensor
    dtype: DType
    logical: tuple[int, ...] | None = None
    alias: str | None = None
    rank: int | None = None
    computed: Computed | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def entry(self, grid: Grid) -> TensorEntry:
        """The row of an index."""
        logical = self.logical or self.view.unpadded
        return TensorEntry(name=self.name, dtype=self.dtype, shape=self.shape, grid=grid, logical=logical, alias=self.alias, rank=self.rank)

    def without_padding(self) -> OutputTensor:
        """The part of it that is not padding."""
        if self.logical is None:
            return self
        return replace(self, view=part(self.view, Box.whole(self.logical)), logical=None)


@dataclass(frozen=True, kw_only=True)
class OutputSet:
    """What a conversion takes of ``catalog``: tensors by name, the node of the state, and the values of ranks."""

    catalog: Catalog
    tensors: Mapping[str, OutputTensor]
    state: Any
    ranks: Mapping[int, Mapping[str, Any]]
    left_out: tuple[str, ...] = ()
    """Paths of values that a translation could not take along."""
    united: frozenset[str] = frozenset()
    """Stored tensors that are not taken, but their numbers are there."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What else files depend on: a configuration that lies beside the tensors, as JSON has it."""
    others: tuple[Catalog, ...] = ()
    """Further sources of what is computed: catalogs 1, 2, … of its operands; number 0 is ``catalog``."""

    @property
    def catalogs(self) -> tuple[Catalog, ...]:
        """All sources, by the numbers that operands have for them."""
        return (self.catalog, *self.others)

    @property
    def computes(self) -> bool:
        """Whether some tensor is more than bytes of the source."""
        return any(wanted.computed is not None for wanted in self.tensors.values())

    @property
    def stored(self) -> list[OutputTensor]:
        """The tensors that have bytes of their own, by name."""
        return [self.tensors[name] for name in sorted(self.tensors) if self.tensors[name].alias is None]

    def taken(self, number: int = 0) -> set[str]:
        """Stored tensors of source ``number``, ``catalog`` itself by default, that something is made of."""
        views = [wanted.view for wanted in self.tensors.values() if not number]
        computed = [wanted.computed for wanted in self.tensors.values() if wanted.computed is not None]
        views += [operand.view for one in computed for operand in one.operands if operand.source == number]
        return {piece.source for view in views for piece in view.pieces}


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectOptions:
    """``only`` and ``exclude`` are globs of the new names, ``skip`` of the stored ones; without ``optimizer`` its tensors and options are
    left out; ``dtype`` is that of floating-point tensors that are no optimizer's, or None: as they are. ``root``: see
    ``choose_weights``."""

    views: Views | None = None
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    optimizer: bool = True
    dtype: str | None = None
    root: str | None = None
    skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        for globs in ("only", "exclude", "skip"):  # a caller may give a single one
            object.__setattr__(self, globs, several(getattr(self, globs)))


def choose(catalog: Catalog, choice: SelectOptions) -> OutputSet:
    """All that a conversion into a training checkpoint takes."""
    of_optimizers = optimizer_tensors(catalog)
    entries = {n: e for n, e in not_skipped(catalog, choice.skip).items() if choice.optimizer or n not in of_optimizers}
    return _chosen(catalog, entries, choice, of_optimizers, "")


def choose_weights(catalog: Catalog, choice: SelectOptions) -> OutputSet:
    """The tensors of one model alone, under the names that they have in the model: without the key that it has in the state.

    ``choice.root`` is that key; by default the only one with tensors, optimizers and values of single ranks left out.
    """
    of_optimizers = optimizer_tensors(catalog)
    names = [n for n, e in not_skipped(catalog, choice.skip).items() if e.rank is None and n not in of_optimizers]
    root = _root(catalog, names) if choice.root is None else choice.root
    head = f"{root}." if root else ""
    entries = {n: catalog.tensors[n] for n in names if n.startswith(head)}
    if not entries:
        raise UsageError(f"no tensor of a model lies below {root!r}", where=catalog.url, hint="`ckpt inspect` lists the names")
    chosen = _chosen(catalog, entries, choice, of_optimizers, head)
    if any("#" in name for name in chosen.tensors):
        stored = {p.source for wanted in chosen.tensors.values() for p in wanted.view.pieces}
        for path, node in made_of_others(catalog.state):
            if any(name.startswith(f"{path}#") for name in stored):
                text = f"{path} is a {node[CLASS]}, whose inner tensors nobody loads by the names that they have here"
                hint = "export the model of a job with ckpt.export(url, model, dequantize=True), or leave it out with --exclude"
                raise UsageError(text, where=catalog.url, hint=hint)
    return chosen


def not_skipped(catalog: Catalog, skip: Sequence[str]) -> Mapping[str, TensorEntry]:
    """The stored tensors that fit no glob of ``skip``."""
    if not skip:
        return catalog.tensors
    check_globs(skip, catalog.tensors, catalog.url)
    return {n: e for n, e in catalog.tensors.items() if not _fits(n, skip)}


def wanted_views(
    catalog: Catalog, entries: Mapping[str, TensorEntry], views: Views | None, only: Sequence[str], also: Iterable[str] = ()
) -> dict[str, LogicalTensor]:
    """The tensors that are to be made of ``entries``, those that fit a glob of ``only``. Tensors of single ranks stay as they are. A glob
    may fit a path among ``also`` instead."""
    options = option_tensors(catalog) if views is not None else set[str]()
    shapes = {name: t.shape for name, t in entries.items() if views is not None and t.rank is None and name not in options}
    made = {name: whole(name, t.shape) for name, t in entries.items() if name not in shapes and name not in options}
    made |= views(shapes) if views is not None else {}
    if not only:
        return made
    check_globs(only, [*made, *also], catalog.url)
    return {name: view for name, view in made.items() if _fits(name, only)}


def check_globs(globs: Sequence[str], names: Iterable[str], url: str) -> None:
    """Raise NamesError if one of the globs fits no name."""
    listed = list(names)
    idle = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in listed)]
    if idle:
        raise NamesError(f"no tensor matches {', '.join(map(repr, idle))}", where=url, hint="`ckpt inspect` lists the names")


def _fits(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _chosen(
    catalog: Catalog, entries: Mapping[str, TensorEntry], choice: SelectOptions, of_optimizers: frozenset[str], head: str
) -> OutputSet:
    """``head`` is what the names of all entries begin with, and the new names do not."""
    here = {n[len(head) :]: e for n, e in entries.items()}
    selected = wanted_views(catalog, here, choice.views, choice.only)
    if choice.exclude:
        check_globs(choice.exclude, selected, catalog.url)
        selected = {n: view for n, view in selected.items() if not _fits(n, choice.exclude)}
    if head:
        for n, view in selected.items():
            pieces = tuple(ViewPiece(p.box, head + p.source, p.part, p.axes) for p in view.pieces)
            selected[n] = LogicalTensor(shape=view.shape, pieces=pieces)
    wide = None if choice.dtype is None else DTYPES.get(_SHORT.get(choice.dtype, choice.dtype))
    if choice.dtype is not None and (wide is None or wide.name not in FLOATING):
        raise UsageError(f"cannot convert to dtype {choice.dtype!r}", hint="float16, bfloat16, float32 or float64")
    tensors = {name: _wanted(catalog, name, view, head, wide, of_optimizers) for name, view in selected.items()}
    tensors |= {name: _settled(catalog, w, w.alias, tensors) for name, w in tensors.items() if w.alias is not None}
    kept = sorted(tensors)
    if head:
        return OutputSet(catalog=catalog, tensors=tensors, state={name: {"$tensor": name} for name in kept}, ranks={})
    ranks = {r: pruned_values(values, kept) for r, values in catalog.ranks.items()}
    if choice.views is None:
        return OutputSet(catalog=catalog, tensors=tensors, state=pruned(catalog.state, kept, optimizers=choice.optimizer), ranks=ranks)
    renamed = renamed_state(catalog, here, selected, pruned(catalog.state, kept, optimizers=False), optimizers=choice.optimizer)
    return OutputSet(catalog=catalog, tensors=tensors, state=renamed.state, ranks=ranks, left_out=renamed.left_out, united=renamed.united)


def seams_of(catalog: Catalog, view: LogicalTensor) -> list[int]:
    """Places along the first axis of a view where stored chunks end: reading up to there reads no chunk twice."""
    if not view.shape:
        return []
    seams: set[int] = set()
    for piece in view.pieces:
        seams.add(piece.box.offset[0])
        axis = piece.axes[0]
        # Boundaries of stored chunks, moved into the coordinates of the view: from the piece's part of the stored
        # tensor to the place of its box.
        cuts = catalog.tensors[piece.source].grid.cuts
        if axis is not None and cuts is not None:
            start, stop = piece.part.offset[axis], piece.part.end[axis]
            seams.update(cut - start + piece.box.offset[0] for cut in cuts[axis] if start < cut < stop)
    return sorted(seams)


def _wanted(catalog: Catalog, name: str, view: LogicalTensor, head: str, wide: DType | None, of_optimizers: frozenset[str]) -> OutputTensor:
    sources = [catalog.tensors[s] for s in dict.fromkeys(p.source for p in view.pieces)]
    kinds = {e.dtype.name: e.dtype for e in sources}
    castable = wide is not None and {*kinds} <= {*FLOATING} and not any(e.name in of_optimizers for e in sources)
    # The dtype of a tensor that is made of several: the requested one if all parts may be cast, else the one that all
    # parts have. A mixture without a request is an error, since either choice would lose something silently.
    if wide is not None and castable:
        dtype = wide
    elif len(kinds) == 1:
        dtype = sources[0].dtype
    elif not kinds and wide is not None:
        dtype = wide
    else:
        message = f"{name!r} would be made of tensors of the dtypes {', '.join(sorted(kinds)) or 'of none'}"
        raise UsageError(message, where=catalog.url, hint="give one: --dtype")
    if len(sources) != 1 or not view.is_all_of(sources[0].shape):
        return OutputTensor(name=name, view=view, dtype=dtype)
    entry = sources[0]
    if entry.name != head + name:
        return OutputTensor(name=name, view=view, dtype=dtype, logical=entry.logical)
    alias = None if entry.alias is None else entry.alias[len(head) :]
    return OutputTensor(name=name, view=view, dtype=dtype, logical=entry.logical, alias=alias, rank=entry.rank)


def _settled(catalog: Catalog, wanted: OutputTensor, alias: str, tensors: Mapping[str, OutputTensor]) -> OutputTensor:
    """An alias of a tensor that is not converted, or not under its name, stands for itself."""
    target, stored = tensors.get(alias), wanted.view.pieces[0].source.removesuffix(wanted.name) + alias
    same = target is not None and target.alias is None and target.dtype == wanted.dtype and stays(target.view, stored, catalog)
    return wanted if same else replace(wanted, alias=None)


def stays(view: LogicalTensor, name: str, catalog: Catalog) -> bool:
    """Whether a tensor is the stored one of this name, as it is."""
    return name in catalog.tensors and view.is_all_of(catalog.tensors[name].shape) and view.pieces[0].source == name


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _root(catalog: Catalog, names: Sequence[str]) -> str:
    """The key of the state that has the model's tensors; empty if these are at the top."""
    node = catalog.state
    pairs = [] if tree.tag_of(node) is not None else tree.pairs_of(node) or []
    if any(tree.tag_of(child) == "$tensor" for _, child in pairs):
        return ""
    wanted = sorted(names)
    roots = [
        key
        for key, child in pairs
        if not is_optimizer(child) and any(bool(below(wanted, n)) if many else n in catalog.tensors for n, many in references(child))
    ]
    if len(roots) > 1 or (roots and not isinstance(roots[0], str)):
        raise UsageError(
            f"several parts of the state have tensors: {', '.join(map(str, roots))}", where=catalog.url, hint="name the model's: --root"
        )
    return str(roots[0]) if roots else ""
