"""Which domains make good groups, from where the ranks' tensors lie. Pure.

A domain's copies belong where the same bytes lie already: there they cost nothing (``mirrors.py``). And if all of a domain's copies are in
one other domain, few pairs of losses are fatal; groups by name would add others, for what has no replica.

    rank        its *replicas* have all that it has, and that others have, too; its *kin* have other parts of its tensors: its TP group,
                or its FSDP group
    domain      replicas: domains whose ranks have the same sets of replicas    → groups among themselves, by name
                others: FSDP over all machines, stages that are alone           → groups of domains that are no kin, if there are such: a
                                                                                  failed link or switch often takes a whole TP or PP group

The leader computes it once, of what each rank knows of its own layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec

from .domains import domain_groups


class RankKinship(NamedTuple):
    """Of one rank: those that have the same bytes, and those that share its tensors out with it; itself is among both. No replicas: it
    alone has its bytes."""

    replicas: tuple[int, ...]
    kin: tuple[int, ...]


def kinship_of(tensors: Iterable[TensorSpec], rank: int) -> RankKinship:
    """What a rank knows by the layouts of its tensors."""
    replicas: set[int] | None = None
    kin: set[int] = set()
    for t in {id(t.layout): t for t in tensors}.values():
        holders = t.layout.tiling(t.shape).holders
        kin.update(_split_with(t.layout, rank))
        if holders.shape[1] > 1:
            for cell in np.flatnonzero((holders == rank).any(axis=1)).tolist():
                there = {*holders[cell].tolist()}
                replicas = there if replicas is None else replicas & there
    same = () if replicas is None or len(replicas) == 1 else tuple(sorted(replicas))
    return RankKinship(same, tuple(sorted(kin)))


def _split_with(layout: TensorLayout, rank: int) -> list[int]:
    """The ranks that share a tensor out with ``rank``: those that differ from it on no other dimension of the mesh than those it is
    split over."""
    mesh = layout.mesh
    split = {mesh.axis(s.over) for s in layout.splits}
    at = tuple(slice(None) if axis in split else coordinate for axis, coordinate in enumerate(mesh.place(rank)))
    together: list[int] = mesh.array()[at].ravel().tolist()
    return together


def groups_by_kinship(domains: Mapping[int, str], of_rank: Mapping[int, RankKinship], copies: int) -> list[tuple[str, ...]]:
    """The domains of all ranks in groups of ``copies`` + 1, the last ones of each kind larger; as ``domain_groups`` where layouts say
    nothing. Ranks that know the same share one value: else it takes ranks times kin."""
    ranks: dict[str, list[int]] = {}
    for rank, name in domains.items():
        ranks.setdefault(name, []).append(rank)
    different = {id(kinship.replicas): kinship.replicas for kinship in of_rank.values()}
    numbers: dict[tuple[int, ...], int] = {(): 0}
    number = {key: numbers.setdefault(replicas, len(numbers)) for key, replicas in different.items()}  # tuples do not keep their hashes
    alike: dict[frozenset[int], list[str]] = {}
    for name in sorted(ranks):
        alike.setdefault(frozenset(number[id(of_rank[rank].replicas)] for rank in ranks[name]), []).append(name)
    groups, others = [], []
    for sets, names in alike.items():
        if 0 not in sets and len(names) > copies:
            groups += domain_groups(names, copies)
        else:
            others += names
    known: dict[int, set[str]] = {}
    kin = {name: _domains_of([of_rank[rank].kin for rank in ranks[name]], domains, known) for name in others}
    strangers, left = _groups_of_strangers(sorted(others), kin, copies)
    groups += strangers
    if left:  # too few for a group of their own
        groups[-1:] = [(*(groups[-1] if groups else ()), *left)]
    return groups


def _domains_of(kin: Sequence[tuple[int, ...]], domains: Mapping[int, str], known: dict[int, set[str]]) -> set[str]:
    """The domains of all these ranks. ``known``: of those that were asked for before, by the identity of the tuple."""
    different = {id(ranks): ranks for ranks in kin}
    for key, ranks in different.items():
        if key not in known:
            known[key] = {domains[rank] for rank in ranks}
    sets = [known[key] for key in different]
    return sets[0] if len(sets) == 1 else set[str]().union(*sets)


def _groups_of_strangers(names: Sequence[str], kin: Mapping[str, set[str]], copies: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """Groups of domains of which no two are kin, as far as there are such, each beginning with the first name that is left; and what is
    left at last."""
    left = dict.fromkeys(names)
    of_all = {each for each, those in {id(those): those for those in kin.values()}.items() if those >= left.keys()}  # many share one set
    groups = []
    while len(left) > copies:
        group = [next(iter(left))]
        del left[group[0]]
        while len(group) <= copies:
            # Whoever is kin to all others, as in FSDP over all machines, need not be compared with each of them.
            strangers = (
                ()
                if any(id(kin[member]) in of_all for member in group)
                else (name for name in left if not any(name in kin[member] for member in group))
            )
            chosen = next(iter(strangers), None) or next(iter(left))
            del left[chosen]
            group.append(chosen)
        groups.append(tuple(group))
    return groups, list(left)
