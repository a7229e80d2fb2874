"""Policies as text: what is shown makes an equal policy again, and so do JSON and the forms of --keep."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import policies
from ckpt.errors import UsageError
from ckpt.policies import (
    KEEP_RULES,
    All,
    AnyOf,
    AtSteps,
    Best,
    EverySteps,
    KeepPolicy,
    Latest,
    SavePolicy,
    Tagged,
    Within,
    from_json,
    parse_keep,
    to_json,
)
from tests.policies.jobs import any_of, keeping, saving


@given(any_of(saving) | any_of(keeping))
def test_what_is_shown_makes_it_again(policy: SavePolicy | KeepPolicy) -> None:
    again = eval(repr(policy), vars(policies))
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(policy) == repr(policy)


@given(any_of(saving) | any_of(keeping))
def test_json_makes_it_again(policy: SavePolicy | KeepPolicy) -> None:
    again = from_json(json.loads(json.dumps(to_json(policy))))
    assert again == policy
    assert type(again) is type(policy)


def test_how_they_are_shown() -> None:
    shown = [
        EverySteps(500) | AtSteps([9, 1], 3),
        Latest(3) | EverySteps(1000, start=500),
        Best("loss", mode="min"),
        Best("acc", 2, mode="max"),
        Within(days=7),
        Tagged("a*", "b"),
        All(),
    ]
    assert [str(p) for p in shown] == [
        "EverySteps(500) | AtSteps(1, 3, 9)",
        "Latest(3) | EverySteps(1000, start=500)",
        "Best('loss', mode='min')",
        "Best('acc', n=2, mode='max')",
        "Within(days=7)",
        "Tagged('a*', 'b')",
        "All()",
    ]


def test_the_json_of_some() -> None:
    assert to_json(Latest(3) | EverySteps(1000) | Tagged("a*")) == {
        "policy": "AnyOf",
        "policies": [{"policy": "Latest", "n": 3}, {"policy": "EverySteps", "n": 1000, "start": 0}, {"policy": "Tagged", "globs": ["a*"]}],
    }
    assert from_json({"policy": "EverySteps", "n": 7}) == EverySteps(7)


def test_joining_flattens() -> None:
    assert AnyOf(Latest(3)) == Latest(3)
    assert Latest(3) | Latest(3) == Latest(3)
    assert Latest(3) | (EverySteps(5) | Latest(3)) | Tagged() == AnyOf(Latest(3), EverySteps(5), Tagged())
    assert EverySteps(5) | (EverySteps(6) | EverySteps(5)) == EverySteps(5) | EverySteps(6)
    assert EverySteps(5) | EverySteps(6) != EverySteps(6) | EverySteps(5)
    assert EverySteps(5) | EverySteps(6) != EverySteps(5)
    assert policies.Any is AnyOf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest=3", Latest(3)),
        (" latest=3 ", Latest(3)),
        ("every=1000", EverySteps(1000)),
        ("every=1000:500", EverySteps(1000, start=500)),
        ("within=7d", Within(days=7)),
        ("within=36h", Within(hours=36)),
        ("within=1d12h", Within(days=1, hours=12)),
        ("within=0.5d", Within(days=0.5)),
        ("best=loss:min", Best("loss", mode="min")),
        ("best=loss:min:2", Best("loss", 2, mode="min")),
        ("best=val:loss/a=b:max:10", Best("val:loss/a=b", 10, mode="max")),
        ("best=min:max", Best("min", mode="max")),
        ("tagged", Tagged()),
        ("tagged=release*", Tagged("release*")),
        ("all", All()),
    ],
)
def test_parse_keep(text: str, expected: KeepPolicy) -> None:
    assert parse_keep(text) == expected


@pytest.mark.parametrize(("rule", "form"), KEEP_RULES.items())
def test_the_forms_in_hints_are_forms(rule: str, form: str) -> None:
    examples = [word for word in re.split(r"[ ,]+", re.sub(r"\(.*?\)", "", form)) if word.startswith(rule)]
    assert examples
    assert [type(parse_keep(example)).__name__ for example in examples]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lates=3", ["'lates'", *KEEP_RULES.values()]),
        ("", ["no rule ''", *KEEP_RULES.values()]),
        ("3", ["'3'"]),
        ("latest", ["has another form", "latest=3"]),
        ("latest=", ["has no value", "latest=3"]),
        ("latest=0", ["at least 1, not 0", "latest=3", "(latest=0)"]),
        ("latest=-1", ["latest=3"]),
        ("latest=1_000", ["latest=3"]),
        ("latest=٣", ["latest=3"]),
        ("latest=" + "9" * 5000, ["latest=3"]),
        ("every=0", ["at least 1, not 0", "every=1000"]),
        ("every=10:", ["every=1000:500"]),
        ("within", ["within=7d"]),
        ("within=7", ["within=7d"]),
        ("within=0h", ["Within() needs a time"]),
        ("within=999999999d999999999h", ["longer than time"]),
        ("best=loss", ["best=loss:min"]),
        ("best=:min", ["best=loss:min"]),
        ("best=loss:least", ["best=loss:min"]),
        ("best=loss:min:0", ["Best(n)", "best=loss:min"]),
        ("all=1", ["has another form"]),
    ],
)
def test_what_parse_keep_refuses(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keep(text)
    assert [word for word in words if word not in str(caught.value)] == []


@given(st.text() | st.builds("{}={}".format, st.sampled_from(list(KEEP_RULES)), st.text("0123456789dh.:minaxé\n*", max_size=12)))
def test_any_text_is_a_policy_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(parse_keep(text), KeepPolicy)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (None, "None is not a policy"),
        ("Latest", "is not a policy"),
        ({"n": 3}, "is not a policy"),
        ({"policy": "Lates"}, "there is no policy 'Lates'"),
        ({"policy": "Latest"}, "its arguments are: n"),
        ({"policy": "Latest", "n": 3, "m": 4}, "its arguments are: n"),
        ({"policy": "Latest", "n": "3"}, "not '3'"),
        ({"policy": "AtSteps", "steps": 3}, "AtSteps has one argument, a list: 'steps'"),
        ({"policy": "AtSteps", "steps": [1], "n": 1}, "one argument"),
        ({"policy": "AtSteps", "steps": [None]}, "not None"),
        ({"policy": "Tagged", "globs": [3]}, "not 3"),
        ({"policy": "AnyOf", "policies": []}, "no policies"),
        ({"policy": "AnyOf", "policies": [{"policy": "Latest", "n": 3}, {"policy": "OnPreemption"}]}, "cannot be joined"),
    ],
)
def test_what_from_json_refuses(node: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_json(node)
    assert words in str(caught.value)


def test_a_policy_of_ones_own_has_no_json() -> None:
    class Mine(Latest):
        pass

    with pytest.raises(UsageError, match="cannot be written as JSON"):
        to_json(Latest(1) | Mine(3))


# ---------------------------------------------- The blocks of docs/policies.md run, one after another, and their tables name what there is.

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
