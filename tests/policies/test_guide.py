"""The blocks of docs/policies.md run, one after another, and their tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt import policies
from ckpt.policies import parse_keep

GUIDE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


def test_the_examples_hold() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert "verdicts" in names
    own = [names["PowersOfTwo"](), names["Improving"]()]
    assert own[0].due(policies.Moment(step=64, started_step=0)) == "a power of two"
    steps = [policies.StepInfo(step=n, created=names["start"], metrics={"loss": loss}) for n, loss in enumerate([3.0, 4.0, 2.0])]
    assert own[1].explain(steps) == {0: "a new low", 1: None, 2: "a new low"}


def _rows() -> list[tuple[str, str]]:
    table = GUIDE.partition("| form | policy |")[2].partition("\n\n")[0]
    cells = (re.findall(r"`([^`]+)`", cell) for row in table.splitlines()[2:] for cell in row.strip("|").split(" | "))
    flat = list(cells)
    return [pair for forms, calls in zip(flat[::2], flat[1::2], strict=True) for pair in zip(forms, calls, strict=True)]


@pytest.mark.parametrize(("form", "call"), _rows())
def test_the_table_of_forms_holds(form: str, call: str) -> None:
    assert parse_keep(form) == eval(call, vars(policies))


def test_the_table_of_forms_has_every_rule() -> None:
    assert {form.partition("=")[0] for form, _ in _rows()} == set(policies.KEEP_RULES)
