"""The scenarios of `make trainers` whose packages are in the development environment, in one process: what comes back is drawn from
another seed first. Each of their jobs ends as ``expected.toml`` has it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.trainers import lives

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPECTED = tomllib.loads((Path(__file__).parent / "expected.toml").read_text())
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of the libraries among themselves
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata's loader, by torch
    pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching:UserWarning"),  # of torchao's tensors, by torch
    pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning"),  # of torchdata, by torch
]


@pytest.mark.parametrize("name", ["ema_pytorch", "schedulefree", "peft", "torchao", "accelerate-data"])
def test_outcomes(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition("-")[0])
    outcomes = {}
    for case, make in importlib.import_module(f"tests.trainers.{name.replace('-', '_')}").CASES.items():
        whole, first, again = (life(make, str(tmp_path / case)) for life in (lives.whole, lives.first, lives.again))
        outcomes[case], _ = lives.compared(whole, first, again)
    assert outcomes == EXPECTED[name]["cases"]


def test_a_value_that_is_lost_is_an_outcome() -> None:
    """The comparison itself: a tensor that differs, one that is missing, and a life that failed."""
    whole = {"saved": {"w": "1", "m": "2"}, "end": {"w": "3", "m": "4"}}
    assert lives.compared(whole, {}, whole) == ("resumes", "")
    assert lives.compared(whole, {}, {**whole, "end": {"w": "3", "m": "0"}}) == ("differs", "after end: 1 of 2: m")
    assert lives.compared(whole, {}, {**whole, "saved": {"w": "1"}}) == ("differs", "after saved: 1 of 2: m")
    assert lives.compared(whole, {"outcome": "StateError at save", "text": "t"}, {}) == ("StateError at save", "t")
