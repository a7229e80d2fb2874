"""Values that are not tensors, names, schedulers and other objects, and values of single ranks."""

from __future__ import annotations

import copy
import datetime
import enum
import math
import random
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedulers

import ckpt
from ckpt import PerRank
from ckpt.engine.verify import verify
from ckpt.errors import MismatchError, NamesError, NotFoundError, StateError
from ckpt.plan import tree
from ckpt.state.torch_objects import set_options
from tests.api.checked import described, empty_directory, pattern, same, save
from tests.golden import generate as golden

GOLDEN = str(Path(golden.__file__).parent / "v1")
"""Saved by two ranks."""

# ------------------------------------------------------------------------------------------------------------- values

VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "integers": [0, -1, 2**63, -(2**200), 10**4000],
    "floats": [0.0, -0.0, 1e-310, 0.1, 1e308, math.inf, -math.inf, math.nan],
    "complex": [1j, complex(math.nan, -0.0)],
    "text": ["", "naïve ☃ 𝄞", '\0\n"\\', "$tensor", "a" * 10_000],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "tuples": ((), (1,), (1, (2, [3, (4,)]))),
    "sets": [set(), {1, 2.5, "x", None, (1, 2)}, frozenset({frozenset(), b"x"})],
    "dicts": [{}, {"a": {}}, {"$tensor": "a.w", "$": 1}, {"": 0}],
    "keys": {1: "int", "2": "str", (1, 2): "tuple", None: "none", 1.5: "float", b"b": "bytes", False: "bool", "a.b": 1, "a": {"c": 2}},
    "numpy": [np.float32(1.5), np.int8(-3), np.bool_(True), np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros((0, 3)), np.array(2j)],
    "strided numpy": [np.arange(10)[::-2], np.arange(6).reshape(2, 3).T],
    "torch": [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3]), torch.Size([])],
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("beside", [{}, {"t": torch.ones(2)}], ids=["alone", "beside a tensor"])
def test_values_come_back_as_they_were(url: str, kind: str, beside: dict[str, torch.Tensor]) -> None:
    save(url, {"value": VALUES[kind], "deep": [{"x": VALUES[kind]} | beside]})
    state: dict[str, Any] = {"value": "old", "deep": [{"x": "old"} | {k: torch.zeros(2) for k in beside}]}
    ckpt.load(url, state)
    assert same(state, {"value": VALUES[kind], "deep": [{"x": VALUES[kind]} | beside]})
    assert same(ckpt.open(url).state()["value"], VALUES[kind])


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=5) | st.binary(max_size=5)
_keys = st.text(max_size=4) | st.integers(-3, 3) | st.tuples(st.text(max_size=2), st.integers(0, 2))
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(_keys, _values, max_size=4))
def test_any_nested_values_come_back(state: dict[Any, Any]) -> None:
    paths = [path for path, _ in tree.leaves(tree.encode(state, "", lambda value, path: None))]
    assume(len(set(paths)) == len(paths))
    with empty_directory() as root:
        ckpt.save(root, state)
        target = dict.fromkeys(state, "old")
        ckpt.load(root, target)
        assert same(target, state)
        ordered = [tree.text(tree.encode(values, "", lambda value, path: None), sort_keys=False) for values in (target, state)]
        assert ordered[0] == ordered[1]


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")

REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), "state_dict and load_state_dict"),
    "function": (lambda: 0, "state_dict and load_state_dict"),
    "generator": (torch.Generator(), "PerRank"),
    "module class": (nn.Linear, "make it a tensor"),
    "date": (datetime.date(2020, 1, 1), "make it a tensor"),
    "path": (Path("x"), "os.fspath(value)"),
    "slice": (slice(1, 2), "value.start"),
    "range": (range(3), "value.start"),
    "enum": (Colour.RED, ".value"),
    "namedtuple": (Pair(1, 2), "_asdict"),
    "bytearray": (bytearray(b"x"), "bytes(value)"),
    "array of objects": (np.array([None]), "tolist"),
    "array of text": (np.array(["x"]), "tolist"),
    "tensor in a set": ({torch.ones(1)}, "make it a tensor"),
    "surrogates": ("\ud800", "bytes"),
    "an integer of 5000 digits": (10**5000, "to_bytes"),
    "tensor as key": ({torch.ones(1): 1}, "make it a tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stored_is_named_with_a_way_out(url: str, kind: str) -> None:
    value, way_out = REFUSED[kind]
    with pytest.raises(StateError) as caught:
        ckpt.save(url, {"w": torch.ones(1), "outer": {"inner": [1, value]}})
    assert "outer.inner.1" in str(caught.value)
    assert caught.value.hint and way_out in caught.value.hint
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
    assert not Path(url).exists()


def test_a_state_that_contains_itself(url: str) -> None:
    state: dict[str, Any] = {"a": {"b": []}}
    state["a"]["b"].append(state["a"])
    with pytest.raises(StateError, match=r"a\.b\.0.*contains itself"):
        ckpt.save(url, state)


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "key",
    ["with space", "sla/sh", "ünïcödé ☃", "a.b.c", "x[0:1]", "]", "[", '"quoted"', "$dollar", "__metadata__", "x@rank0", "..", "*", "a\\b"],
)
def test_names_of_tensors_may_have_any_characters(url: str, key: str) -> None:
    tensor = pattern(torch.float32, 3, 2)
    assert save(url, {key: tensor, "in": {key: [tensor + 1]}}).keys() == {key, f"in.{key}.0"}
    state = {key: torch.zeros(3, 2), "in": {key: [torch.zeros(3, 2)]}}
    ckpt.load(url, state)
    assert described(state[key]) == described(tensor)  # type: ignore[arg-type]
    assert described(ckpt.open(url)[f"in.{key}.0"].read()) == described(tensor + 1)


@settings(max_examples=60)
@given(
    st.recursive(
        st.just(None),
        lambda inner: st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3), inner, max_size=3
        ),
        max_leaves=6,
    )
)
def test_names_are_the_keys_joined_by_dots(shape: Any) -> None:
    """Or, if two tensors get one name or one has none, an error."""
    names: list[str] = []

    def made(value: Any, path: str) -> Any:
        if value is None:
            names.append(path)
            return torch.full((1,), len(names))
        return {k: made(v, f"{path}.{k}" if path else k) for k, v in value.items()}

    state = {"x": made(shape, "x"), **(made(shape, "") if isinstance(shape, dict) else {})}
    # a key "x" of the shape replaces the first: then its names are gone
    kept = _paths(state)
    with empty_directory() as root:
        if len(set(kept)) < len(kept) or "" in kept:
            with pytest.raises(StateError):
                ckpt.save(root, state)
            return
        assert save(root, state).keys() == set(kept)
        assert sorted(ckpt.open(root)) == sorted(kept)


def _paths(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [path]
    return [p for k, v in value.items() for p in _paths(v, f"{path}.{k}" if path else k)]


def test_keys_of_other_kinds_give_names_too(url: str) -> None:
    state = {0: torch.zeros(1), "layers": {1: torch.ones(3), (2, "a"): torch.ones(2), None: torch.ones(1)}}
    assert save(url, state).keys() == {"0", "layers.1", 'layers.{"$tuple":[2,"a"]}', "layers.null"}
    target = {0: torch.ones(1), "layers": {1: torch.zeros(3), (2, "a"): torch.zeros(2), None: torch.zeros(1)}}
    ckpt.load(url, target)
    assert same(target, state)


COLLISIONS: dict[str, dict[Any, Any]] = {
    "dots": {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
    "integer and text": {0: torch.zeros(1), "0": torch.zeros(1)},
    "index and key": {"a": [torch.zeros(1)], "a.0": torch.zeros(1)},
    "module and tensor": {"m": nn.Linear(1, 1), "m.bias": torch.zeros(1)},
    "one memory": {"a.b": (_shared := torch.zeros(1)), "a": {"b": _shared}},
    "PerRank and tensor": {"a@rank0": torch.zeros(1), "a": PerRank(torch.zeros(1))},
    "two PerRank": {"a.b": PerRank(1), "a": {"b": PerRank(2)}},
}


@pytest.mark.parametrize("kind", COLLISIONS)
def test_two_things_of_one_name_are_an_error(url: str, kind: str) -> None:
    with pytest.raises(StateError, match=r"two .* have this (name|path)"):
        ckpt.save(url, COLLISIONS[kind])
    assert not Path(url).exists()


@pytest.mark.parametrize("state", [{"a.b": 1, "a": {"b": 2}}, {0: 3, "0": 4}], ids=["dots", "kinds of keys"])
def test_two_values_of_one_path_are_refused(url: str, state: dict[Any, Any]) -> None:
    """A load names values by path: one of the two could be lost without a word."""
    with pytest.raises(StateError, match="two values of the state have this path"):
        ckpt.save(url, state)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 4097, "ü" * 2049], ids=["empty", "NUL", "too long", "too long in UTF-8"])
def test_names_that_cannot_be(url: str, name: str) -> None:
    tied = torch.ones(1)
    for state in ({name: torch.ones(1)}, {name: torch.ones(0)}, {"first": tied, name: tied}):
        with pytest.raises(StateError, match="name") as refused:
            ckpt.save(url, state)
        assert refused.value.hint and not Path(url).exists()


def test_the_most_dimensions(url: str) -> None:
    save(url, {"w": torch.arange(4.0).reshape([2, 2, *[1] * 29])})
    assert not verify(url).problems
    with pytest.raises(StateError, match="at most 31 dimensions here, and this one 32"):
        ckpt.save(url, {"w": torch.ones([1] * 32)})


def test_the_longest_name(url: str) -> None:
    assert save(url, {"x" * 4096: torch.ones(1)}).keys() == {"x" * 4096}


# --------------------------------------------------------------------------------------------------------- containers


def test_tuples_that_hold_tensors(url: str) -> None:
    save(url, {"t": (torch.ones(2), 5, [torch.ones(1), (torch.ones(3), None)]), "v": (1, 2)})
    tensors = [torch.zeros(2), torch.zeros(1), torch.zeros(3)]
    inner = [tensors[1], (tensors[2], "old")]
    state: dict[str, Any] = {"t": (tensors[0], 0, inner), "v": (0, 0, 0)}
    ckpt.load(url, state)
    assert state["t"][0] is tensors[0] and state["t"][2] is inner and inner[0] is tensors[1] and inner[1][0] is tensors[2]  # type: ignore[index]
    assert same(state, {"t": (torch.ones(2), 5, [torch.ones(1), (torch.ones(3), None)]), "v": (1, 2)})


def test_sequences_with_tensors_must_have_the_saved_length(url: str) -> None:
    save(url, {"l": [torch.ones(1), torch.ones(1)]})
    with pytest.raises(MismatchError, match="l: 2 elements in the checkpoint, 3 in the state"):
        ckpt.load(url, {"l": [torch.zeros(1), torch.zeros(1), torch.zeros(1)]})


def test_plain_containers_take_whatever_the_checkpoint_has(url: str) -> None:
    """They stay the same objects."""
    saved = {"d": {"a": 1, "b": {"c": [1, 2, 3]}}, "l": [1, {"x": 2}], "s": {1, 2}, "n": {"deep": {"er": ()}}}
    save(url, saved)
    state: dict[str, Any] = {"d": {"b": {"c": [9]}}, "l": [0, {"y": 0}, 0, 0], "s": {5}, "n": {}}
    held = [state["d"], state["d"]["b"], state["d"]["b"]["c"], state["l"], state["l"][1], state["s"], state["n"]]
    ckpt.load(url, state)
    assert same(state, saved)
    now = [state["d"], state["d"]["b"], state["d"]["b"]["c"], state["l"], state["l"][1], state["s"], state["n"]]
    assert all(a is b for a, b in zip(now, held, strict=True))


def test_a_key_of_a_plain_dict_that_the_checkpoint_lacks_is_missing(url: str) -> None:
    ckpt.save(url, {"cfg": {"a": 1, "more": 2}})
    state = {"cfg": {"a": 0, "new": {"deep": 3}}}
    with pytest.raises(NamesError, match=r"missing in the checkpoint \(1\):\s+cfg.new"):
        ckpt.load(url, state)
    assert state == {"cfg": {"a": 0, "new": {"deep": 3}}}
    report = ckpt.load(url, state, strict=False)
    assert state == {"cfg": {"a": 1, "new": {"deep": 3}, "more": 2}}
    assert report.missing == ("cfg.new",) and report.unexpected == ()


def test_a_stateful_object_can_be_picked_by_what_lies_in_it(url: str) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 3)
    ckpt.save(url, {"sch": scheduler.state_dict(), "n": {"x": 1, "y": 2}})
    scheduler.gamma = 9.0
    state = {"sch": scheduler, "n": {"x": 0, "y": 0}}
    ckpt.load(url, state, only=["sch.*", "n.x"])
    assert scheduler.gamma == 0.1 and state["n"] == {"x": 1, "y": 0}


def test_what_could_not_be_loaded_again_is_not_saved(url: str) -> None:
    class Holder:
        def state_dict(self) -> dict[str, object]:
            return {"rng": ckpt.PerRank(1)}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with pytest.raises(StateError, match="inside of an object's state_dict"):
        ckpt.save(url, {"h": Holder()})


def test_dicts_of_other_types_keep_their_type(url: str) -> None:
    saved = {"o": OrderedDict(b=1, a=2), "d": defaultdict(list, x=[1]), "c": Counter("aab")}
    save(url, saved)
    state: dict[str, Any] = {
        "o": OrderedDict(a=7, b=7),
        "d": defaultdict(list),
        "c": Counter("b"),
    }
    ckpt.load(url, state)
    assert same(state, saved) and list(state["o"]) == ["b", "a"]
    assert state["d"]["new"] == []


def test_a_container_becomes_a_value_and_a_value_a_container(url: str) -> None:
    save(url, {"a": 5, "b": {"x": 1}, "c": [1], "d": (1,)})
    state: dict[str, Any] = {"a": {"x": 1}, "b": 5, "c": (1, 2), "d": [3]}
    ckpt.load(url, state)
    assert same(state, {"a": 5, "b": {"x": 1}, "c": [1], "d": (1,)})


# ------------------------------------------------------------------------------------------------------------ objects


class Holder:
    """Anything with a state: it hands out its value and takes one."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.loads = 0

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]
        self.loads += 1


@pytest.mark.parametrize(
    ("saved", "old"),
    [
        (torch.arange(5.0), torch.zeros(5)),
        (torch.arange(5.0), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.arange(5.0), None),
        (None, torch.zeros(5)),
        ([torch.ones(1), {"a": torch.zeros(0), "b": (1, torch.tensor(2))}], []),
        ({"x": 1, 2: torch.ones(2)}, {"x": torch.ones(3)}),
        ("text", 5),
        (Counter("aab"), Counter()),
        (OrderedDict(a=torch.ones(1)), OrderedDict()),
    ],
    ids=str,
)
def test_objects_get_what_was_stored(url: str, saved: Any, old: Any) -> None:
    """Whatever they hold now: a buffer may have grown since."""
    save(url, {"o": Holder(saved)})
    target = Holder(old)
    ckpt.load(url, {"o": target})
    assert same(target.value, saved) and target.loads == 1


def test_objects_are_not_touched_if_something_else_does_not_fit(url: str) -> None:
    save(url, {"o": Holder(1), "w": torch.ones(2)})
    target = Holder(0)
    with pytest.raises(MismatchError):
        ckpt.load(url, {"o": target, "w": torch.ones(3)})
    assert (target.value, target.loads) == (0, 0)


def test_objects_in_lists_and_under_only(url: str) -> None:
    save(url, {"l": [Holder(1), Holder(torch.ones(1))], "x": Holder(3)})
    targets = [Holder(0), Holder(0), Holder(0)]
    report = ckpt.load(url, {"l": targets[:2], "x": targets[2]}, only="l.*")
    assert (targets[0].value, targets[2].value, report.missing, report.unexpected) == (1, 0, (), ())
    assert same(targets[1].value, torch.ones(1))


def test_lists_of_objects_that_have_no_tensors(url: str) -> None:
    save(url, {"l": [Holder(1), Holder({"a": 2})], "t": (Holder(3), 4)})
    first, second, third = (Holder(0) for _ in range(3))
    state = {"l": [first, second], "t": (third, 0)}
    assert not ckpt.load(url, state).unexpected
    assert (first.value, second.value, third.value, state["t"][1]) == (1, {"a": 2}, 3, 4)
    save(url, {"l": [{"a": Holder(1), "b": 2}]})
    with pytest.raises(NamesError, match=r"unexpected in the checkpoint \(1\):\n    l\n"):
        ckpt.load(url, {"l": [{"a": Holder(0)}]})


def test_a_missing_object_is_reported(url: str) -> None:
    save(url, {})
    with pytest.raises(NamesError, match="\n    o\n"):
        ckpt.load(url, {"o": Holder(1)})


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3, 3, 6], gamma=0.5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda e: 0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=1.0, total_steps=12),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 1.0, step_size_up=3, mode="exp_range", gamma=0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # SequentialLR of torch 2.6 warns of its own call
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_schedulers_go_on_where_they_were(url: str, kind: str, tensor: bool) -> None:
    if tensor and kind == "ReduceLROnPlateau" and torch.__version__ < "2.9":
        pytest.skip("torch 2.6 puts a float in the place of the tensor")

    def made() -> dict[str, Any]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.named_parameters(), lr=torch.tensor(0.25) if tensor else 0.25, momentum=0.5)
        return {"optimizer": optimizer, "scheduler": SCHEDULERS[kind](optimizer)}

    def rates(job: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            job["optimizer"].step()
            job["scheduler"].step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(float(job["optimizer"].param_groups[0]["lr"]))
        return found

    job = made()
    rates(job, 4)
    save(url, job)
    resumed = made()
    ckpt.load(url, resumed)
    assert same(_sorted(resumed["scheduler"].state_dict()), _sorted(job["scheduler"].state_dict()))
    assert rates(resumed, 5) == rates(job, 5)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        made = Counter() if isinstance(value, Counter) else {}
        made.update({k: _sorted(value[k]) for k in sorted(value, key=str)})
        return made
    return type(value)(map(_sorted, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("enabled", [True, False])
def test_gradient_scalers(url: str, enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=enabled)
    save(url, {"scaler": scaler})
    other = torch.amp.GradScaler("cpu", enabled=enabled)
    ckpt.load(url, {"scaler": other})
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == (8.0 if enabled else 1.0)


def test_averaged_models(url: str) -> None:
    net = nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    averaged.update_parameters(net)
    save(url, {"net": net, "ema": averaged})
    late = nn.Linear(2, 2)
    other = torch.optim.swa_utils.AveragedModel(late)
    ckpt.load(url, {"net": late, "ema": other})
    assert same(dict(other.state_dict()), dict(averaged.state_dict())) and int(other.n_averaged) == 1


# ------------------------------------------------------------------------------------------------------------ PerRank


PER_RANK: dict[str, Any] = {
    "number": 5,
    "tensor": torch.arange(4),
    "nested": {"a": torch.ones(2), "b": [1, (torch.zeros(0), "x")], 3: None},
    "random state": random.Random(1).getstate(),
    "numpy's random state": np.random.RandomState(1).get_state(),
    "torch's random state": torch.Generator().manual_seed(3).get_state(),
    "none": None,
}


@pytest.mark.parametrize("kind", PER_RANK)
def test_values_of_this_rank(url: str, kind: str) -> None:
    found = save(url, {"own": PerRank(PER_RANK[kind]), "list": [PerRank(1)]})
    assert all(name.endswith("@rank0") for name in found)
    state = {"own": PerRank("old"), "list": [PerRank(0)]}
    wrapper = state["own"]
    report = ckpt.load(url, state)
    assert state["own"] is wrapper and same(wrapper.value, PER_RANK[kind]) and state["list"][0].value == 1
    assert (report.missing, report.unexpected) == ((), ())


def test_the_random_state_example(url: str) -> None:
    """As the documentation of PerRank gives it."""
    torch.manual_seed(7)
    state = {"rng": PerRank(torch.get_rng_state(), reshard=lambda values, rank, world: values[rank % len(values)])}
    ckpt.save(url, state)
    expected = torch.rand(3)
    torch.manual_seed(8)
    ckpt.load(url, state)
    torch.set_rng_state(state["rng"].value)
    assert torch.equal(torch.rand(3), expected)


def test_objects_of_this_rank(url: str) -> None:
    save(url, {"a": PerRank(Holder(torch.ones(3))), "b": PerRank({"loader": Holder(5), "list": [Holder((1, 2))], "n": 1})})
    held = [Holder(0), Holder(0), Holder(0)]
    state = {"a": PerRank(held[0]), "b": PerRank({"loader": held[1], "list": [held[2]], "n": 0})}
    ckpt.load(url, state)
    assert state["a"].value is held[0] and same(held[0].value, torch.ones(3))
    assert state["b"].value["loader"] is held[1] and state["b"].value["list"][0] is held[2]
    assert (held[1].value, held[2].value, state["b"].value["n"]) == (5, (1, 2), 1)


def test_tensors_that_other_parts_of_the_state_have_too(url: str) -> None:
    shared, own = torch.arange(3.0), torch.arange(4)
    state = {"own": PerRank(shared), "w": shared, "more": PerRank({"w": shared, "a": own, "b": [own]}), "again": PerRank(own)}
    found = save(url, state)
    assert found["w"] == found["own@rank0"] == described(shared)
    assert ckpt.save(url, state).tensor_bytes == 12 + 12 + 32
    target = {"own": PerRank(None), "w": torch.zeros(3), "more": PerRank(None), "again": PerRank(None)}
    ckpt.load(url, target)
    assert same([target["own"].value, target["w"], target["again"].value], [shared, shared, own])
    assert same(target["more"].value, {"w": shared, "a": own, "b": [own]})
    ckpt.load(url, {"w": target["w"]}, only="w")
    assert [t.rank for t in ckpt.open(url)._catalog.tensors.values()] == [0] * (len(found) - 1) + [None]


def test_a_tensor_may_be_called_like_that_of_a_rank(url: str) -> None:
    save(url, {"x@rank0": torch.ones(2), "y@rank1": torch.ones(1), "own": PerRank(torch.ones(3))})
    state = {"x@rank0": torch.zeros(2), "y@rank1": torch.zeros(1), "own": PerRank(None)}
    ckpt.load(url, state)
    assert same([state["x@rank0"], state["y@rank1"], state["own"].value], [torch.ones(2), torch.ones(1), torch.ones(3)])


@pytest.mark.parametrize("value", [nn.Linear(1, 1), object(), {"x": [nn.Linear(1, 1)]}], ids=["module", "object", "nested"])
def test_what_a_rank_cannot_have_of_its_own(url: str, value: Any) -> None:
    with pytest.raises(StateError, match="'own"):
        ckpt.save(url, {"own": PerRank(value)})


def test_a_value_that_was_not_saved_per_rank(url: str) -> None:
    save(url, {"own": 5, "w": torch.ones(1)})
    state = {"own": PerRank(1), "w": torch.zeros(1)}
    with pytest.raises(NamesError, match="own"):
        ckpt.load(url, state)
    assert ckpt.load(url, state, strict=False).missing == ("own",)
    assert (state["own"].value, state["w"].item()) == (1, 1)  # type: ignore[union-attr]


def test_a_value_that_was_saved_per_rank_is_unexpected_elsewhere(url: str) -> None:
    save(url, {"own": PerRank(5)})
    with pytest.raises(NamesError, match="unexpected"):
        ckpt.load(url, {})
    assert ckpt.load(url, {}, strict=False).unexpected == ("own",)


def test_values_of_two_ranks_on_one() -> None:
    """``reshard`` makes this rank's value of all that were saved."""
    calls = []

    def reshard(values: Any, rank: int, world: int) -> Any:
        calls.append((len(values), rank, world))
        return {"seeds": [v["seed"] for v in values], "t": torch.cat([v["t"] for v in values])}

    state = {"own": PerRank({"kept": Holder(0)}, reshard=reshard)}
    ckpt.load(GOLDEN, state, only="own")
    assert calls == [(2, 0, 1)]
    assert same(state["own"].value, {"seeds": [100, 101], "t": torch.tensor([0, 0, 0, 1, 1, 1])})
    holder = Holder(0)
    ckpt.load(GOLDEN, {"own": PerRank(holder, reshard=lambda values, rank, world: {"value": values[1]["position"]})}, only="own")
    assert holder.value == [1, 2]


def test_values_of_two_ranks_on_one_without_reshard() -> None:
    state = {"own": PerRank("old")}
    with pytest.raises(MismatchError, match=r"own: saved per rank by 2 ranks, loaded by 1.*reshard") as caught:
        ckpt.load(GOLDEN, state, only="own")
    assert type(caught.value) is MismatchError, "no shape differs"
    assert state["own"].value == "old"


def test_looking_at_the_values_of_each_rank(url: str) -> None:
    view = ckpt.open(GOLDEN)
    assert view.state()["own"].ranks == (0, 1)
    assert [view.per_rank("own", rank)["seed"] for rank in (0, 1)] == [100, 101]
    for path, rank in (("own", 2), ("other", 0)):
        with pytest.raises(NotFoundError, match=f"rank {rank} saved no PerRank value '{path}'"):
            view.per_rank(path, rank)


class Counts:
    """An object that refuses some states."""

    def __init__(self, count: int, most: int = 10) -> None:
        self.count, self.most = count, most

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        if self.count > self.most:
            raise ValueError("too many")


def test_an_object_that_refuses_its_state_leaves_everything_as_it_was(url: str) -> None:
    """The tensors, and the object that was asked before it."""
    ckpt.save(url, {"w": torch.ones(3), "first": Counts(5), "second": Counts(7), "n": 1})
    state = {"w": torch.zeros(3), "first": Counts(1), "second": Counts(2, most=3), "n": 0}
    with pytest.raises(ckpt.CkptError, match="too many; nothing in the state was changed") as caught:
        ckpt.load(url, state)
    assert "second" in str(caught.value)
    assert [state["w"].tolist(), state["first"].count, state["second"].count, state["n"]] == [[0, 0, 0], 1, 2, 0]


class Override:
    """A scheduler that goes on with its own learning rate, and sets it when it takes its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, n: int, most: int = 10) -> None:
        self.optimizer, self.n, self.most = optimizer, n, most

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.5
        if state["n"] > self.most:
            raise ValueError("too many")


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_an_object_that_changes_an_optimizer_has_the_last_word(url: str, rate: Any) -> None:
    """As with load_state_dict of the optimizer, then of the scheduler; and if one refuses, the optimizer has its own options again."""

    def made() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=copy.copy(rate), momentum=0.9, foreach=False)
        return optimizer, {"model": model, "optimizer": optimizer}

    optimizer, state = made()
    optimizer.param_groups[0]["added"] = 1
    ckpt.save(url, {**state, "scheduler": Override(optimizer, 5)})
    optimizer, state = made()
    set_options(optimizer.param_groups[0], {"lr": 0.25, "momentum": 0.7})
    with pytest.raises(ckpt.CkptError, match="too many; nothing in the state was changed"):
        ckpt.load(url, {**state, "scheduler": Override(optimizer, 0, most=1)})
    assert [optimizer.param_groups[0][key] for key in ("lr", "momentum")] == [0.25, 0.7]
    assert "added" not in optimizer.param_groups[0]
    ckpt.load(url, {**state, "scheduler": Override(optimizer, 0)})
    assert [optimizer.param_groups[0][key] for key in ("lr", "momentum")] == [0.5, 0.9]


class Locked(Counts):
    """One whose state, before its first load, has something in it that cannot be copied."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count or threading.Lock()}


def test_an_object_whose_old_state_cannot_be_copied(url: str) -> None:
    """It takes its state; if it or another one refuses, that cannot be undone, and the error says so."""
    ckpt.save(url, {"w": torch.ones(3), "locked": Locked(5)})
    state = {"w": torch.zeros(3), "locked": Locked(0)}
    ckpt.load(url, state)
    assert state["locked"].count == 5 and state["w"].tolist() == [1, 1, 1]
    with pytest.raises(ckpt.CkptError, match="too many; the state given to load is now partly overwritten"):
        ckpt.load(url, {"w": torch.zeros(3), "locked": Locked(0, most=3)})


def test_a_scaler_that_was_not_enabled(url: str) -> None:
    """torch refuses its state when it is enabled; the other way round it takes any."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ckpt.save(url, {"w": torch.ones(3), "scaler": scaler})
    state = {"w": torch.zeros(3), "scaler": torch.amp.GradScaler("cpu", enabled=True)}
    with pytest.raises(MismatchError, match="scaler: of a GradScaler that was not enabled"):
        ckpt.load(url, state)
    assert state["w"].tolist() == [0, 0, 0]
    ckpt.load(url, state, only="w")
    ckpt.load(url, {"w": torch.zeros(3), "scaler": scaler})


class Grows(nn.Module):
    """A module that gives a buffer the shape that it is to be loaded with."""

    seen: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(size)))

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = torch.empty_like(state_dict["seen"])
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_a_module_that_resizes_its_buffers_is_named_with_a_way_out(url: str) -> None:
    ckpt.save(url, {"model": Grows(4)})
    model = Grows(0)
    with pytest.raises(ckpt.errors.ShapeError, match="Grows has a load_state_dict of its own") as caught:
        ckpt.load(url, {"model": model})
    assert "ckpt.open(url)" in str(caught.value)
    model.load_state_dict({"seen": ckpt.open(url)["model.seen"].read()})
    ckpt.load(url, {"model": model})
    assert model.seen.tolist() == [0, 1, 2, 3]


def test_adapters_and_their_optimizer_alone(url: str) -> None:
    """Low-rank adapters: the trained parameters by name, and an optimizer that knows these names."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[0].requires_grad_(False)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.items())
        return model, optimizer, {"adapters": trained, "optimizer": optimizer}

    model, optimizer, state = made(1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    ckpt.save(url, state)
    assert sorted(ckpt.open(url)) == ["adapters.1.weight", *(f"optimizer.state.1.weight.{k}" for k in ("exp_avg", "exp_avg_sq", "step"))]
    other, _, into = made(2)
    ckpt.load(url, into)
    assert torch.equal(other[1].weight, model[1].weight)
    assert not torch.equal(other[0].weight, model[0].weight)
