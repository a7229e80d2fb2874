"""Parts of checkpoints, other names and other dtypes: only=, rename= and cast=."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import MismatchError, NamesError, ShapeError, UsageError
from tests.api.checked import described, pattern, same, save
from tests.formats.oracle import DTYPES as NAMES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Extra(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(2, 3)
        self.seed = seed

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": self.seed}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seed = state["seed"]


def job(seed: int, steps: int, *, model: str = "model", optimizer: str = "optimizer") -> dict[str, Any]:
    """A model and optimizers under any names; the second keeps values that are not tensors."""
    net = nn.ModuleDict({"first": Extra(seed), "second": nn.Linear(3, 1)})
    adam = torch.optim.Adam(net.parameters(), lr=0.1 * (seed + 1))
    lbfgs = torch.optim.LBFGS(net["second"].parameters(), lr=0.3 * (seed + 1), max_iter=2)
    for _ in range(steps):
        for opt in (adam, lbfgs):

            def loss() -> torch.Tensor:
                net.zero_grad()
                found = net["second"](net["first"](torch.ones(4, 2))).square().sum()
                found.backward()
                return found  # type: ignore[no-any-return]

            opt.step(loss)
    return {model: net, optimizer: adam, "second order": lbfgs, "step": seed}


def values(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that a job holds, without the names that its parts have."""
    net, adam, lbfgs = (v for v in state.values() if not isinstance(v, int))
    found: dict[str, Any] = {"model": dict(net.state_dict())}
    for name, opt in (("adam", adam), ("lbfgs", lbfgs)):
        raw = opt.state_dict()
        found[name] = [{k: dict(sorted(v.items())) for k, v in raw["state"].items()}, raw["param_groups"]]
    return found


# --------------------------------------------------------------------------------------------------------------- only


ONLY: dict[str, tuple[Any, set[str]]] = {
    "a name": ("a.x", {"a.x"}),
    "a list": (["a.x", "b"], {"a.x", "b"}),
    "a tuple of globs": (("a.*", "v*"), {"a.x", "a.y", "value"}),
    "a glob over dots": ("*x", {"a.x", "deep.a.x"}),
    "one character": ("?", {"b"}),
    "a class": ("[ab]*", {"a.x", "a.y", "b"}),
    "all": ("*", {"a.x", "a.y", "b", "deep.a.x", "value", "nested.k"}),
}


@pytest.mark.parametrize("kind", ONLY)
def test_only_what_a_glob_names_is_loaded(url: str, kind: str) -> None:
    only, taken = ONLY[kind]
    ckpt.save(url, _values(1))
    state = _values(0)
    report = ckpt.load(url, state, only=only)
    expected = _values(0)
    for name in taken:
        inner, source = expected, _values(1)
        *path, last = name.split(".")
        for key in path:
            inner, source = inner[key], source[key]
        inner[last] = source[last]
    assert same(state, expected)
    assert (report.missing, report.unexpected) == ((), ())


def _values(n: int) -> dict[str, Any]:
    full = torch.full
    return {
        "a": {"x": full((2,), float(n)), "y": full((3,), n)},
        "b": full((), float(n)),
        "deep": {"a": {"x": full((1,), n)}},
        "value": n,
        "nested": {"k": n},
    }


def test_only_leaves_the_rest_alone_on_both_sides(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(2), "gone": torch.ones(1), "shape": torch.ones(3), "v": 1})
    state = {"a": torch.zeros(2), "new": torch.zeros(1), "shape": torch.zeros(4), "w": 2}
    report = ckpt.load(url, state, only="a")
    assert (report.missing, report.unexpected, report.tensors) == ((), (), 1)
    assert torch.equal(state["a"], torch.ones(2))  # type: ignore[arg-type]


def test_only_still_wants_what_it_names(url: str) -> None:
    ckpt.save(url, {"a": {"x": torch.ones(1), "gone": torch.ones(1)}})
    with pytest.raises(NamesError) as caught:
        ckpt.load(url, {"a": {"x": torch.zeros(1), "new": torch.zeros(1)}}, only="a.*")
    assert "a.gone" in str(caught.value) and "a.new" in str(caught.value)


def test_only_the_model_of_a_job(url: str) -> None:
    saved = job(0, 2)
    save(url, saved)
    state = job(1, 1)
    before = values(state)
    ckpt.load(url, state, only="model.*")
    assert same(values(state), before | {"model": values(saved)["model"]})
    assert state["step"] == 1


def test_only_one_optimizer_of_a_job(url: str) -> None:
    saved, state = job(0, 2), job(1, 1)
    save(url, saved)
    before = values(state)
    ckpt.load(url, state, only="optimizer.*")
    assert same(values(state), before | {"adam": values(saved)["adam"]})


def test_only_some_of_the_state_of_an_optimizer(url: str) -> None:
    saved, state = job(0, 2), job(1, 1)
    save(url, saved)
    ckpt.load(url, state, only="*.exp_avg")
    lr = state["optimizer"].param_groups[0]["lr"]
    for mine, theirs in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        now, then = state["optimizer"].state[mine], saved["optimizer"].state[theirs]
        assert same(now["exp_avg"], then["exp_avg"])
        assert not same(now["exp_avg_sq"], then["exp_avg_sq"]) and now["step"] == 1
    assert lr == 0.2


def test_only_one_parameter_and_its_state(url: str) -> None:
    saved, state = job(0, 2), job(1, 0)
    save(url, saved)
    report = ckpt.load(url, state, only=["model.first.weight", "optimizer.state.model.first.weight.*"])
    assert report.tensors == 4
    net, adam = state["model"], state["optimizer"]
    assert torch.equal(net["first"].weight, saved["model"]["first"].weight)
    assert adam.state.keys() == {net["first"].weight}
    assert same(adam.state[net["first"].weight]["step"], torch.tensor(2.0))


# ------------------------------------------------------------------------------------------------------------- rename


RENAME: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "a name": ({"a": "z"}, {"a": "z"}),
    "a prefix": ({"m.*": "net.*"}, {"m.0.w": "net.0.w", "m.0.b": "net.0.b", "m.1.w": "net.1.w"}),
    "a suffix": ({"*.w": "*.weight"}, {"m.0.w": "m.0.weight", "m.1.w": "m.1.weight"}),
    "in the middle": ({"m.*.w": "layers.*.weight"}, {"m.0.w": "layers.0.weight", "m.1.w": "layers.1.weight"}),
    "a prefix that goes": ({"m.*": "*"}, {"m.0.w": "0.w", "m.0.b": "0.b", "m.1.w": "1.w"}),
    "a prefix for all": ({"*": "x.*"}, {"a": "x.a", "b": "x.b", "m.0.w": "x.m.0.w", "m.0.b": "x.m.0.b", "m.1.w": "x.m.1.w"}),
    "the first rule decides": ({"m.0.*": "first.*", "m.*": "rest.*"}, {"m.0.w": "first.w", "m.0.b": "first.b", "m.1.w": "rest.1.w"}),
    "an exchange": ({"a": "b", "b": "a"}, {"a": "b", "b": "a"}),
    "to itself": ({"a": "a"}, {}),
}


@pytest.mark.parametrize("kind", RENAME)
def test_tensors_under_other_names(url: str, kind: str) -> None:
    rules, moved = RENAME[kind]
    stored = {name: pattern(torch.float32, 4, seed=i) for i, name in enumerate(("a", "b", "m.0.w", "m.0.b", "m.1.w"))}
    save(url, dict(stored))
    state = {moved.get(name, name): torch.zeros(4) for name in stored}
    report = ckpt.load(url, dict(state), rename=rules)
    for name, tensor in stored.items():
        assert described(state[moved.get(name, name)]) == described(tensor), name
    assert report.renamed == moved


@pytest.mark.parametrize("kind", RENAME)
def test_values_under_other_names(url: str, kind: str) -> None:
    """Beside tensors: a container without any is taken whole."""
    rules, moved = RENAME[kind]
    stored = {"a": 1, "b": None, "m.0.w": [1, 2], "m.0.b": {"k": 3}, "m.1.w": "text"}
    beside = {f"{name}_t": torch.ones(1) for name in stored}
    ckpt.save(url, _nest(stored | beside))
    state = _nest({moved.get(name, name): "?" for name in stored})
    for _, values in _containers(state, ""):
        values["tensor"] = torch.zeros(1)
    report = ckpt.load(url, state, rename=rules, strict=False)
    assert set(report.missing) == {f"{name}.tensor".lstrip(".") for name, _ in _containers(state, "")}
    for _, values in _containers(state, ""):
        del values["tensor"]
    assert same(state, _nest({moved.get(name, name): value for name, value in stored.items()}))


def _containers(state: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    """A dict and those in it, but for values that are dicts."""
    inner = [(f"{path}.{k}".lstrip("."), v) for k, v in state.items() if isinstance(v, dict) and "k" not in v]
    return [(path, state), *(found for name, value in inner for found in _containers(value, name))]


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        inner = found
        *path, last = name.split(".")
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return found


def test_a_renamed_value_is_no_longer_there_under_its_old_name(url: str) -> None:
    ckpt.save(url, {"a": 1, "t": torch.ones(1)})
    state: dict[str, Any] = {"a": 5, "b": 6, "t": torch.zeros(1)}
    with pytest.raises(NamesError, match=r"missing in the checkpoint \(1\):\n    a\n"):
        ckpt.load(url, state, rename={"a": "b"})
    assert (state["a"], state["b"]) == (5, 6)
    ckpt.load(url, state, rename={"a": "b"}, strict=False)
    assert (state["a"], state["b"]) == (5, 1)


def test_a_whole_job_under_other_names(url: str) -> None:
    """Optimizer state has names of its own, which contain those of the parameters; groups follow the parameters."""
    saved, state = job(0, 2), job(1, 0, model="net", optimizer="optim")
    save(url, saved)
    rules = {
        "model.*": "net.*",
        "optimizer.state.model.*": "optim.state.net.*",
        "optimizer.*": "optim.*",
        "second order.state.model.*": "second order.state.net.*",
    }
    report = ckpt.load(url, state, rename=rules)
    assert same(values(state), values(saved))
    assert (report.missing, report.unexpected) == ((), ())
    assert report.renamed["optimizer.state.model.first.weight.exp_avg"] == "optim.state.net.first.weight.exp_avg"
    assert state["net"]["first"].seed == 0
    assert (state["step"], state["optim"].param_groups[0]["lr"]) == (0, 0.1)


def test_renames_may_turn_parts_of_a_model_round(url: str) -> None:
    old = nn.ModuleDict({"encoder": Extra(1), "decoder": Extra(2)})
    save(url, {"model": old})
    new = nn.ModuleDict({"encoder": Extra(3), "decoder": Extra(4)})
    rules = {"model.encoder.*": "model.decoder.*", "model.decoder.*": "model.encoder.*"}
    ckpt.load(url, {"model": new}, rename=rules)
    assert same(dict(new["encoder"].state_dict()), dict(old["decoder"].state_dict()))
    assert same(dict(new["decoder"].state_dict()), dict(old["encoder"].state_dict()))


def test_schedulers_under_other_names(url: str) -> None:
    def made(gamma: float) -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=gamma)

    saved = made(0.5)
    ckpt.save(url, {"sched": {"main": saved}, "t": torch.ones(1)})
    for rules in ({"sched.*": "lr.*"}, {"sched.main.*": "lr.main.*"}, {"sched.main": "lr.main"}):
        late = made(0.25)
        ckpt.load(url, {"lr": {"main": late}, "t": torch.zeros(1)}, rename=rules, strict="main.*" in str(rules) or "sched.*" in rules)
        assert late.gamma == 0.5


def test_only_speaks_of_the_names_in_the_state(url: str) -> None:
    ckpt.save(url, {"old": {"a": torch.ones(1), "b": torch.ones(1)}, "x": 1})
    state: dict[str, Any] = {"new": {"a": torch.zeros(1), "b": torch.zeros(1)}, "x": 0}
    report = ckpt.load(url, state, rename={"old.*": "new.*"}, only="new.a")
    assert same(state, {"new": {"a": torch.ones(1), "b": torch.zeros(1)}, "x": 0})
    assert report.renamed == {"old.a": "new.a"}


@pytest.mark.parametrize("rules", [{"a*": "b"}, {"a": "b*"}, {"a**": "b**"}, {"*a*": "*b*"}], ids=str)
def test_renames_that_make_no_sense(url: str, rules: dict[str, str]) -> None:
    ckpt.save(url, {"a": torch.ones(1)})
    with pytest.raises(UsageError, match=r"each side needs one \*, or none"):
        ckpt.load(url, {"b": torch.zeros(1)}, rename=rules)


def test_two_names_cannot_become_one(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(1), "b": torch.ones(1)})
    state = {"c": torch.zeros(1)}
    with pytest.raises(UsageError, match="'a' and 'b' both 'c'"):
        ckpt.load(url, state, rename={"a": "c", "b": "c"})
    assert state["c"].item() == 0


# --------------------------------------------------------------------------------------------------------------- cast


NUMBERS = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "bool"]


@pytest.mark.parametrize("stored", NUMBERS)
def test_numbers_are_converted_as_torch_converts_them(url: str, stored: str) -> None:
    """Into every dtype at once, contiguous and not."""
    source = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 100.0]]).to(getattr(torch, stored))
    wanted = [d for d in NUMBERS if d != stored]
    ckpt.save(url, {d: source.clone() for d in wanted} | {stored: source})
    state = {d: torch.zeros(2, 3, dtype=torch.uint8).to(getattr(torch, d)) for d in NUMBERS}
    with pytest.raises(ShapeError) as caught:
        ckpt.load(url, dict(state))
    assert f"do not fit ({len(wanted)})" in str(caught.value) and "cast=True converts" in str(caught.value)
    report = ckpt.load(url, dict(state), cast=True)
    assert sorted(report.cast) == sorted(wanted)
    for d, tensor in state.items():
        assert described(tensor) == described(source.to(getattr(torch, d))), d
    columns = {d: torch.zeros(3, 2, dtype=torch.uint8).to(getattr(torch, d)).t() for d in NUMBERS}
    ckpt.load(url, dict(columns), cast=True)
    for d, tensor in columns.items():
        assert described(tensor) == described(source.to(getattr(torch, d))), d


def test_real_becomes_complex_but_not_the_other_way(url: str) -> None:
    ckpt.save(url, {"t": torch.tensor([1.5, -2.0])})
    target = torch.zeros(2, dtype=torch.complex64)
    ckpt.load(url, {"t": target}, cast=True)
    assert target.tolist() == [1.5, -2.0]
    ckpt.save(url, {"t": torch.tensor([1 + 2j])})
    wide, real = torch.zeros(1, dtype=torch.complex128), torch.zeros(1)
    ckpt.load(url, {"t": wide}, cast=True)
    assert wide.tolist() == [1 + 2j]
    with pytest.raises(ShapeError, match="complex64 in the checkpoint cannot be converted to float32"):
        ckpt.load(url, {"t": real}, cast=True)


def test_whatever_cannot_be_converted_is_said_before_anything_is_changed(url: str) -> None:
    """Every pair of dtypes either converts or is refused as a mismatch."""
    dtypes = [getattr(torch, name) for name in NAMES]
    refused = 0
    for stored in dtypes:
        ckpt.save(url, {"t": pattern(stored, 3, seed=1), "first": torch.ones(1)})
        for wanted in dtypes:
            state = {"first": torch.zeros(1), "t": pattern(wanted, 3, seed=2)}
            before = described(state["t"])
            try:
                ckpt.load(url, dict(state), cast=True)
            except MismatchError:
                refused += 1
                assert stored != wanted and ("float4" in f"{stored}{wanted}" or (stored.is_complex and not wanted.is_complex))
                assert described(state["t"]) == before and state["first"].item() == 0
            else:
                assert state["first"].item() == 1
    count, complexes = len(dtypes), sum(d.is_complex for d in dtypes)
    assert refused == 2 * (count - 1) + complexes * (count - 1 - complexes)


def test_casting_the_state_of_optimizers(url: str) -> None:
    saved = job(0, 2)
    save(url, saved)
    state = job(1, 1)
    for param in state["model"].parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state["optimizer"].state[param][key] = state["optimizer"].state[param][key].to(torch.bfloat16)
    report = ckpt.load(url, state, cast=True)
    assert len(report.cast) == 2 * 4
    for mine, theirs in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        now, then = state["optimizer"].state[mine], saved["optimizer"].state[theirs]
        assert described(now["exp_avg"]) == described(then["exp_avg"].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rename": "model.*"}, "rename= takes a dict of names or globs, not 'model"),
        ({"rename": {"a": 1}}, "rename= takes a dict of names or globs"),
        ({"strict": "no"}, "strict= is True or False, not 'no'"),
        ({"cast": 1}, "cast= is True or False, not 1"),
        ({"read": "off"}, "read= is a ckpt.ReadOptions, not 'off'"),
        ({"job": 60}, "job= is a ckpt.Job, not 60"),
        ({"dry_run": "no"}, "dry_run= is True or False, not 'no'"),
    ],
)
def test_arguments_of_another_type_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ckpt.load("nothing/is/read", {"a": torch.zeros(1)}, **given)
