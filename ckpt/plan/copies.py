"""Which machines keep second copies of which files; and copies that cost no network, since a rank of another failure domain has the same
bytes in its own memory and writes them, too. Pure.

    4 ranks on 2 hosts, rows over 2 ranks, each replicated on the other host (HSDP)

    host a    rank 0 owns rows 0-1     mirrored by rank 2        files on host a    0 → 2    1 → 3    and the mirrors of 2 and 3
              rank 1 owns rows 4-5     mirrored by rank 3
    host b    rank 2 owns rows 2-3     mirrored by rank 0        files on host b    2 → 0    3 → 1    and the mirrors of 0 and 1
              rank 3 owns rows 6-7     mirrored by rank 1

An owner's chunks go into one file for each set of mirrors. All of the set have all chunks of it, so each mirror can make the same file,
byte for byte, without a message: it knows the layouts of the tensors that it holds, and the number in the name of the file follows from the
set alone (``file_number``). Digests of both are compared before the commit. Chunks that no other domain has are in a file of their own,
which is copied over the network later (:func:`missing_copies`).

Mirrors are in the domains that get copies of the owner's domain (:func:`backup_domains`), if these have the bytes. Else domains that have
the same bytes form groups among themselves. Within a domain, replicas are taken in turns: replica i of a cell is mirrored by its replica i
there, so ranks that are alike on two hosts mirror each other, whatever else is replicated.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from ckpt.plan.layout.geometry import IntArray

from .ownership import ChunkAssignment

# Which machines keep second copies of each other's files, so that a checkpoint survives the loss of machines. Pure.
#
# A *domain* is what fails together: a machine, or a rack of them. Domains are put into groups, and a domain's files are copied to others of
# its group alone, so that few combinations of losses hit all holders of a file (Gemini's placement, SOSP 2023):
#
#     copies = 1        a ⇄ b      c ⇄ d      e → f → g → e          groups of copies + 1; what is left over joins the last group,
#                                                                    in which each copies to the next ones, around the ring
#     copies = 2        a ⇄ b ⇄ c ⇄ a      d → e, f; e → f, g; …
#
# Of two losses among 16 domains with one copy, 8 of 120 pairs hit a group: 93.3 % are survived. Copies to random domains would survive none
# of the pairs that happen to share a file, which soon are all of them.
#
# Every rank computes the same from the names of the domains.


def domain_groups(domains: Collection[str], copies: int) -> list[tuple[str, ...]]:
    """The domains in groups of ``copies`` + 1, by name; fewer than so many are one group."""
    names, size = sorted({*domains}), copies + 1
    begins = [size * group for group in range(max(1, len(names) // size))]
    return [tuple(names[at:end]) for at, end in zip(begins, [*begins[1:], len(names)], strict=True)]


def even_groups(groups: Sequence[Sequence[str]], size: int) -> list[tuple[str, ...]]:
    """The same groups, but what is left over joins all of them in turns. In a ring of copies a larger group costs nothing; with parity each
    loss of two of its members is fatal."""
    even = [[*group[:size]] for group in groups]
    for number, name in enumerate(name for group in groups for name in group[size:]):
        even[number % len(even)].append(name)
    return [tuple(group) for group in even]


def backup_domains(domains: Collection[str], copies: int) -> dict[str, tuple[str, ...]]:
    """For each domain the others that get copies of its files: ``copies`` of them, fewer where there are not so many."""
    return {
        name: tuple(group[(at + step) % len(group)] for step in range(1, min(copies, len(group) - 1) + 1))
        for group in domain_groups(domains, copies)
        for at, name in enumerate(group)
    }


_NUMBERS = 1 << 40
"""Sets of mirrors that file names can tell apart."""


@dataclass(frozen=True, kw_only=True)
class MirrorPlacement:
    """``domains`` of all ranks, in the order of their group; ``copies``: how many other domains are to have each file.

    A set of mirrors goes by a number, its *code*: 0 is the empty one.
    """

    domains: Mapping[int, str]
    copies: int
    _known: dict[bytes, IntArray] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def names(self) -> list[str]:
        """The domains, each once."""
        return sorted({*self.domains.values()})

    @cached_property
    def backups(self) -> dict[str, tuple[str, ...]]:
        """For each domain those that get its files first."""
        return backup_domains(self.names, self.copies)

    @cached_property
    def positions(self) -> dict[int, int]:
        """The place of each rank in the group."""
        return {rank: position for position, rank in enumerate(self.domains)}

    @cached_property
    def text(self) -> str:
        """A digest: ranks that know different placements would write files that do not fit together."""
        return xxhash.xxh3_64_hexdigest(repr((self.copies, list(self.domains.items()))).encode())

    @cached_property
    def _base(self) -> int:
        return max(self.domains, default=0) + 2

    @cached_property
    def _most(self) -> int:
        """Mirrors of a chunk, at most: as many copies as there are to be, and as file names can say."""
        most = 1
        while most < self.copies and self._base ** (most + 1) <= _NUMBERS:
            most += 1
        return most

    @cached_property
    def _domain_of(self) -> IntArray:
        """The number of each rank's domain."""
        numbers = {name: n for n, name in enumerate(self.names)}
        of = np.zeros(self._base, dtype=np.int64)
        for rank, name in self.domains.items():
            of[rank] = numbers[name]
        return of

    # ---- names of files

    def file_number(self, code: int, part: int) -> int:
        """The number in the name of the file that has a rank's chunks with these mirrors; ``part`` counts the files that they take."""
        return int(part * self._base**self._most + code)

    def parse_number(self, number: int) -> tuple[int, int]:
        """Code and part of a file's number."""
        part, code = divmod(number, self._base**self._most)
        return int(code), int(part)

    def mirrors(self, code: int) -> tuple[int, ...]:
        """The ranks that a code stands for."""
        ranks = []
        while code:
            code, digit = divmod(code, self._base)
            ranks.append(digit - 1)
        return tuple(ranks)

    # ---- who mirrors what

    def written_by(self, assignment: ChunkAssignment, rank: int) -> list[tuple[int, int]]:
        """The chunks that ``rank`` owns, with the code of the mirrors of each."""
        numbers = assignment.written_by(rank)
        if not self._has_mirrors(assignment):
            return [(number, 0) for number in numbers]
        holders = assignment.cell_holders
        cells = assignment.cell[numbers].tolist()
        codes = {cell: int(self._codes(holders[cell])[int(np.flatnonzero(holders[cell] == rank)[0])]) for cell in {*cells}}
        return [(number, codes[cell]) for number, cell in zip(numbers, cells, strict=True)]

    def mirrored_by(self, assignment: ChunkAssignment, rank: int) -> list[tuple[int, int, int]]:
        """The chunks that ``rank`` writes for others, in the order of their numbers as their owners write them, also where a rank has
        several cells of a tensor: number, owner, and the code of all mirrors."""
        if not self._has_mirrors(assignment):
            return []
        mirrored = []
        for cell in np.flatnonzero((assignment.cell_holders == rank).any(axis=1)).tolist():
            holders = assignment.cell_holders[cell]
            codes = self._codes(holders)
            mirroring = {code for code in {*codes.tolist()} if rank in self.mirrors(code)}
            of_owner = {owner: code for owner, code in zip(holders.tolist(), codes.tolist(), strict=True) if code in mirroring}
            numbers = np.flatnonzero((assignment.cell == cell) & np.isin(assignment.owners, list(of_owner)))
            owners = assignment.owners[numbers].tolist()
            mirrored += [(number, owner, of_owner[owner]) for number, owner in zip(numbers.tolist(), owners, strict=True)]
        return sorted(mirrored)

    def codes(self, assignment: ChunkAssignment) -> IntArray:
        """The code of the mirrors of each chunk."""
        if not self._has_mirrors(assignment):
            return np.zeros(len(assignment.owners), dtype=np.int64)
        holders = assignment.cell_holders
        codes = np.concatenate([self._codes(row) for row in holders])
        # Which replica of its cell an owner is, for all chunks at once: cell and rank make one sorted key. To compare each
        # owner with all replicas would take chunks times ranks where every rank has everything.
        keys = (np.arange(len(holders))[:, None] * self._base + holders).ravel()
        order = np.argsort(keys)
        places = np.searchsorted(keys, assignment.cell * self._base + assignment.owners, sorter=order)
        of_chunk: IntArray = codes[order[places]]
        return of_chunk

    def _has_mirrors(self, assignment: ChunkAssignment) -> bool:
        # What is merged of flat ranges has bytes that other ranks send to its owner alone.
        return assignment.replicas > 1 and not assignment.merged

    def _codes(self, holders: IntArray) -> IntArray:
        """Ranks that have the same bytes: the code of the mirrors of each, if it owns some of them."""
        key = holders.tobytes()
        if key not in self._known:
            self._known[key] = self._choose(holders)
        return self._known[key]

    def _choose(self, holders: IntArray) -> IntArray:
        order = np.argsort(holders, kind="stable")
        domain = self._domain_of[holders[order]]
        members = {self.names[d]: order[domain == d] for d in np.unique(domain).tolist()}
        codes = np.zeros(len(holders), dtype=np.int64)
        for name, targets in self._targets(members).items():
            own = members[name]
            for digit, target in enumerate(targets):
                others = holders[members[target]]
                codes[own] += (others[np.arange(len(own)) % len(others)] + 1) * self._base**digit
        return codes

    def _targets(self, there: Collection[str]) -> dict[str, tuple[str, ...]]:
        """For each of the domains that have the same bytes, those of them that mirror it."""
        targets = {name: tuple(b for b in self.backups[name] if b in there)[: self._most] for name in there}
        short = [name for name in there if len(targets[name]) < min(self._most, len(there) - 1)]
        rings = backup_domains(short if len(short) > self._most else there, self._most) if short else {}
        for name in short:
            targets[name] = tuple(dict.fromkeys([*targets[name], *rings[name]]))[: self._most]
        return targets


# Which files have to be copied, and to which nodes, until each is in as many failure domains as it is meant to be. Pure.


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
