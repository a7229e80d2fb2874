"""Finds under which names a checkpoint has the state of an optimizer's parameters, where these are not the state's own.

``ckpt`` names a parameter within the state, ``get_optimizer_state_dict`` of torch within its module:

    the state asks for    optimizer.state.model.layers.0.weight.exp_avg
    DCP has stored        optimizer.state.layers.0.weight.exp_avg

The module in front, here ``model``, is that of ``ckpt.plan.module_names``. The caller's own renames come first: with
``rename={"optim.*": "optimizer.*"}``, what is stored as ``optim.state.layers.0.weight.exp_avg`` is found as well. If names match once these
are renamed, or if nobody can know the module, nothing is mapped.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch.optim import Optimizer

from ckpt.adapters.optimizers import ParamNames, params_of, state_path
from ckpt.catalog import Catalog, job_tensors
from ckpt.plan.match import Selection
from ckpt.plan.module_names import enclosing_module

_USUAL = ("step", "exp_avg", "momentum_buffer")
"""Keys of the state of most optimizers."""


def optimizer_renames(
    optimizers: Sequence[tuple[str, Optimizer]], names: ParamNames, catalog: Catalog, selection: Selection
) -> tuple[tuple[str, str], ...]:
    """Rename rules for optimizers of a state, by path, whose parameters the checkpoint names within their module: from the names that the
    caller's own renames give."""
    stored: Set[str] = job_tensors(catalog).keys()
    if selection.rename and optimizers:
        stored = {selection.renamed(name) for name in stored}
    rules: list[tuple[str, str]] = []
    for path, optimizer in optimizers:
        prefix = state_path(path)
        wanted = {name for group in params_of(optimizer, names, path) for name, _ in group}
        keys = {*_USUAL, *(key for state in optimizer.state.values() for key in state)}
        first = next(iter(wanted), None)
        if first is None or any(f"{prefix}.{first}.{key}" in stored for key in keys):
            continue  # the usual case, without a look at every name
        owners = {name[len(prefix) + 1 :].rpartition(".")[0] for name in stored if name.startswith(f"{prefix}.")}
        module = enclosing_module(owners, wanted)
        # One path explains what it can: a rank of a pipeline wants a part, and a parameter without a gradient has no state.
        if module is not None and (not module.rivals or len(module.explained) == len(wanted)):
            rules.append((f"{prefix}.*", f"{prefix}.{module.path}.*"))
    return tuple(rules)
