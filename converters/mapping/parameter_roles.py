"""What a tensor of a checkpoint is to the model: a parameter itself, or an optimizer's tensor of one. A translation is of parameters; here
it is applied to all that is named after them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ckpt.errors import UsageError
from ckpt.plan.views import LogicalTensor, whole

Shape = Sequence[int]
Shapes = Mapping[str, Shape]
Knows = Callable[[str], bool]
"""Whether a name is that of a parameter which the translation takes."""

_STATE = re.compile(r"([^.]+)\.state\.(.+)\.([^.]+)")
"""Optimizer, parameter and key in the name of an optimizer's tensor."""
_MODEL = "model."


class Role(NamedTuple):
    """What stands before and after a parameter's name."""

    head: str
    tail: str

    def of(self, parameter: str) -> str:
        return f"{self.head}{parameter}{self.tail}"

    @property
    def module(self) -> str:
        """What stands before the parameter's name in the model."""
        return self.head.rpartition(".state.")[2]


_ALONE = Role("", "")
"""Of parameters that are not in a module of a state, and of what is no parameter at all."""


def roles_of(names: Collection[str], knows: Knows) -> dict[str, tuple[Role, str]]:
    """Role and parameter of every name.

    Names may be those of parameters alone, as in the files of transformers, or of a training checkpoint: ``model.<parameter>`` and
    ``optimizer.state.model.<parameter>.<key>``, whatever module and optimizer are called there. ``torch.distributed.checkpoint`` has
    ``optimizer.state.<parameter>.<key>``; the role is the same.
    """
    apart = {name: name.partition(".") for name in names}
    heads = {f"{key}." for key, _, rest in apart.values() if knows(rest)}
    states = {name: parameter for name in names if (parameter := _state_of(name, names, heads, knows)) is not None}
    if not states and sum(map(knows, names)) >= sum(knows(rest) for _, _, rest in apart.values()):
        return {name: (_ALONE, name) for name in names}
    inside = {name: (Role(f"{key}.", ""), rest) for name, (key, _, rest) in apart.items() if f"{key}." in heads}
    return {name: states.get(name) or inside.get(name) or (_ALONE, name) for name in names}


def _state_of(name: str, names: Collection[str], heads: Collection[str], knows: Knows) -> tuple[Role, str] | None:
    """What an optimizer's tensor is; None for other names."""
    match = _STATE.fullmatch(name)
    if match is None or knows(name):
        return None
    optimizer, owner, key = match.groups()
    first, _, rest = owner.partition(".")
    inside = next((head for head in sorted(heads) if head + owner in names), _MODEL)
    if owner in names or (inside + owner not in names and knows(rest)):
        inside, owner = f"{first}.", rest
    elif inside + owner not in names and not knows(owner):
        return None
    return Role(f"{optimizer}.state.{inside}", f".{key}"), owner


def in_all_roles(translate: Callable[[Shapes, bool], dict[str, LogicalTensor]], knows: Knows, shapes: Shapes) -> dict[str, LogicalTensor]:
    """What ``translate(shapes of parameters, whether some may be missing)`` makes of a checkpoint's tensors, whatever their role.

    Where parameters are put together and each has a number of its own (a step), that of the first is taken.
    """
    by_role: dict[Role, dict[str, str]] = {}
    for name, (role, parameter) in roles_of(shapes, knows).items():
        by_role.setdefault(role, {})[parameter] = name
    parameters = _parameters(by_role, shapes)
    made: dict[str, LogicalTensor] = {}
    for role, members in by_role.items():
        own = {parameter: shapes[name] for parameter, name in members.items()}
        partly = role == _ALONE and len(by_role) > 1  # what is strange here is all that is said then
        views = _states(translate, own, parameters[role.module]) if role.tail else translate(own, partly)
        made.update({role.of(name): _renamed(view, members) for name, view in views.items()})
    return made


def _parameters(by_role: Mapping[Role, Mapping[str, str]], shapes: Shapes) -> dict[str, dict[str, Shape]]:
    """Shapes of the parameters of each module: of the weights, or of the largest state where these are not there."""
    weights: dict[str, dict[str, Shape]] = {}
    largest: dict[str, dict[str, Shape]] = {}
    for role, members in by_role.items():
        mine = (largest if role.tail else weights).setdefault(role.module, {})
        for parameter, name in members.items():
            mine[parameter] = max(mine.get(parameter, ()), shapes[name], key=len)
    return {module: {**mine, **weights.get(module, {})} for module, mine in largest.items()}


def _states(translate: Callable[[Shapes, bool], dict[str, LogicalTensor]], own: Shapes, parameters: Shapes) -> dict[str, LogicalTensor]:
    """The tensors of one key of an optimizer's state."""
    alike = {p: shape for p, shape in own.items() if tuple(shape) == tuple(parameters[p])}
    made = translate(alike, True)
    for name, view in translate({p: parameters[p] for p in own if p not in alike}, True).items():
        parameter = view.pieces[0].source
        numbers = all(not own[piece.source] for piece in view.pieces)
        if not numbers and not view.is_all_of(parameters[parameter]):
            shapes = f"{list(own[parameter])}, not that of the parameter, {list(parameters[parameter])}"
            message = f"the state of {parameter!r} has the shape {shapes}: nothing says what of it {name!r} has"
            raise UsageError(message, hint="leave such states out: --skip")
        made[name] = whole(parameter, own[parameter])
    return made


def _renamed(view: LogicalTensor, names: Mapping[str, str]) -> LogicalTensor:
    return LogicalTensor(shape=view.shape, pieces=tuple(piece._replace(source=names[piece.source]) for piece in view.pieces))
