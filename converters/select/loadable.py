"""What of another library's checkpoint a native one takes, under the names that ``ckpt.load`` asks for. No torch."""

# A native checkpoint names the states of an optimizer by the full names of its parameters, and its groups list these names. Other
# libraries name parameters within their module:
#
#     stored by torch.distributed.checkpoint          asked for by ckpt.load(url, {"model": model, "optim": optimizer})
#     model.layers.0.weight                           model.layers.0.weight
#     optim.state.layers.0.weight.exp_avg             optim.state.model.layers.0.weight.exp_avg
#     optim.param_groups[0].params: [layers.0.weight] groups with the full name
#
# So each parameter of an optimizer gets the name of the module beside it that has a tensor of every such name (ckpt.plan.module_names).
# Where several modules have (a model and its moving average) or none has (parameters by number), nothing is guessed: the optimizer stays as
# it is stored.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt import tree
from ckpt.catalog import Catalog
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.plan.module_names import enclosing_module
from ckpt.plan.views import LogicalTensor, whole
from ckpt.tree import MISSING, Missing, Node

from .pruned_state import below, is_optimizer, pruned
from .renamed_state import RenamedOptimizer, groups_by_name
from .selection import OutputSet, SelectOptions, choose, not_skipped


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
