"""Checkpoint formats: bytes in, catalogs out. Never imports torch.

The names here are for readers of further formats. A distribution adds one by an entry point of the group ``ckpt.formats``, whose object is
a :class:`Format`; its ``open`` returns a :class:`Catalog`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

if TYPE_CHECKING:
    from ckpt.catalog import Catalog as Catalog
    from ckpt.catalog import Extent as Extent
    from ckpt.catalog import Format as Format
    from ckpt.catalog import Grid as Grid
    from ckpt.catalog import TensorEntry as TensorEntry

    from .registry import open_catalog as open_catalog

_WHERE = {
    "Catalog": "ckpt.catalog",
    "Extent": "ckpt.catalog",
    "Format": "ckpt.catalog",
    "Grid": "ckpt.catalog",
    "TensorEntry": "ckpt.catalog",
    "open_catalog": "ckpt.formats.registry",
}

__all__ = list(_WHERE)


if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, _WHERE)
