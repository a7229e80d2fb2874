"""Conversions between formats, exports, virtual checkpoints and comparisons.

The names here are for writers of further formats. A distribution adds one by an entry point of the group ``ckpt.targets``, named like
the format and with a :class:`Target` as its object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

if TYPE_CHECKING:
    from .selection import OutputSet as OutputSet
    from .selection import OutputTensor as OutputTensor
    from .selection import SelectOptions as SelectOptions
    from .target import FileItem as FileItem
    from .target import OutputFile as OutputFile
    from .target import OutputOptions as OutputOptions
    from .target import OutputPlan as OutputPlan
    from .target import Target as Target

_WHERE = {
    "FileItem": "ckpt.converters.target",
    "OutputFile": "ckpt.converters.target",
    "OutputOptions": "ckpt.converters.target",
    "OutputPlan": "ckpt.converters.target",
    "OutputSet": "ckpt.converters.selection",
    "OutputTensor": "ckpt.converters.selection",
    "SelectOptions": "ckpt.converters.selection",
    "Target": "ckpt.converters.target",
}

__all__ = list(_WHERE)


if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, _WHERE)
