"""Which machines keep second copies of each other's files, so that a checkpoint survives the loss of machines. Pure.

A *domain* is what fails together: a machine, or a rack of them. Domains are put into groups, and a domain's files are copied to others of
its group alone, so that few combinations of losses hit all holders of a file (Gemini's placement, SOSP 2023):

    copies = 1        a ⇄ b      c ⇄ d      e → f → g → e          groups of copies + 1; what is left over joins the last group,
                                                                   in which each copies to the next ones, around the ring
    copies = 2        a ⇄ b ⇄ c ⇄ a      d → e, f; e → f, g; …

Of two losses among 16 domains with one copy, 8 of 120 pairs hit a group: 93.3 % are survived. Copies to random domains would survive none
of the pairs that happen to share a file, which soon are all of them.

Every rank computes the same from the names of the domains, so nothing is agreed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


def domain_groups(domains: Collection[str], copies: int) -> list[tuple[str, ...]]:
    """The domains in groups of ``copies`` + 1, by name; fewer than so many are one group."""
    names, size = sorted({*domains}), copies + 1
    begins = [size * group for group in range(max(1, len(names) // size))]
    return [tuple(names[at:end]) for at, end in zip(begins, [*begins[1:], len(names)], strict=True)]


def backup_domains(domains: Collection[str], copies: int) -> dict[str, tuple[str, ...]]:
    """For each domain the others that get copies of its files: ``copies`` of them, fewer where there are not so many."""
    return {
        name: tuple(group[(at + step) % len(group)] for step in range(1, min(copies, len(group) - 1) + 1))
        for group in domain_groups(domains, copies)
        for at, name in enumerate(group)
    }


class NodeCopy(NamedTuple):
    """A file that one node is to give to another; nodes by their numbers."""

    path: str
    source: int
    target: int


def missing_copies(holders: Mapping[str, Collection[int]], domains: Sequence[str], copies: int) -> list[NodeCopy]:
    """What has to be copied until each file is in ``copies`` + 1 domains, or in all if there are fewer. ``holders``: the nodes that have
    each file; ``domains``: that of each node.

    A file that several domains have already, as replicas wrote it on each, is copied less often or not at all. The first node that has it
    gives it away. Of the nodes of a rack each gets its share.
    """
    backups = backup_domains(domains, copies)
    nodes: dict[str, list[int]] = {}
    for node, domain in enumerate(domains):
        nodes.setdefault(domain, []).append(node)
    wanted = []
    for path, having in sorted(holders.items()):
        if not having:
            continue
        source = min(having)
        there = {domains[node] for node in having}
        # Files that lie in one domain go to its backups. One that lies in several, which need not be of one group, is
        # completed from the backups of each of them.
        targets = dict.fromkeys(backup for node in sorted(having) for backup in backups[domains[node]] if backup not in there)
        for domain in list(targets)[: max(0, copies + 1 - len(there))]:
            candidates = nodes[domain]
            wanted.append(NodeCopy(path, source, candidates[zlib.crc32(path.encode()) % len(candidates)]))
    return wanted


def is_complete(holders: Mapping[str, Collection[int]], domains: Sequence[str], copies: int) -> bool:
    """Whether each file is in as many domains as it is meant to be, and none is lost."""
    return all(holders.values()) and not missing_copies(holders, domains, copies)
