"""What a rank's state says of where copies belong (``plan.redundancy.kinship``)."""

from __future__ import annotations

from ckpt.adapters.collect import collect
from ckpt.coordination.group import Group
from ckpt.engine.save.job import SaveOptions, save_cache
from ckpt.plan.redundancy.kinship import RankKinship, kinship_of


def state_kinship(state: object, group: Group, options: SaveOptions) -> RankKinship:
    """By the layouts of the tensors of a state that is about to be saved; those that are this rank's alone say nothing.

    Raises:
        StateError, LayoutError, UsageError: as for ``ckpt.save``.
    """
    shards = save_cache(group).plans.shards  # the save finds there what is looked at here
    table = collect(state, rank=group.rank, ranks=group.ranks, layout=options.layout, shards=shards, part=options.part).shard_table
    return kinship_of((t.info for name, t in table.tensors.items() if name not in table.own), group.rank)
