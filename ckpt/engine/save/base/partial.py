"""Experts that a save does not write: it refers to what the base has of them, although they have changed (docs/format.md §16).

    step 100   experts 0 1 2 3 written
    step 200           0 . 2 . written      1 and 3 are those of step 100
    step 300           . 1 . 3 written      0 and 2 are those of step 200

Every rank decides alike, by names, rows and the number of the save, so all chunks of an expert are of one step. That the base lacks one
is therefore an error, and not a reason to write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.catalog import DataFile
from ckpt.engine.save.plan import RankPlan
from ckpt.errors import MismatchError
from ckpt.policies.partial_experts import StaleExperts

from .base_chunks import BaseChunks, SaveBase

_WHOLE = "save again: after a save that failed, the next one writes all experts"


@dataclass(frozen=True, kw_only=True, eq=False)
class StaleChunks:
    """What a rank refers to without asking whether it is equal. ``references`` go by numbers of the plan, and so do ``steps``: the training
    step that each chunk is of. ``coded``: whether a chunk is."""

    references: Mapping[int, DataFile] = field(default_factory=dict)
    steps: Mapping[int, int] = field(default_factory=dict)
    coded: bool = False


def find_stale(base: SaveBase, chunks: BaseChunks, plan: RankPlan, stale: StaleExperts) -> StaleChunks:
    """Where the base has the chunks of these experts.

    Raises:
        MismatchError: it does not have one of them, or nothing may refer to it.
        CorruptError: a file of it is missing, or a header damaged.
        ConflictError: it has one in a file of what this save replaces.
    """
    if base.step is None or not chunks.catalog.record.reusable:
        why = "its directory does not say of which step it is" if base.step is None else "it was saved without reusable=True"
        raise MismatchError(f"experts cannot keep what the base has of them: {why}", where=base.url, hint=_WHOLE)
    references: dict[int, DataFile] = {}
    steps: dict[int, int] = {}
    coded = False
    for number, chunk in enumerate(plan.chunks):
        if not stale.covers(chunk.name, chunk.box.offset):
            continue
        entry, stored = chunks.entry(plan, number), chunks.stored_whole(plan, number)
        if entry is None or stored is None:
            lacks = "has none of this name, dtype and shape" if entry is None else "does not have it in the same chunks, or not whole"
            raise MismatchError(
                f"tensor {chunk.name}: this save does not write it, since it is another expert's turn, and the base {lacks}",
                where=base.url,
                hint=_WHOLE,
            )
        extent, references[number] = stored
        coded = coded or extent.codec is not None
        earlier = chunks.earlier_step(entry, plan, number)
        steps[number] = base.step if earlier is None else earlier
    return StaleChunks(references=references, steps=steps, coded=coded)
