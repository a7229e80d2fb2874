"""A short run of the fuzzer, the same cases each time; ``--slow`` runs more. And that the fuzzer sees what it looks for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

import ckpt
from tests.fuzz.__main__ import make, run
from tests.fuzz.seeds import KINDS, seeds

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about forks and types; a case is a process of its own


def findings(kind: str, cases: range) -> list[str]:
    outcomes = {case: run(make(kind, 1, case)) for case in cases}
    return [f"case {case}: {o.kind} {o.detail}" for case, o in outcomes.items() if not o.right]


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_cases(kind: str) -> None:
    assert findings(kind, range(3)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases(kind: str) -> None:
    assert findings(kind, range(3, 203)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_cases_are_made_of_is_read(kind: str) -> None:
    outcomes = [run(files) for files in seeds(kind)[:2]]
    assert all(outcome.right for outcome in outcomes), outcomes
    assert any(outcome.kind == "read" for outcome in outcomes), outcomes


def _raise(*_: object) -> NoReturn:
    raise ValueError("not one of ours")


@pytest.mark.parametrize(
    ("reading", "kind"),
    [
        (_raise, "wrong exception"),
        (lambda url: os.kill(os.getpid(), signal.SIGSEGV), "crash"),
        (lambda url: bytearray(8 << 30), "wrong exception"),
        (lambda url: os.kill(os.getpid(), signal.SIGALRM) or time.sleep(60), "hang"),
        (lambda url: open("ckpt-fuzz-code-ran", "w").close(), "code ran"),
    ],
)
def test_it_sees_what_it_looks_for(monkeypatch: pytest.MonkeyPatch, reading: Callable[[str], object], kind: str) -> None:
    monkeypatch.setattr(ckpt, "open", reading)
    assert run(seeds("safetensors")[0]).kind == kind
