"""The rows of an index: each tensor's dtype, shape and stored grid, from the ranks' joined tables and the files that they wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ckpt.catalog import DataFile, TensorEntry
from ckpt.formats.native.paths import data_number
from ckpt.plan.ownership import TensorSpec, assign
from ckpt.plan.redundancy.mirrors import MirrorPlacement
from ckpt.plan.tables import Joined, Table

from .grids import Grids
from .plan import own_tensors


def chunks_apart(
    files: Sequence[DataFile], own_rows: Mapping[int, bytes], ranks: Sequence[int], mirrors: MirrorPlacement | None = None
) -> tuple[TensorSpec, ...]:
    """Tensors of the rows of ranks that wrote several files: which file has a chunk depends on all that its rank wrote. Not so where
    ``mirrors`` decide it, unless the chunks with the same mirrors take several files. ``own_rows`` by position."""
    if mirrors is None:
        several = [position for position, count in Counter(f.rank for f in files).items() if count > 1]
    else:
        several = sorted({f.rank for f in files if mirrors.parse_number(data_number(f.path))[1]})
    return tuple(t for position in several if position in own_rows for t in own_tensors(own_rows[position], ranks[position]))


def index_rows(
    joined: Joined,
    own: Mapping[int, Table],
    files: Sequence[DataFile],
    apart: Sequence[TensorSpec],
    ranks: Sequence[int],
    *,
    coded: bool,
    referred: Mapping[str, Mapping[int, int]] | None = None,
    anchors: Mapping[str, Mapping[int, int]] | None = None,
    with_128: AbstractSet[int] = frozenset(),
    mirrors: MirrorPlacement | None = None,
) -> tuple[TensorEntry, ...]:
    """The entries of all tensors by name. ``own``: tables of single ranks' tensors by position; ``apart``: see ``chunks_apart``; ``coded``:
    whether chunks may be coded, which decides what shares a file; ``referred``: chunks in other checkpoints, and ``anchors`` of
    chunks there; these, ``with_128`` and ``mirrors``: see ``Grids``."""
    tensors, assignments = dict(joined.tensors), dict(joined.assignments)
    rank_of: dict[str, int] = {}
    for rank, table in own.items():
        for t in table.tensors:
            tensors[t.name], rank_of[t.name] = t, rank
        assignments |= assign(table.tensors)
    grids = Grids(
        files,
        assignments | assign(apart),
        tensors | {t.name: t for t in apart},
        ranks,
        coded=coded,
        referred=referred or {},
        anchors=anchors or {},
        with_128=with_128,
        mirrors=mirrors,
    )
    entries = {
        name: TensorEntry(name=name, dtype=t.dtype, shape=t.shape, logical=t.logical, grid=grids.of(name), rank=rank_of.get(name))
        for name, t in tensors.items()
    }
    aliases = joined.aliases | {n: to for table in own.values() for n, to in table.aliases.items()}
    for name, target in aliases.items():
        entries[name] = replace(entries[target], name=name, alias=target)
    return tuple(entries[n] for n in sorted(entries))
