"""A checkpoint's tensors in another naming convention: which way a translation goes, and what numbers the checkpoint itself tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.plan.views import LogicalTensor
from ckpt.settings import limits
from ckpt.text.json_reader import parse_json

from .model_numbers import NUMBERS, changed, of_arguments, of_config
from .parameter_roles import Shapes, in_all_roles
from .terms import Dimensions
from .translation import Direction, Translation, load_translation

Views = Callable[[Mapping[str, Sequence[int]]], dict[str, LogicalTensor]]
CONFIG = "config.json"
ARGUMENTS = "args"
"""Where the state of a Megatron checkpoint has the arguments of the job."""
MEGATRON = {"num_layers", "num_attention_heads", "padded_vocab_size"}
"""Some of them: others keep arguments, too."""


def translated_views(url: str, translation: str, convention: str, numbers: Mapping[str, int]) -> Views:
    """From the shapes of the tensors at ``url`` to the same in ``convention``. ``numbers`` go before what the files tell."""
    return model_views(translation, convention, numbers, stored_numbers=numbers_of_files(url))


def model_views(translation: str, convention: str, numbers: Mapping[str, int], *, stored_numbers: Mapping[str, int] | None = None) -> Views:
    """From the shapes of a model's tensors to the same in ``convention``; ``numbers`` are those that the translation's terms name, and go
    before those that files have ``stored_numbers``."""
    rules = load_translation(translation)
    direction = _direction(rules, convention)
    asked = [*NUMBERS, *sorted(rules.asks() - set(NUMBERS))]
    strange = sorted(numbers.keys() - set(asked))
    if strange:
        raise UsageError(f"no translation asks for a number {strange[0]!r}", hint=f"one of {', '.join(asked)}")
    known = changed(stored_numbers or {}, numbers)

    def views(shapes: Mapping[str, Sequence[int]]) -> dict[str, LogicalTensor]:
        def translate(some: Shapes, partly: bool) -> dict[str, LogicalTensor]:  # noqa: FBT001  called by place
            return rules.views(some, direction, known, partial=partly)

        return in_all_roles(translate, partial(rules.knows, direction=direction), shapes)

    return views


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
        return open_backend(url).read_whole(CONFIG, limits.SIDE_FILE)
    except NotFoundError:
        return None


def _direction(rules: Translation, convention: str) -> Direction:
    if convention not in (rules.left, rules.right):
        message = f"this translation is between {rules.left!r} and {rules.right!r}, not to {convention!r}"
        raise UsageError(message, hint=f"the convention that you want: {rules.left} or {rules.right}")
    return "rightwards" if convention == rules.right else "leftwards"
