"""Conversion into our own format (docs/format.md): a checkpoint like any other, with digests, small chunks, and the state. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ckpt import settings
from ckpt.catalog import Catalog, Contents, DataFile, Grid
from ckpt.converters.selected_state import RenamedOptimizer, below, groups_by_name, is_optimizer, pruned
from ckpt.converters.selection import OutputSet, OutputTensor, SelectOptions, choose, not_skipped, seams_of
from ckpt.converters.target import FileItem, OutputFile, OutputOptions, OutputPlan, Target, cuts_at
from ckpt.errors import ConflictError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.datafile import HEADER_LIMIT, ChunkSpec, DataFilePlan, plan_data_files
from ckpt.formats.native.paths import data_path
from ckpt.formats.native.writer import CheckpointJournal, committed_id, write_index
from ckpt.io_backends.checks import read_alike
from ckpt.io_backends.protocol import Backend
from ckpt.plan import tree
from ckpt.plan.layout.geometry import row_major_strides
from ckpt.plan.match import enclosing_module
from ckpt.plan.reads import group_sizes
from ckpt.plan.tree import MISSING, Missing, Node
from ckpt.plan.views import LogicalTensor, whole

# What of another library's checkpoint a native one takes, under the names that ``ckpt.load`` asks for.

# A native checkpoint names the states of an optimizer by the full names of its parameters, and its groups list these names. Other
# libraries name parameters within their module:
#
#     stored by torch.distributed.checkpoint          asked for by ckpt.load(url, {"model": model, "optim": optimizer})
#     model.layers.0.weight                           model.layers.0.weight
#     optim.state.layers.0.weight.exp_avg             optim.state.model.layers.0.weight.exp_avg
#     optim.param_groups[0].params: [layers.0.weight] groups with the full name
#
# So each parameter of an optimizer gets the name of the module beside it that has a tensor of every such name (ckpt.plan.match).
# Where several modules have (a model and its moving average) or none has (parameters by number), nothing is guessed: the optimizer stays as
# it is stored.


def choose_loadable(catalog: Catalog, choice: SelectOptions) -> OutputSet:
    """What ``choose`` takes, with the names of optimizer states as ``ckpt.save`` gives them. A checkpoint of ours stays as it is, and so do
    names that a translation gives. Errors as for ``choose``."""
    if choice.views is not None or not choice.optimizer or isinstance(catalog, NativeCatalog):
        return choose(catalog, choice)
    modules = {path: module for path, node in _optimizers(catalog.state, "") if (module := _module(catalog, path, node)) is not None}
    if not modules:
        return choose(catalog, choice)
    names = sorted(catalog.tensors)
    renamed = {
        name: f"{path}.state.{module}{name.removeprefix(f'{path}.state.')}"
        for path, module in modules.items()
        for name in below(names, f"{path}.state")
    }

    def views(shapes: Mapping[str, Sequence[int]]) -> dict[str, LogicalTensor]:
        return {renamed.get(name, name): whole(name, shape) for name, shape in shapes.items()}

    chosen = choose(catalog, replace(choice, views=views))
    entries = not_skipped(catalog, choice.skip)
    taken = {name: wanted.view for name, wanted in chosen.tensors.items()}
    optimizers = {path: RenamedOptimizer(catalog, entries, taken, path, modules=[module]) for path, module in modules.items()}
    state = pruned(_rewritten(catalog.state, "", optimizers), sorted(taken), optimizers=True)
    left_out = tuple(path for one in optimizers.values() for path in one.left_out)
    return replace(chosen, state=state, left_out=left_out, united=frozenset(name for one in optimizers.values() for name in one.united))


def _optimizers(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """The optimizers of a state, by path."""
    if path and is_optimizer(node):
        yield path, node
        return
    for key, child in tree.pairs_of(node) or ():
        if isinstance(key, str):
            yield from _optimizers(child, tree.child_path(path, key))


def _module(catalog: Catalog, path: str, node: Node) -> str | None:
    """What the names of all parameters of an optimizer have to be preceded by; None if that is not known, or nothing has to change."""
    parts = dict(tree.pairs_of(node) or ())
    groups = groups_by_name(parts.get("param_groups", []))
    if not groups:
        return None
    stored = {name for name, _ in tree.pairs_of(parts["state"]) or () if isinstance(name, str) and name}
    parameters = {*stored, *(name for group in groups for name in group.names)}
    if parameters <= catalog.tensors.keys():
        return None if tree.tag_of(parts["param_groups"]) == "$param_groups" else ""
    beside = path.rpartition(".")[0]
    start = f"{beside}." if beside else ""
    outer = {name for name in catalog.tensors if name.startswith(start) and not name.startswith(f"{path}.")}
    module = enclosing_module(parameters, outer)
    return f"{module.path}." if module is not None and module.explained == parameters else None


def _rewritten(node: Node, path: str, optimizers: Mapping[str, RenamedOptimizer]) -> Node | Missing:
    """The node with what optimizers say of parameters under their full names."""
    if path in optimizers:
        return optimizers[path].node(node)
    pairs = tree.pairs_of(node)
    if pairs is None or tree.tag_of(node) not in (None, "$map"):
        return node
    rewritten = [
        (key, _rewritten(child, tree.child_path(path, key), optimizers) if isinstance(key, str) else child) for key, child in pairs
    ]
    return tree.mapping_node([(key, child) for key, child in rewritten if child is not MISSING])


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """Data files and index."""
    grids = {wanted.name: _grid(wanted, chosen.catalog) for wanted in chosen.stored}
    specs = [
        ChunkSpec(name=w.name, box=grids[w.name].box(i), shape=w.shape, dtype=w.dtype)
        for w in chosen.stored
        for i in range(len(grids[w.name]))
    ]
    plans: list[DataFilePlan] = []
    places: dict[str, list[int]] = {}
    files: list[OutputFile] = []
    for group in group_sizes([s.nbytes for s in specs], layout.shard_size or settings.DATA_FILE):
        members = [specs[i] for i in group]
        for made in plan_data_files(members, id=layout.id, rank=0, limit=HEADER_LIMIT):
            made = replace(made, path=data_path(layout.id, 0, len(plans)))
            mine = members[made.first : made.first + len(made)]
            for spec in mine:
                places.setdefault(spec.name, []).append(len(plans))
            plans.append(made)
            files.append(_file(made, mine))

    def finish(backend: Backend) -> None:
        placed = {name: Grid(cuts=grid.cuts, files=np.array(places[name], dtype=np.int32)) for name, grid in grids.items()}
        _commit(backend, chosen, plans, placed, layout)

    return OutputPlan(files=tuple(files), digest="xxh3", finish=finish)


def _grid(wanted: OutputTensor, catalog: Catalog) -> Grid:
    """How a tensor is cut into chunks: where it was cut already, as far as that is."""
    cuts: list[tuple[int, ...]] = [(0, n) for n in wanted.shape]
    if wanted.nbytes:  # along the first axes, as many cuts as it takes for rows to fit into a chunk
        seams = seams_of(catalog, wanted.view)
        for axis, (n, step) in enumerate(zip(wanted.shape, row_major_strides(wanted.shape), strict=True)):
            count = max(1, settings.CHUNK // max(1, step * wanted.dtype.itemsize))
            cuts[axis] = cuts_at(0, n, count, () if axis else seams)
    return Grid(cuts=tuple(cuts), files=np.zeros(1, dtype=np.int32))


def _file(made: DataFilePlan, specs: Sequence[ChunkSpec]) -> OutputFile:
    order = np.argsort(made.offsets, kind="stable").tolist()
    items = tuple(FileItem(specs[i].name, specs[i].box, int(made.offsets[i]), specs[i].dtype.itemsize) for i in order)

    def ends(digests: Sequence[int]) -> list[tuple[int, bytes]]:
        by_chunk = [0] * len(digests)
        for i, digest in zip(order, digests, strict=True):
            by_chunk[i] = digest
        return [(0, made.encode_header(by_chunk))]

    return OutputFile(path=made.path, size=made.size, items=items, ends=ends)


def _commit(backend: Backend, chosen: OutputSet, plans: Sequence[DataFilePlan], grids: Mapping[str, Grid], layout: OutputOptions) -> None:
    headers = (read_alike(backend, made.path, partial(backend.read, made.path, 0, made.header)) for made in plans)
    rows: list[DataFile] = [made.row(header) for made, header in zip(plans, headers, strict=True)]
    tensors = tuple(w.entry(grids[w.alias or name]) for name, w in chosen.tensors.items())
    contents = Contents(tensors=tensors, files=tuple(rows), state=chosen.state, ranks=chosen.ranks)
    if committed_id(backend) == layout.id:
        return  # by a process that died before it had told
    journal = CheckpointJournal(backend, id=layout.id, previous=layout.previous, resumable=True)
    try:
        record = chosen.catalog.record
        write_index(journal, contents, world_size=chosen.catalog.world_size, lost=() if record is None else record.lost)
    except ConflictError:
        if committed_id(backend) != layout.id:  # else another process has just finished it
            raise
    journal.remove_replaced()


TARGET = Target(name="native", computes=True, choose=choose_loadable, plan=plan, replaces=True)
"""For ``ckpt.converters.target``."""
