"""Which files have to be copied, and to which nodes, until each is in as many failure domains as it is meant to be. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .domains import backup_domains


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
