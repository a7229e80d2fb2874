"""A Megatron checkpoint with its optimizer's state read from where it truly lies, and with something in the place of what is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import FormatError
from ckpt.formats.external.base import ExternalFile
from ckpt.formats.external.elements import read_box
from ckpt.formats.external.virtual_backends import WithFile
from ckpt.layout.geometry import Box, box_to_flat

from .base import MegatronCatalog
from .pieces import InFile, PieceTable, SourcePiece
from .repair import Repaired
from .training import MODEL, STATE

FILLED = "elements-that-were-lost"
"""The file in memory that has them."""
_SIZE = 4


class RepairedTensor(NamedTuple):
    """How many elements of a tensor of the optimizer's state lay elsewhere, and how many nowhere: masters among these are the weights,
    moments zero."""

    tensor: str
    mended: int
    filled: int


def repaired_catalog(catalog: MegatronCatalog, repaired: Repaired) -> tuple[MegatronCatalog, tuple[RepairedTensor, ...]]:
    """The repaired checkpoint, and what was done to which tensor.

    Memory: 4 bytes for each element of a master that is lost.
    """
    table, filling = catalog.table, _Filling(catalog.table, repaired.lost)
    pieces = {name: [*own, *filling.pieces(name)] for name, own in repaired.pieces.items()}
    data = filling.data()
    backend = WithFile(table.backend, FILLED, data)
    made = table.with_pieces(backend, [ExternalFile(FILLED, len(data))], pieces)
    changed = [RepairedTensor(n, _moved(own, table.pieces(n)), filling.count(n)) for n, own in sorted(repaired.pieces.items())]
    mended = MegatronCatalog(
        table=made,
        format=catalog.format,
        state=catalog.state,
        world_size=catalog.world_size,
        arguments=catalog.arguments,
        notes=catalog.notes,
        opaque=catalog.opaque,
    )
    return mended, tuple(m for m in changed if m.mended or m.filled)


class _Filling:
    """What lost elements become: masters one after another, behind zeros for the longest box of a moment."""

    def __init__(self, table: PieceTable, lost: Mapping[str, Sequence[Box]]) -> None:
        self._table = table
        self._lost = lost
        self._zeros = max((b.numel for boxes in lost.values() for b in boxes), default=0) * _SIZE
        self._masters: list[npt.NDArray[np.float32]] = []
        self._end = self._zeros

    def count(self, name: str) -> int:
        """The elements of a state that are lost."""
        return sum(b.numel for b in self._boxes(name))

    def _boxes(self, name: str) -> Sequence[Box]:
        return self._lost.get(name[len(STATE) :].rpartition(".")[0], ())

    def pieces(self, name: str) -> Iterator[SourcePiece]:
        """The boxes of a state that are lost, in the file. Called once for each state."""
        for box in self._boxes(name):
            start = 0
            if name.endswith(".master"):
                start = self._end
                self._masters.append(self._weights(name[len(STATE) : -len(".master")], box))
                self._end += box.numel * _SIZE
            yield SourcePiece(box.offset, box.shape, InFile(FILLED, "float32", start, box.numel))

    def _weights(self, name: str, box: Box) -> npt.NDArray[np.float32]:
        entry = self._table.entries[f"{MODEL}{name}"]
        bits = read_box(self._table, entry, box)
        if entry.dtype.name == "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        if entry.dtype.name not in ("float16", "float32"):
            raise FormatError(f"no master can be made of the weight {name}, which is {entry.dtype.name}", where=self._table.backend.url)
        return bits.view(entry.dtype.name).astype(np.float32)

    def data(self) -> bytes:
        """The file, once all pieces were asked for."""
        return b"".join([bytes(self._zeros), *(m.astype("<f4").tobytes() for m in self._masters)])


def _moved(pieces: Sequence[SourcePiece], stored: Sequence[SourcePiece]) -> int:
    """The elements of pieces that are not read where the tensor itself was stored."""
    return sum(Box(p.offset, p.shape).numel for p in pieces if not any(_is_part(p, s) for s in stored))


def _is_part(piece: SourcePiece, stored: SourcePiece) -> bool:
    own, box = Box(stored.offset, stored.shape), Box(piece.offset, piece.shape)
    flat = box_to_flat(own.shape, box.relative_to(own.offset)) if own.contains(box) else None
    return flat is not None and piece.source == stored.source and piece.start == stored.start + flat[0]
