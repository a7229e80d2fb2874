"""Sets of numbers (ranks, files) as runs, in few bytes where most of them follow each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]
"""Increasing: the first number of each run, and how many follow each other."""


def runs_of(numbers: Iterable[int]) -> Runs:
    """Numbers as runs."""
    runs: list[list[int]] = []
    for number in sorted({*numbers}):
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return tuple((first, count) for first, count in runs)


def numbers_in(runs: Iterable[Iterable[int]]) -> list[int]:
    """The numbers of runs."""
    return [number for first, count in runs for number in range(first, first + count)]
