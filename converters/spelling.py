"""A checkpoint's tensors in another spelling: which way a translation goes, and what numbers the checkpoint itself tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.plan.views import View

from .numbers import of_arguments, of_config
from .roles import Shapes, in_all_roles
from .terms import Dimensions
from .translation import Direction, Translation, load_translation

Views = Callable[[Mapping[str, Sequence[int]]], dict[str, View]]
CONFIG = "config.json"
ARGUMENTS = "args"
"""Where the state of a Megatron checkpoint has the arguments of the job."""
MEGATRON = {"num_layers", "num_attention_heads", "padded_vocab_size"}
"""Some of them: others keep arguments, too."""


def translated(url: str, translation: str, spelling: str, numbers: Mapping[str, int]) -> Views:
    """From the shapes of the tensors at ``url`` to the same in ``spelling``. ``numbers`` go before what the files tell.

    Raises:
        UsageError: there is no such translation, or it is not one to or from this spelling.
    """
    return respelled(translation, spelling, {**told_by(url), **numbers})


def respelled(translation: str, spelling: str, numbers: Mapping[str, int]) -> Views:
    """From the shapes of a model's tensors to the same in ``spelling``; ``numbers`` are those that the translation's terms name.

    Raises:
        UsageError: there is no such translation, or it is not one to or from this spelling.
    """
    rules = load_translation(translation)
    direction = _direction(rules, spelling)
    known = Dimensions(numbers)

    def views(shapes: Mapping[str, Sequence[int]]) -> dict[str, View]:
        def translate(some: Shapes, partly: bool) -> dict[str, View]:  # noqa: FBT001  called by place
            return rules.views(some, direction, known, partial=partly)

        return in_all_roles(translate, partial(rules.knows, direction=direction), shapes)

    return views


def told_by(url: str) -> Dimensions:
    """Numbers that the files of a checkpoint tell: transformers' ``config.json``, or the arguments that Megatron keeps, also where they
    were converted or imported. None if there are neither.

    Raises:
        FormatError, CorruptError: what tells them cannot be read.
    """
    try:
        data = open_backend(url).read(CONFIG)
    except NotFoundError:
        state = open_catalog(url).state
        arguments = state.get(ARGUMENTS) if isinstance(state, dict) else None
        return of_arguments(arguments) if isinstance(arguments, dict) and arguments.keys() >= MEGATRON else Dimensions()
    try:
        return of_config(json.loads(data))
    except (ValueError, AttributeError, TypeError) as err:
        raise CorruptError(f"{CONFIG} cannot be read: {err}", where=url, hint="restore it, or give the numbers: --set") from err


def _direction(rules: Translation, spelling: str) -> Direction:
    if spelling not in (rules.left, rules.right):
        told = f"this translation is between {rules.left!r} and {rules.right!r}, not to {spelling!r}"
        raise UsageError(told, hint="`ckpt import --help` names the spellings")
    return "rightwards" if spelling == rules.right else "leftwards"
