"""XOR parity of data files over a group of failure domains: what any one of them loses is computed from the others. Pure.

    a group of three domains; the files of each, one after another, in two segments

    domain a    a0 a1    and the parity    b1 ^ c0
    domain b    b0 b1                      a0 ^ c1
    domain c    c0 c1                      a1 ^ b0

Of n domains each has n - 1 segments, and the XOR of one segment of each other domain: none of its own, and no two of one domain (RAID 5
over files, as SCR does it). So the loss of any one domain costs each parity at most one of its terms. Segments are as long as the largest
member needs, and what a member has no bytes for counts as zeros. A domain of several nodes shares its parity out among them.

A parity file is described by its *terms* alone, the ranges of files that it is the XOR of. Nobody has to know the groups to read it, and
its name is a digest of them: whoever plans the same finds it made.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import xxhash

_ALIGNED = 4096
"""Parts of parities begin at multiples of so many bytes."""


class ParityTerm(NamedTuple):
    """A range of a file, and its place in the parity. ``size`` is that of the file, ``domain`` where it was."""

    path: str
    size: int
    offset: int
    length: int
    at: int
    domain: str


@dataclass(frozen=True)
class ParityLayout:
    """What one parity file is the XOR of: ``terms`` that may overlap, and zeros between them."""

    terms: tuple[ParityTerm, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of the parity file."""
        return max(term.at + term.length for term in self.terms)

    @cached_property
    def name(self) -> str:
        """A digest of the terms: 16 hexadecimal digits."""
        return xxhash.xxh3_64_hexdigest(repr([tuple(term) for term in self.terms]).encode())

    def overlapping(self, start: int, stop: int) -> Iterator[ParityTerm]:
        """The terms, cut to bytes ``[start, stop)`` of the parity; their places count from ``start``."""
        for term in self.terms:
            first, last = max(start, term.at), min(stop, term.at + term.length)
            if first < last:
                yield term._replace(offset=term.offset + first - term.at, length=last - first, at=first - start)


class PlannedParity(NamedTuple):
    """A parity file that a node is to make; nodes by their numbers."""

    target: int
    layout: ParityLayout


# ---- what is to be made


def plan_parity(
    holders: Mapping[str, AbstractSet[int]], sizes: Mapping[str, int], domains: Sequence[str], groups: Sequence[Sequence[str]]
) -> list[PlannedParity]:
    """The parity files that protect each file that one domain alone has. ``holders``: the nodes that have each file; ``domains``: that of
    each node; ``groups`` of domains. A group of one domain has no parity."""
    nodes: dict[str, list[int]] = {}
    for node, domain in enumerate(domains):
        nodes.setdefault(domain, []).append(node)
    files: dict[str, list[str]] = {}
    for path, having in sorted(holders.items()):
        there = {domains[node] for node in having}
        if len(there) == 1 and sizes[path]:
            files.setdefault(there.pop(), []).append(path)
    planned: list[PlannedParity] = []
    for group in groups:
        streams = [_Stream(domain, files.get(domain, ()), sizes) for domain in group if domain in nodes]
        if len(streams) < 2:
            continue
        longest = max(stream.size for stream in streams)
        segment = _aligned(-(-longest // (len(streams) - 1)))
        for place, target in enumerate(streams):
            terms = [
                term
                for number, stream in enumerate(streams)
                if number != place
                for term in stream.cut(((place - number - 1) % len(streams)) * segment, segment)
            ]
            planned += _shared_out(ParityLayout(tuple(terms)), nodes[target.domain])
    return planned


class _Stream:
    """The files of a domain, one after another."""

    def __init__(self, domain: str, paths: Sequence[str], sizes: Mapping[str, int]) -> None:
        self.domain = domain
        self._paths = paths
        self._sizes = sizes
        self._ends = [*accumulate(sizes[path] for path in paths)]
        self.size = self._ends[-1] if self._ends else 0

    def cut(self, start: int, length: int) -> Iterator[ParityTerm]:
        """The ranges of files that bytes from ``start`` on are; places count from there."""
        stop = min(start + length, self.size)
        for number in range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1 if stop > start else 0):
            path, end = self._paths[number], self._ends[number]
            size = self._sizes[path]
            first, last = max(start, end - size), min(stop, end)
            yield ParityTerm(path, size, first - (end - size), last - first, first - start, self.domain)


def _shared_out(layout: ParityLayout, nodes: Sequence[int]) -> Iterator[PlannedParity]:
    """Each node of a domain gets a part of its parity."""
    if not layout.terms:
        return
    share = _aligned(-(-layout.size // len(nodes)))
    for part, node in enumerate(nodes):
        terms = tuple(layout.overlapping(part * share, (part + 1) * share))
        if terms:
            yield PlannedParity(node, ParityLayout(terms))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


# ---- what is there


def protected_files(
    stored: Sequence[tuple[str, ParityLayout]], holders: Mapping[str, AbstractSet[int]], sizes: Mapping[str, int], domains: Sequence[str]
) -> set[str]:
    """Files of which every byte is in a parity that is of use if the file's domain is lost. ``stored``: the parity files, with the domain
    of each."""
    covered: dict[str, list[tuple[int, int]]] = {}
    for domain, layout in stored:
        there = {term.path: {domains[node] for node in holders.get(term.path, ())} for term in layout.terms}
        if not all(there.values()):
            continue
        for term in layout.terms:
            own, beside = there[term.path], layout.overlapping(term.at, term.at + term.length)
            # Whatever takes the file must not take the parity, or what it takes to compute it.
            if own != {domain} and not any(there[other.path] <= own for other in beside if other.path != term.path):
                covered.setdefault(term.path, []).append((term.offset, term.offset + term.length))
    return {path for path, ranges in covered.items() if _reach(sorted(ranges)) >= sizes[path]}


def _reach(ranges: Sequence[tuple[int, int]]) -> int:
    """How far sorted ranges go from 0 on without a gap."""
    reached = 0
    for start, stop in ranges:
        if start > reached:
            break
        reached = max(reached, stop)
    return reached


# ---- computing what is lost


class ParityPiece(NamedTuple):
    """Bytes of a lost file: ``length`` of them, ``at`` so many behind the first one wanted. They are the XOR of the parity file from
    ``offset`` on, and of ``terms``, whose places count from there."""

    at: int
    length: int
    layout: ParityLayout
    offset: int
    terms: tuple[ParityTerm, ...]


class ParityTable:
    """Parity files that can be read. ``is_held``: whether somebody has a file of this path and size whole."""

    def __init__(self, layouts: Sequence[ParityLayout], is_held: Callable[[str, int], bool]) -> None:
        self._is_held = is_held
        self._of_file: dict[str, list[tuple[ParityTerm, ParityLayout]]] = {}
        for layout in layouts:
            for term in layout.terms:
                self._of_file.setdefault(term.path, []).append((term, layout))

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if no parity has anything of it."""
        terms = self._of_file.get(path)
        return terms[0][0].size if terms else None

    def pieces(self, path: str, start: int, stop: int) -> list[ParityPiece] | None:
        """How bytes ``[start, stop)`` of a file are computed; None if they cannot be."""
        pieces: list[ParityPiece] = []
        reached = start
        while reached < stop:
            candidates = (self._piece(term, layout, reached, stop) for term, layout in self._of_file.get(path, ()))
            best = max((piece for piece in candidates if piece is not None), key=lambda piece: piece.length, default=None)
            if best is None:
                return None
            pieces.append(best._replace(at=reached - start))
            reached += best.length
        return pieces

    def missing(self, path: str) -> list[ParityTerm]:
        """The other terms that it would take to compute a file, and that nobody has."""
        lost = {t.path: t for _, layout in self._of_file.get(path, ()) for t in layout.terms if t.path != path}
        return [term for _, term in sorted(lost.items()) if not self._is_held(term.path, term.size)]

    def _piece(self, term: ParityTerm, layout: ParityLayout, start: int, stop: int) -> ParityPiece | None:
        """The bytes that one parity gives from ``start`` on, as far as everything else is there."""
        stop = min(stop, term.offset + term.length)
        if not term.offset <= start < stop:
            return None
        offset = term.at + start - term.offset
        others = [t for t in layout.overlapping(offset, offset + stop - start) if (t.path, t.offset) != (term.path, start)]
        length = min((t.at for t in others if not self._is_held(t.path, t.size)), default=stop - start)
        if not length:
            return None
        terms = tuple(t._replace(length=min(t.length, length - t.at)) for t in others if t.at < length)
        return ParityPiece(0, length, layout, offset, terms)
