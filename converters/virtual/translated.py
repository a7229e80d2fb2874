"""A checkpoint of any format in other names, opened or loaded without a step in between. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ckpt.converters.mapping.convention import translated_views as views_of
from ckpt.text.urls import url_text

from .importer import import_in_memory


def translated(
    url: str | os.PathLike[str],
    *,
    names: str | os.PathLike[str],
    convention: str,
    numbers: Mapping[str, int] | None = None,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
) -> str:
    """A checkpoint in other names, without a step in between: ``ckpt.load(translated("megatron/", …), state)``; likewise ``ckpt.open``.

    What it gives is the URL of a virtual checkpoint in the memory of this process. Every rank makes its own.

    Args:
        url: a checkpoint of any format, but no virtual one.
        names: a translation that comes with ckpt, or the path of a ``.toml`` file (docs/translations.md).
        convention: the naming convention that the state has, such as ``"huggingface"``.
        numbers: of the model, where the checkpoint does not tell them: ``{"query_groups": 8}``.
        skip: globs of stored names: these tensors are left out, and no rule of the translation has to take them.
        only: globs of new names and of paths of values: others are left out.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no whole checkpoint of a known format at ``url``.
        NamesError: tensors that no rule takes, or missing ones; or a glob fits nothing.
        UsageError: there is no such translation, or the tensors, steps or options do not fit it.
        CoverageError: a tensor would have elements that no file has.
    """
    url, names = url_text(url), url_text(names)
    return import_in_memory(url, views=views_of(url, names, convention, numbers or {}), only=only, skip=skip)
