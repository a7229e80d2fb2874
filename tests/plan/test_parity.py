"""Parity over groups: any one domain of each may be lost, and every byte of it is computed from what is left."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.copies import domain_groups, even_groups
from ckpt.plan.parity import ParityLayout, ParityTable, ParityTerm, plan_parity, protected_files

Files = dict[str, bytes]


def parity_of(layout: ParityLayout, files: Files) -> bytes:
    """The XOR of the terms."""
    result = np.zeros(layout.size, dtype=np.uint8)
    for term in layout.terms:
        assert len(files[term.path]) == term.size and term.offset + term.length <= term.size
        result[term.at : term.at + term.length] ^= np.frombuffer(files[term.path], np.uint8, term.length, term.offset)
    return result.tobytes()


def computed(table: ParityTable, parity: dict[str, bytes], files: Files, path: str, start: int, stop: int) -> bytes | None:
    pieces = table.pieces(path, start, stop)
    if pieces is None:
        return None
    out = b""
    for piece in pieces:
        assert piece.at == len(out)
        block = np.frombuffer(parity[piece.layout.name], np.uint8, piece.length, piece.offset).copy()
        for t in piece.terms:
            block[t.at : t.at + t.length] ^= np.frombuffer(files[t.path], np.uint8, t.length, t.offset)
        out += block.tobytes()
    return out


class Job:
    """Nodes with files of random bytes, and the parity that is planned for them."""

    def __init__(self, domains: Sequence[str], lengths: Sequence[Sequence[int]], members: int) -> None:
        self.domains = domains
        randomness = random.Random(0)
        self.holders = {f"data/{node}-{n}": {node} for node, sizes in enumerate(lengths) for n in range(len(sizes))}
        self.files = {
            path: randomness.randbytes(lengths[int(path[5:].split("-")[0])][int(path[5:].split("-")[1])]) for path in self.holders
        }
        self.sizes = {path: len(data) for path, data in self.files.items()}
        self.groups = even_groups(domain_groups(domains, members - 1), members)
        self.planned = plan_parity(self.holders, self.sizes, domains, self.groups)
        self.parity = {one.layout.name: parity_of(one.layout, self.files) for one in self.planned}

    def without(self, lost: set[str]) -> ParityTable:
        left = {path for path, (node,) in self.holders.items() if self.domains[node] not in lost}
        layouts = [one.layout for one in self.planned if self.domains[one.target] not in lost]
        return ParityTable(layouts, lambda path, size: path in left and self.sizes[path] == size)

    def of(self, domain: str) -> list[str]:
        return [path for path, (node,) in self.holders.items() if self.domains[node] == domain]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Up to nine nodes, some of them in one domain, with up to three files each, of unequal lengths."""
    nodes = draw(st.integers(2, 9))
    domains = [f"host{draw(st.integers(0, n))}" for n in range(nodes)]
    lengths = [draw(st.lists(st.sampled_from([0, 1, 7, 4095, 4096, 5000, 20_000]), max_size=3)) for _ in domains]
    return Job(domains, lengths, draw(st.integers(3, 5)))


@given(jobs(), st.randoms(use_true_random=False))
def test_whatever_domain_is_lost_every_byte_comes_back(job: Job, randomness: random.Random) -> None:
    lost = {randomness.choice(group) for group in job.groups}  # one of each group
    if len({*job.domains}) == 1:
        assert not job.planned
        return
    table = job.without(lost)
    for path in (path for domain in lost for path in job.of(domain) if job.sizes[path]):
        size = job.sizes[path]
        first = randomness.randrange(size)
        last = randomness.randrange(first, size) + 1
        for start, stop in ((0, size), (first, last)):
            assert computed(table, job.parity, job.files, path, start, stop) == job.files[path][start:stop]


@given(jobs())
def test_no_parity_has_two_terms_of_one_domain_at_a_place_nor_one_of_its_own(job: Job) -> None:
    for target, layout in job.planned:
        assert {t.domain for t in layout.terms} <= {*job.domains} - {job.domains[target]}
        for at in {t.at for t in layout.terms}:
            domains = [t.domain for t in layout.overlapping(at, at + 1)]
            assert len(domains) == len({*domains})
    stored = [(job.domains[target], layout) for target, layout in job.planned]
    safe = protected_files(stored, job.holders, job.sizes, job.domains)
    assert safe == {path for path in job.holders if job.sizes[path] and len({*job.domains}) > 1}
    if stored:  # without one of them something is not safe, and nothing that it does not cover is lost
        assert {t.path for t in stored[0][1].terms} & (safe - protected_files(stored[1:], job.holders, job.sizes, job.domains))


def test_groups_are_as_even_as_they_can_be() -> None:
    names = [f"host{n:02}" for n in range(11)]
    assert [len(group) for group in even_groups(domain_groups(names, 3), 4)] == [6, 5]
    assert [len(group) for group in even_groups(domain_groups(names[:2], 3), 4)] == [2]
    assert sorted(name for group in even_groups(domain_groups(names, 3), 4) for name in group) == names


@pytest.mark.parametrize("members", [3, 4, 8])
def test_space_and_traffic(members: int) -> None:
    """Of equal files: parity takes 1 / (members - 1) of them, and each byte travels once."""
    job = Job([f"host{n}" for n in range(members)], [[(members - 1) * 8192]] * members, members)
    data = sum(job.sizes.values())
    assert sum(one.layout.size for one in job.planned) * (members - 1) == data
    assert sum(t.length for one in job.planned for t in one.layout.terms) == data
    assert len(job.planned) == members


def test_nodes_of_a_domain_share_its_parity() -> None:
    job = Job(["a", "a", "b", "c"], [[9000], [9000], [20_000], [16_000]], 3)
    shares = [sum(one.layout.size for one in job.planned if one.target == node) for node in range(4)]
    assert shares[0] and shares[1] and shares[0] + shares[1] <= shares[2] + 4096


def test_two_losses_in_a_group_are_named() -> None:
    job = Job(["a", "b", "c"], [[9000], [9000], [9000]], 3)
    table = job.without({"a", "b"})
    assert table.size("data/0-0") == 9000 and table.pieces("data/0-0", 0, 9000) is None
    assert {(t.path, t.domain) for t in table.missing("data/0-0")} == {("data/1-0", "b")}
    assert table.size("data/9-9") is None and table.pieces("data/9-9", 0, 1) is None


def test_bytes_that_nothing_missing_was_mixed_into_can_be_computed() -> None:
    """The parity is of a file and of a shorter one, which is gone, too: the rest is there."""
    layout = ParityLayout((ParityTerm("x", 100, 0, 100, 0, "a"), ParityTerm("y", 30, 0, 30, 20, "b")))
    table = ParityTable([layout], lambda path, size: False)
    assert table.pieces("x", 0, 100) is None and table.pieces("x", 0, 20) is not None and table.pieces("x", 50, 100) is not None


def test_the_same_plan_has_the_same_names() -> None:
    one, other = (Job(["a", "b", "c"], [[90], [50], [70]], 3) for _ in range(2))
    assert [p.layout.name for p in one.planned] == [p.layout.name for p in other.planned]
    assert len({p.layout.name for p in one.planned}) == 3


def test_ten_thousand_machines_take_no_time() -> None:
    domains = [f"host{n:05}" for n in range(10_000)]
    holders: dict[str, set[int]] = {f"data/{n:05}": {n} for n in range(10_000)}
    planned = plan_parity(holders, dict.fromkeys(holders, 1 << 30), domains, domain_groups(domains, 3))
    assert len(planned) == 10_000 and {one.target for one in planned} == {*range(10_000)}
