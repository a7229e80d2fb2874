"""Mistakes that are easily made: each is told, none loads or saves something else in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckpt
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import LayoutError, MismatchError, NamesError, NotFoundError, UsageError


def test_a_layout_for_another_number_of_ranks(url: str) -> None:
    ckpt.save(url, {"w": torch.arange(8)})
    layout = ckpt.Layout({"tp": 2}, [("*", ckpt.Shard(0, "tp"))])
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(LayoutError, match=r"is for 2 ranks \(0, 1\), the call is made by 1"):
            call(url, {"w": torch.zeros(4, dtype=torch.int64)}, layout=layout)


@pytest.mark.parametrize("layout", [{"tp": 1}, "tp"])
def test_what_is_no_layout(url: str, layout: Any) -> None:
    with pytest.raises(UsageError, match="must be a ckpt.Layout"):
        ckpt.save(url, {"w": torch.zeros(4)}, layout=layout)


@pytest.mark.parametrize("progress", [True, "yes", 3])
def test_progress_that_cannot_be_called(url: str, progress: Any) -> None:
    ckpt.save(url, {"w": torch.zeros(4)})
    calls: list[Callable[[], object]] = [
        lambda: ckpt.verify(url, progress=progress),
        lambda: ckpt.copy(url, f"{url}-copy", progress=progress),
        lambda: ckpt.convert(url, f"{url}-copy", to="native", progress=progress),
        lambda: ckpt.merge(f"{url}-copy", [url, url], progress=progress),
        lambda: import_checkpoint(url, f"{url}-copy", progress=progress),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=f"progress= takes a function of bytes done and bytes in all, not {progress!r}"):
            call()
    with pytest.raises(NotFoundError):
        ckpt.open(f"{url}-copy")


def test_rules_may_be_a_dict_and_must_be_rules() -> None:
    layout = ckpt.Layout({"tp": 2}, {"*": ckpt.Shard(0, "tp")})  # type: ignore[arg-type]
    assert layout.place("w", (2,), 0).shape == (4,)
    assert repr(layout) == "Layout({tp: 2}, 1 rules)"
    with pytest.raises(LayoutError, match="not a rule"):
        ckpt.Layout({"tp": 2}, [ckpt.Replicate()])  # type: ignore[list-item]


@pytest.mark.parametrize("given", [{"only": "modle.*"}, {"only": ["model.w", "model.bais"]}, {"rename": {"modle.*": "net.*"}}])
def test_a_pattern_that_no_name_fits(url: str, given: dict[str, Any]) -> None:
    ckpt.save(url, {"model": {"w": torch.ones(2), "bias": torch.ones(2)}, "n": 1})
    state = {"model": {"w": torch.zeros(2), "bias": torch.zeros(2)}, "n": 0}
    with pytest.raises(NamesError, match=r"match no name \(1\)"):
        ckpt.load(url, state, **given)
    assert state["model"]["w"].sum() == 0  # type: ignore[index]
    ckpt.load(url, state, strict=False, **given)


@pytest.mark.parametrize(
    "only",
    [
        "model.*",
        "model",
        "n",
        "optimizer.*",
        "optimizer.state.*",
        "optimizer.model.weight*",
        "*",
        "cfg.*",
        "cfg.a",
        "optimizer.param_groups",
    ],
)
def test_patterns_that_fit(url: str, only: str) -> None:
    def state() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "n": 1, "cfg": {"a": 1, "b": 2}}

    ckpt.save(url, state())
    ckpt.load(url, state(), only=only)


def test_another_kind_of_optimizer(url: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    ckpt.save(url, {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError, match="another kind of optimizer"):
        ckpt.load(url, {"model": model, "optimizer": other})
    assert not other.state and "momentum" not in other.param_groups[0]


def test_interleaved_groups_must_be_equal() -> None:
    layout = ckpt.Layout({"tp": 1}, [("*", ckpt.Interleaved(0, "tp", 2))])
    with pytest.raises(LayoutError, match="not 2 equal groups"):
        layout.place("w", (5,), 0)


def test_three_tied_names_of_which_the_first_is_not_stored(url: str) -> None:
    ckpt.save(url, {"b": torch.ones(2), "c": torch.full((2,), 2.0)})
    w = torch.zeros(2)
    with pytest.raises(MismatchError, match="the state ties it to b"):
        ckpt.load(url, {"a": w, "b": w, "c": w})
    assert w.tolist() == [0, 0]


def test_autograd_notices_a_load(url: str) -> None:
    ckpt.save(url, {"w": torch.ones(2)})
    w = torch.zeros(2)
    before = w._version
    ckpt.load(url, {"w": w})
    assert w._version > before


def misfit(url: str, saved: dict[str, Any], state: dict[str, Any], **options: Any) -> tuple[str, str]:
    """The message and the hint of a load that does not fit."""
    ckpt.save(url, saved)
    with pytest.raises(MismatchError) as raised:
        ckpt.load(url, state, **options)
    return raised.value.message, str(raised.value.hint)


@pytest.mark.parametrize(
    ("saved", "state", "ways"),
    [
        ({"w": torch.ones(8, 4)}, {"w": torch.ones(4, 4)}, {"layout="}),
        ({"w": torch.ones(8, 4)}, {"w": torch.ones(7, 4)}, {"ckpt inspect", "only="}),
        ({"w": torch.ones(8)}, {"w": torch.ones(8, dtype=torch.float64)}, {"cast="}),
        ({"w": torch.ones(8), "v": torch.ones(1)}, {"w": torch.ones(8)}, {"only=", "strict="}),
        ({"w": torch.ones(8)}, {"v": torch.ones(8)}, {"rename=", "only=", "strict="}),
        ({"w": torch.ones(8), "v": torch.ones(1)}, {"w": torch.ones(8, dtype=torch.float64)}, {"only=", "strict=", "cast="}),
    ],
)
def test_the_hint_is_about_what_was_found(url: str, saved: dict[str, Any], state: dict[str, Any], ways: set[str]) -> None:
    _, hint = misfit(url, saved, state)
    assert {way for way in ("rename=", "only=", "strict=", "cast=", "layout=", "PerRank", "ckpt inspect") if way in hint} == ways


@pytest.mark.parametrize(
    ("saved", "state", "said"),
    [
        (ckpt.PerRank(3), 4, "x: a PerRank in the checkpoint, a plain value in the state"),
        (ckpt.PerRank([3]), [4], "x: a PerRank in the checkpoint, a plain value in the state"),
        (ckpt.PerRank(torch.ones(2)), torch.ones(2), "x: a PerRank in the checkpoint, a tensor in the state"),
        (3, ckpt.PerRank(4), "x: one value of all ranks in the checkpoint, a tensor or a PerRank in the state"),
        (torch.ones(2), ckpt.PerRank(torch.ones(2)), "x: one tensor of all ranks in the checkpoint, a PerRank in the state"),
    ],
)
def test_a_value_per_rank_on_one_side_only(url: str, saved: object, state: object, said: str) -> None:
    message, hint = misfit(url, {"x": saved, "y": 1}, {"x": state, "y": 1})
    assert said in message and "ckpt.PerRank on both sides" in hint
