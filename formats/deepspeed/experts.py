"""Experts of DeepSpeed's MoE layers: every expert-parallel rank calls its own 0, 1, …, and keeps their states with its replicas.

Data-parallel rank r is expert-parallel rank ``r mod n`` of n. (Source: ``deepspeed/utils/groups.py`` and ``_save_moe_checkpoint`` in
``runtime/engine.py`` of DeepSpeed 0.19.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import FormatError

from .states import RankStates

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..*)")


@dataclass(frozen=True, kw_only=True)
class SharedGroup:
    """Parameters of a flat group that some ranks share: ``shapes`` by the names that these use, ``names`` from these to the model's."""

    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    ranks: tuple[int, ...]


def owned_parameters(shapes: Mapping[str, tuple[int, ...]], count: int, ranks: Sequence[RankStates]) -> Iterator[SharedGroup]:
    """The parameters of a flat group that is cut for ``count`` of the ranks: for each set of ranks those that it has."""
    everyone = len(ranks)
    if count == everyone and not any(_EXPERT.fullmatch(name) for name in shapes):
        yield SharedGroup(shapes=shapes, names={name: name for name in shapes}, ranks=tuple(range(everyone)))
        return
    other = next((name for name in shapes if not _EXPERT.fullmatch(name)), None)
    if other is not None or not count or everyone % count:
        raise FormatError(
            f"the states of {other or 'experts'} are cut for {count} of {everyone} ranks, which is not known here",
            where=ranks[0].file.where,
            hint="load it with DeepSpeed and save it with ckpt",
        )
    parallel = everyone // count
    matches = {name: match for name in shapes if (match := _EXPERT.fullmatch(name)) is not None}
    local: dict[str, set[str]] = {}
    for match in matches.values():
        local.setdefault(match[1], set()).add(match[2])
    for expert_rank in range(parallel):
        names = {name: f"{m[1]}{expert_rank * len(local[m[1]]) + int(m[2])}{m[3]}" for name, m in matches.items()}
        yield SharedGroup(shapes=shapes, names=names, ranks=tuple(range(expert_rank, everyone, parallel)))
