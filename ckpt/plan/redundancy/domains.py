"""Which machines keep second copies of each other's files, so that a checkpoint survives the loss of machines. Pure.

A *domain* is what fails together: a machine, or a rack of them. Domains are put into groups, and a domain's files are copied to others of
its group alone, so that few combinations of losses hit all holders of a file (Gemini's placement, SOSP 2023):

    copies = 1        a ⇄ b      c ⇄ d      e → f → g → e          groups of copies + 1; what is left over joins the last group,
                                                                   in which each copies to the next ones, around the ring
    copies = 2        a ⇄ b ⇄ c ⇄ a      d → e, f; e → f, g; …

Of two losses among 16 domains with one copy, 8 of 120 pairs hit a group: 93.3 % are survived. Copies to random domains would survive none
of the pairs that happen to share a file, which soon are all of them.

Every rank computes the same from the names of the domains.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
