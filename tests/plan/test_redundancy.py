"""Second copies: never in the same domain, never more than asked for, and as many losses survived as placement in groups can."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.copies import backup_domains, domain_groups, is_complete, missing_copies

NAMES = st.lists(st.sampled_from([f"host{n}" for n in range(12)]), min_size=1, max_size=20)


def after(holders: dict[str, set[int]], domains: list[str], copies: int) -> dict[str, set[int]]:
    done = {path: set(nodes) for path, nodes in holders.items()}
    for path, source, target in missing_copies(holders, domains, copies):
        assert source in done[path] and target not in done[path]
        done[path].add(target)
    return done


@st.composite
def held(draw: st.DrawFn) -> tuple[dict[str, set[int]], list[str], int]:
    domains = draw(NAMES)
    nodes = st.sets(st.integers(0, len(domains) - 1), min_size=1, max_size=3)
    return draw(st.dictionaries(st.text("abc", min_size=1, max_size=3), nodes, max_size=6)), domains, draw(st.integers(1, 3))


@given(held())
def test_every_file_gets_into_so_many_domains_and_no_more(case: tuple[dict[str, set[int]], list[str], int]) -> None:
    holders, domains, copies = case
    done = after(holders, domains, copies)
    for path, nodes in done.items():
        before, now = {domains[n] for n in holders[path]}, {domains[n] for n in nodes}
        assert len(now) >= min(copies + 1, len({*domains}))
        assert len(nodes - holders[path]) == len(now - before)  # each copy is in a domain that had none
        assert len(nodes - holders[path]) <= max(0, copies + 1 - len(before))
    assert is_complete(done, domains, copies) and missing_copies(done, domains, copies) == []


@given(NAMES, st.integers(1, 3))
def test_groups_are_as_small_as_they_can_be(domains: list[str], copies: int) -> None:
    groups = domain_groups(domains, copies)
    assert sorted(name for group in groups for name in group) == sorted({*domains})
    assert all(len(group) == copies + 1 for group in groups[:-1])
    assert len(groups[-1]) < 2 * (copies + 1) and (len(groups) == 1 or len(groups[-1]) >= copies + 1)
    for name, backups in backup_domains(domains, copies).items():
        group = next(g for g in groups if name in g)
        assert name not in backups and {*backups} <= {*group} and len(backups) == min(copies, len({*domains}) - 1)


def test_a_file_that_replicas_have_on_two_machines_is_not_copied() -> None:
    assert missing_copies({"a": {0, 2}, "b": {1}}, ["x", "y", "z"], 1) == [("b", 1, 2)]
    assert not is_complete({"a": set()}, ["x", "y"], 1)  # lost


def survived(domains: list[str], copies: int, losses: int) -> float:
    """The part of all losses of so many domains that leaves a holder of each domain's files, counted one by one."""
    backups = backup_domains(domains, copies)

    def whole(lost: Collection[str]) -> bool:
        return all(not {name, *backups[name]} <= {*lost} for name in lost)

    cases = list(combinations(sorted({*domains}), losses))
    return sum(map(whole, cases)) / len(cases)


def of_pairs(machines: int, losses: int) -> float:
    """The same by arithmetic, for pairs: ways to lose at most one of each, over all ways."""
    return comb(machines // 2, losses) * 2**losses / comb(machines, losses)


def test_losses_that_are_survived() -> None:
    sixteen = [f"host{n:02}" for n in range(16)]
    assert round(survived(sixteen, 1, 2), 3) == 0.933 and round(survived(sixteen, 1, 3), 3) == 0.8
    assert all(survived(sixteen[:n], 1, k) == pytest.approx(of_pairs(n, k)) for n in (4, 8, 12, 16) for k in (1, 2, 3))
    assert survived(sixteen[:15], 2, 2) == 1.0
    assert of_pairs(10_000, 2) > 0.9998


def test_ten_thousand_machines_take_no_time() -> None:
    domains = [f"host{n:05}" for n in range(10_000)]
    wanted = missing_copies({f"data/{n}": {n} for n in range(10_000)}, domains, 1)
    assert len(wanted) == 10_000
    assert {(c.source, c.target) for c in wanted} == {(n, n ^ 1) for n in range(10_000)}
