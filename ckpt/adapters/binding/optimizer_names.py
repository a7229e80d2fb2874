"""Finds under which names a checkpoint has the state of an optimizer's parameters, where these are not the state's own.

``ckpt`` names a parameter within the state, ``get_optimizer_state_dict`` of torch within its module:

    the state asks for    optimizer.state.model.layers.0.weight.exp_avg
    DCP has stored        optimizer.state.layers.0.weight.exp_avg

The path that is in front in the state and not in the checkpoint, here ``model``, is found by trying: it has to be in front of the name of
a parameter that is asked for, and without it that name must be stored. If the names match as they are, if several paths would do and none
of them explains all names, or if the caller's own renames say where the names go, nothing is mapped. A mapping becomes a rename rule like
any other, behind the caller's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.optim import Optimizer

from ckpt.adapters.optimizers import ParamNames, params_of, state_path
from ckpt.catalog import Catalog, job_tensors
from ckpt.plan.match import Selection, fits

_USUAL = ("step", "exp_avg", "momentum_buffer")
"""Keys of the state of most optimizers."""


def optimizer_renames(
    optimizers: Sequence[tuple[str, Optimizer]], names: ParamNames, catalog: Catalog, selection: Selection
) -> tuple[tuple[str, str], ...]:
    """Rename rules for optimizers of a state, by path, whose parameters the checkpoint names within their module.

    Raises:
        StateError: a parameter has no name.
    """
    stored = job_tensors(catalog)
    rules: list[tuple[str, str]] = []
    for path, optimizer in optimizers:
        prefix = state_path(path)
        wanted = {name for group in params_of(optimizer, names, path) for name, _ in group}
        keys = {*_USUAL, *(key for state in optimizer.state.values() for key in state)}
        first = next(iter(wanted), None)
        if first is None or any(f"{prefix}.{first}.{key}" in stored for key in keys):
            continue  # the usual case, without a look at every name
        below = [name for name in stored if name.startswith(f"{prefix}.")]
        if any(fits(old, name) for old, _ in selection.rename for name in below):
            continue
        owners = {name[len(prefix) + 1 :].rpartition(".")[0] for name in below}
        module = _module(wanted, owners)
        if module is not None:
            rules.append((f"{prefix}.*", f"{prefix}.{module}.*"))
    return tuple(rules)


def _module(wanted: Collection[str], owners: Collection[str]) -> str | None:
    """The path that, put in front of stored names, gives names that are wanted; None if there is none, or more than one.

    ``1.0.weight`` may be ``0.weight`` of module 1 as well. So where several paths would do, the one counts that explains all that any other
    one explains, and more, and every name that is wanted: else moments of one parameter could go to another.
    """
    if not owners or any(name in owners for name in wanted):
        return None
    explained: dict[str, set[str]] = {}
    for name in wanted:
        for i, character in enumerate(name):
            if character == "." and name[i + 1 :] in owners:
                explained.setdefault(name[:i], set()).add(name[i + 1 :])
    best = max(explained, key=lambda path: len(explained[path]), default=None)
    if best is None or any(path != best and not explained[path] < explained[best] for path in explained):
        return None
    return best if len(explained) == 1 or len(explained[best]) == len(wanted) else None
