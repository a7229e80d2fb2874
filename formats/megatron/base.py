"""What the readers of both formats of Megatron share: the catalog, the names of directories of ranks, and padding of the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.formats.external.base import ExternalCatalog, ExternalContents

from .names import VOCABULARY
from .pieces import PieceTable
from .training import ABOUT_STORAGE

COMMON = "common.pt"
"""What is no tensor, in the format ``torch_dist``; written first."""
RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?/")


class MegatronCatalog(ExternalCatalog):
    """A Megatron checkpoint. ``arguments`` are those of the job that wrote it, as far as they are plain values.

    ``notes`` say what was left out; ``suspect`` why some of it may be wrong, None if nothing is known.
    """

    def __init__(
        self,
        *,
        table: PieceTable,
        format: str,
        state: Any,
        world_size: int,
        arguments: Mapping[str, Any],
        notes: Sequence[str] = (),
        suspect: str | None = None,
        opaque: Mapping[str, str] | None = None,
    ) -> None:
        contents = ExternalContents(
            tensors=table.entries.values(), files=table.files, world_size=world_size, state=state, opaque=opaque or {}, notes=notes
        )
        super().__init__(contents, backend=table.backend, format=format, locate=table.locate, replicas=table.replicas)
        self.arguments = arguments
        self._suspect = suspect
        self.table = table

    @property
    def suspect(self) -> str | None:
        return self._suspect

    @property
    def about_storage(self) -> tuple[str, ...]:
        return ABOUT_STORAGE


def logical_shape(name: str, shape: tuple[int, ...], arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape without the rows that pad the vocabulary; None if there are none, or the arguments do not tell."""
    rows = arguments.get("vocab_size")
    return (rows, *shape[1:]) if name in VOCABULARY and isinstance(rows, int) and 0 < rows < shape[0] else None
