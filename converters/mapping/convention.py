"""A checkpoint's tensors in another naming convention: which way a translation goes, and what numbers the checkpoint itself tells."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ckpt import settings
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.plan.views import LogicalTensor, whole
from ckpt.text import parse_json, url_text

from .terms import Dimensions
from .translation import NUMBERS, Direction, changed, load_translation, of_arguments, of_config

# What a tensor of a checkpoint is to the model: a parameter itself, or an optimizer's tensor of one. A translation is of parameters; here
# it is applied to all that is named after them.

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


Views = Callable[[Mapping[str, Sequence[int]]], dict[str, LogicalTensor]]
CONFIG = "config.json"
ARGUMENTS = "args"
"""Where the state of a Megatron checkpoint has the arguments of the job."""
MEGATRON = {"num_layers", "num_attention_heads", "padded_vocab_size"}
"""Some of them: others keep arguments, too."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A model's tensors in the names of another convention, where fused tensors come apart and others are put together.

    Args:
        names: a translation that comes with ckpt, such as ``"llama"``, or the path of a ``.toml`` file (docs/formats.md).
        convention: the naming convention that is wanted, such as ``"huggingface"``.
        numbers: of the model, where files or a configuration do not tell them: ``{"query_groups": 8}``.

    Raises:
        UsageError: an argument has another type.
    """

    names: str | os.PathLike[str]
    convention: str
    numbers: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", url_text(self.names))
        for name in ("names", "convention"):
            if not isinstance(value := getattr(self, name), str):
                raise UsageError(f"{name}= is text, not {value!r}", hint='Translation(names="llama", convention="huggingface")')
        if not isinstance(self.numbers, Mapping) or not all(isinstance(name, str) for name in self.numbers):
            raise UsageError(f"numbers= are numbers by name, not {self.numbers!r}", hint='numbers={"num_layers": 32}')
        for name, value in self.numbers.items():
            settings.check_whole(value, f"numbers[{name!r}]", 0)
        object.__setattr__(self, "numbers", dict(self.numbers))

    def views(self, stored_numbers: Mapping[str, int] | None = None) -> Views:
        """From the shapes of a model's tensors to the same in the convention. ``stored_numbers``: those that files have; ``numbers`` go
        before them.

        Raises:
            UsageError: there is no such translation, or not to this convention; or it asks for no such number.
        """
        rules = load_translation(str(self.names))
        if self.convention not in (rules.left, rules.right):
            message = f"this translation is between {rules.left!r} and {rules.right!r}, not to {self.convention!r}"
            raise UsageError(message, hint=f"the convention that you want: {rules.left} or {rules.right}")
        direction: Direction = "rightwards" if self.convention == rules.right else "leftwards"
        asked = [*NUMBERS, *sorted(rules.asks() - set(NUMBERS))]
        strange = sorted(self.numbers.keys() - set(asked))
        if strange:
            raise UsageError(f"no translation asks for a number {strange[0]!r}", hint=f"one of {', '.join(asked)}")
        known = changed(stored_numbers or {}, self.numbers)

        def views(shapes: Mapping[str, Sequence[int]]) -> dict[str, LogicalTensor]:
            def translate(some: Shapes, partly: bool) -> dict[str, LogicalTensor]:  # noqa: FBT001  called by place
                return rules.views(some, direction, known, partial=partly)

            return in_all_roles(translate, partial(rules.knows, direction=direction), shapes)

        return views


def check_translation(given: object, *, needed: bool = False) -> None:
    """Refuse what is no translation: ``translation="llama"`` lacks the convention. None is one only where none is ``needed``."""
    if not isinstance(given, Translation) and (needed or given is not None):
        hint = 'translation=ckpt.Translation(names="llama", convention="huggingface")'
        raise UsageError(f"translation= is a ckpt.Translation, not {given!r}", hint=hint)


def translated_views(url: str, names: str, convention: str, numbers: Mapping[str, int]) -> Views:
    """From the shapes of the tensors at ``url`` to the same in ``convention``."""
    return Translation(names=names, convention=convention, numbers=numbers).views(numbers_of_files(url))


def numbers_of_files(url: str) -> Dimensions:
    """Numbers that the files of a checkpoint tell: transformers' ``config.json``, or the arguments that Megatron keeps, also where they
    were converted or imported. None if there are neither."""
    data = _config(url)
    if data is None:
        catalog = open_catalog(url)
        arguments = catalog.state.get(ARGUMENTS) if isinstance(catalog.state, dict) else None
        if isinstance(arguments, dict) and arguments.keys() >= MEGATRON:
            return of_arguments(arguments)
        data = _config(catalog.url)  # of the iteration or tag, where ``url`` is that of the run
    if data is None:
        return Dimensions()
    try:
        return of_config(parse_json(data))
    except (ValueError, AttributeError, TypeError) as err:
        raise CorruptError(f"{CONFIG} cannot be read: {err}", where=url, hint="restore it, or give the numbers: --set") from err


def _config(url: str) -> bytes | None:
    try:
        return open_backend(url).read_whole(CONFIG, settings.SIDE_FILE)
    except NotFoundError:
        return None
