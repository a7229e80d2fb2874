"""What a tensor of a checkpoint is to the model: a parameter itself, or an optimizer's tensor of one. A translation is of parameters; here
it is applied to all that is named after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckpt.errors import NamesError
from ckpt.plan.views import Piece, View

MODEL = "model."
STATE = "optimizer.state.model."
Shapes = Mapping[str, Sequence[int]]


class Role(NamedTuple):
    """What stands before and after a parameter's name."""

    head: str
    tail: str

    def of(self, parameter: str) -> str:
        return f"{self.head}{parameter}{self.tail}"


def role_of(name: str) -> tuple[Role, str] | None:
    """A training checkpoint's name apart: ``model.<parameter>`` or ``optimizer.state.model.<parameter>.<key>``; None if it is neither."""
    if name.startswith(STATE):
        parameter, _, key = name[len(STATE) :].rpartition(".")
        return Role(STATE, f".{key}"), parameter
    if name.startswith(MODEL):
        return Role(MODEL, ""), name[len(MODEL) :]
    return None


def in_all_roles(translate: Callable[[Shapes, bool], dict[str, View]], shapes: Shapes) -> dict[str, View]:
    """What ``translate(shapes of parameters, whether some may be missing)`` makes of a checkpoint's tensors, whatever their role.

    Names may be those of parameters alone, as in the files of transformers, or of a training checkpoint. Where parameters are put together
    and each has a number of its own (a step), that of the first is taken.

    Raises:
        NamesError, UsageError: as ``translate``.
    """
    try:
        return translate(shapes, False)
    except NamesError:
        apart = {name: role_of(name) for name in shapes}
        if any(found is None for found in apart.values()):
            raise
    by_role: dict[Role, dict[str, Sequence[int]]] = {}
    for name, found in apart.items():
        assert found is not None
        by_role.setdefault(found[0], {})[found[1]] = shapes[name]
    parameters = by_role.get(Role(MODEL, ""), {})
    made: dict[str, View] = {}
    for role, members in by_role.items():
        if all(not shape for shape in members.values()) and any(parameters.get(p) for p in members):
            views = _numbers(translate({p: parameters[p] for p in members if p in parameters}, True))
        else:
            views = translate(members, bool(role.tail))
        made.update({role.of(name): _renamed(view, role) for name, view in views.items()})
    return made


def _numbers(views: Mapping[str, View]) -> dict[str, View]:
    """A number for each parameter: that of the first one that it is made of."""
    none: tuple[int, ...] = ()
    found = {}
    for name, view in views.items():
        piece = view.pieces[0]
        box = type(piece.box)(none, none)
        found[name] = View(shape=none, pieces=(Piece(box, piece.source, box, ()),))
    return found


def _renamed(view: View, role: Role) -> View:
    return View(shape=view.shape, pieces=tuple(piece._replace(source=role.of(piece.source)) for piece in view.pieces))
