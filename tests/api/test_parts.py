"""Parts of a state: what ``only=`` and ``trainable=`` save, that they load over a base, and that a part says what it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
from ckpt.cli.main import cli
from ckpt.engine.copy import copy_checkpoint
from ckpt.errors import NamesError, StateError, UsageError
from ckpt.policies import Latest
from ckpt.runs.step_listing import list_steps
from ckpt.training import Average


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as adapters have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size)
        self.base.requires_grad_(False)
        self.lora_A = nn.Linear(size, 2, bias=False)
        self.lora_B = nn.Linear(2, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def job(seed: int = 0, *, all_params: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(12), nn.BatchNorm1d(12), Adapted(12))
    optimizer = torch.optim.AdamW(model.parameters() if all_params else [p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        model(torch.randn(4, 12)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "step": 2 + seed,
        "notes": {"a": 1 + seed, "lora": 2 + seed},
        "list": [torch.ones(2), 5],
    }


def names(url: str) -> set[str]:
    return set(ckpt.open(url))


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": t for name, t in state["model"].state_dict().items()}
    of_param = {id(p): n for n, p in state["model"].named_parameters()}
    for p, values in state["optimizer"].state.items():
        found |= {f"optimizer.state.model.{of_param[id(p)]}.{key}": t for key, t in values.items()}
    return {name: t.detach().clone() for name, t in found.items()}


def check_loaded(state: dict[str, Any], before: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], taken: Any) -> None:
    """What is ``taken`` has the saved bits, and everything else keeps its own."""
    now = tensors(state)
    for name in now:
        assert torch.equal(now[name], saved[name] if taken(name) else before[name]), name


@pytest.mark.parametrize("all_params", [True, False])
def test_trainable(url: str, all_params: bool) -> None:
    """The frozen weights are not in it; a step, buffers and all that is trained are."""
    saved = job(0, all_params=all_params)
    report = ckpt.save(url, saved, trainable=True)
    assert not any("base" in name for name in names(url))
    assert {n for n in tensors(saved) if "base" not in n} <= names(url)
    assert report.tensor_bytes < 0.7 * sum(t.nbytes for t in tensors(saved).values())
    other = job(1, all_params=all_params)
    before = tensors(other)
    loaded = ckpt.load(url, other, trainable=True)
    assert loaded.missing == loaded.unexpected == ()
    check_loaded(other, before, tensors(saved), lambda name: "base" not in name)
    assert (other["step"], other["notes"]) == (2, {"a": 1, "lora": 2})


def test_only_what_a_load_with_the_same_globs_takes(url: str, root: str) -> None:
    """Saving a part, and loading the part of a whole checkpoint, take the same names and values."""
    saved = job(0)
    ckpt.save(f"{root}/whole", saved)
    for number, only in enumerate(["*lora*", ["model.0.*", "step"], ["optimizer.*"], ["optimizer.state.*.exp_avg"], ["list.0", "notes.a"]]):
        part = f"{root}/part{number}"
        ckpt.save(part, saved, only=only)
        from_part, from_whole = job(1), job(1)
        a, b = ckpt.load(part, from_part, only=only), ckpt.load(f"{root}/whole", from_whole, only=only)
        assert (a.tensors, a.missing, a.unexpected, b.missing) == (b.tensors, (), (), ())
        now, expected = tensors(from_part), tensors(from_whole)
        assert now.keys() == expected.keys() and all(torch.equal(now[n], expected[n]) for n in now)
        assert {k: from_part[k] for k in ("step", "notes")} == {k: from_whole[k] for k in ("step", "notes")}
        assert torch.equal(from_part["list"][0], from_whole["list"][0]) and from_part["list"][1] == from_whole["list"][1]
        assert len(names(part)) < len(names(f"{root}/whole"))
        assert ckpt.verify(part).ok


def test_a_part_says_that_it_is_one(url: str) -> None:
    """A strict load of it into the whole state says what is missing, and to load the base first."""
    ckpt.save(url, job(0), only="*lora*")
    state = job(1)
    before = tensors(state)
    with pytest.raises(NamesError) as error:
        ckpt.load(url, state)
    assert "a part of a state: it was saved with only='*lora*'" in error.value.message
    assert "model.0.base.weight" in error.value.message
    assert error.value.hint == "load the base first, then this part over it with only='*lora*'"
    check_loaded(state, before, before, lambda name: False)
    ckpt.save(url, job(0), trainable=True)
    with pytest.raises(NamesError, match="model.0.base.weight") as error:
        ckpt.load(url, state)
    assert error.value.hint == "load the base first, then this part over it with trainable=True"
    assert ckpt.load(url, state, strict=False).unexpected == ()


def test_a_part_with_the_values_of_the_one_before_says_that_it_is_one(root: str) -> None:
    model = job()["model"]
    for n, trainable in enumerate((True, True, False, True, True)):
        ckpt.save(f"{root}/step-{n}", {"model": model}, trainable=trainable)
    assert [s.part is not None for s in list_steps(root)] == [True, True, False, True, True]


def test_commands_say_that_a_checkpoint_is_a_part(root: str) -> None:
    ckpt.save(f"{root}/step-1", job(0))
    ckpt.save(f"{root}/step-2", job(0), only=["*lora*", "step"], trainable=True)
    copy_checkpoint(f"{root}/step-2", f"{root}/step-3")
    what = "only=['*lora*', 'step'], trainable=True"
    assert [s.part for s in list_steps(root)] == [None, what, what]
    shown = CliRunner().invoke(cli, ["ls", root], env={"COLUMNS": "250"}).stdout.splitlines()
    assert [what in line for line in shown] == [False, False, True, True]
    steps = json.loads(CliRunner().invoke(cli, ["ls", "--json", root]).stdout)["steps"]
    assert [step["part"] for step in steps] == [None, what, what]
    assert f"saved with {what}: load its base first" in CliRunner().invoke(cli, ["inspect", f"{root}/step-3"]).stdout
    assert json.loads(CliRunner().invoke(cli, ["inspect", "--json", f"{root}/step-2"]).stdout)["summary"]["part"] == what


def test_base_and_part_make_the_whole(root: str) -> None:
    base, tuned = job(0), job(0)
    ckpt.save(f"{root}/base", base)
    tuned["model"](torch.randn(4, 12)).sum().backward()
    tuned["optimizer"].step()
    tuned["step"] = 9
    ckpt.save(f"{root}/part", tuned, trainable=True)
    state = job(1)
    ckpt.load(f"{root}/base", state)
    ckpt.load(f"{root}/part", state, trainable=True)
    now, expected = tensors(state), tensors(tuned)
    assert all(torch.equal(now[name], expected[name]) for name in expected) and state["step"] == 9


def test_background_saves_averages_and_dry_runs(url: str) -> None:
    state = job(0)
    state["ema"] = Average(state["model"], 0.5)
    dry = ckpt.save(url, state, trainable=True, dry_run=True)
    ckpt.save_async(url, state, trainable=True).result()
    assert {n for n in names(url) if n.startswith("ema.")} == {
        f"ema.weights.{n}" for n, p in state["model"].named_parameters() if p.requires_grad
    }
    other = job(1)
    other["ema"] = Average(other["model"], 0.5)
    assert ckpt.load(url, other, trainable=True).bytes_needed == dry.tensor_bytes
    assert all(torch.equal(other["ema"].weights[n], w) for n, w in state["ema"].weights.items())


def test_objects_with_a_state_of_their_own(url: str) -> None:
    """A scheduler is taken as a whole if something of it is selected, and not at all otherwise."""
    state = job(0)
    state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 3)
    ckpt.save(url, state, only=["scheduler", "*lora*"])
    other = copy.deepcopy(state)
    other["scheduler"].last_epoch = 17
    ckpt.load(url, other, only=["scheduler", "*lora*"])
    assert other["scheduler"].last_epoch == state["scheduler"].last_epoch
    ckpt.save(url, state, only="*lora*")
    with pytest.raises(NamesError, match="scheduler"):
        ckpt.load(url, {"scheduler": other["scheduler"]})


def test_what_is_refused(url: str) -> None:
    with pytest.raises(NamesError, match=r"no name of the state matches: '\*lorra\*'"):
        ckpt.save(url, job(), only=["*lora*", "*lorra*"])
    for only in ([], 3, [""], ["a", 3]):
        with pytest.raises(UsageError, match="only= takes globs"):
            ckpt.save(url, job(), only=only)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="only= takes globs"):
            ckpt.load(url, job(), only=only)  # type: ignore[arg-type]
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(UsageError, match="trainable= is True or False, not 'yes'"):
            call(url, job(), trainable="yes")  # type: ignore[operator]
    with pytest.raises(StateError, match="ckpt-part"):
        ckpt.save(url, {**job(), "ckpt-part": 1}, trainable=True)
    model = job()["model"]
    for state in ({"model": nn.Linear(2, 2).requires_grad_(False), "step": 3}, {"model": model.state_dict()}):
        with pytest.raises(NamesError, match="no parameter of the state requires a gradient"):
            ckpt.save(url, state, trainable=True)
    with pytest.raises(ckpt.errors.NotFoundError):
        ckpt.open(url)


def test_a_run_of_parts(root: str) -> None:
    """A Checkpointer of parts goes on from its newest part, over a base that was loaded before."""
    with ckpt.Checkpointer(root, trainable=True) as c:
        c.save(3, saved := job(0)).result()
    state = job(1)
    before = tensors(state)
    with ckpt.Checkpointer(root, trainable=True) as c:
        assert c.restore(state) == 3
    check_loaded(state, before, tensors(saved), lambda name: "base" not in name)


def test_a_run_of_parts_loads_its_base_at_every_start(root: str) -> None:
    """Without it, the second start would train over other frozen weights, and nobody would notice."""
    base = job(0)
    ckpt.save(f"{root}/base", {"model": base["model"]})
    origin = ckpt.BeginFrom(f"{root}/base", step=0, strict=False)
    for start in (0, 1):
        state = job(start + 1)
        with ckpt.Checkpointer(f"{root}/run", trainable=True) as c:
            assert c.restore(state, begin_from=origin) == start
            frozen = [name for name in tensors(state) if name.startswith("model.") and "base" in name]
            assert frozen and all(torch.equal(tensors(state)[name], tensors(base)[name]) for name in frozen)
            if start == 0:
                c.save(1, state).result()
                first = {name: t.clone() for name, t in tensors(state).items()}
    assert all(torch.equal(t, first[name]) for name, t in tensors(state).items())


def test_a_run_keeps_the_whole_checkpoint_below_its_parts(root: str) -> None:
    """Nothing else in the run has the frozen weights, though no policy keeps it."""
    state = job(0)
    with ckpt.Checkpointer(root, keep=Latest(1)) as c:
        for n in (1, 2):
            c.save(n, state).result()
    with ckpt.Checkpointer(root, keep=Latest(2), trainable=True) as c:
        for n in (3, 4, 5):
            c.save(n, state).result()
    assert [s.number for s in list_steps(root)] == [2, 4, 5]
    collected = CliRunner().invoke(cli, ["gc", root, "--keep", "latest=1", "--yes"]).output
    assert "step 5 is a part, and may lie over it" in collected
    assert [s.number for s in list_steps(root)] == [2, 5]
    resumed = job(1)
    with ckpt.Checkpointer(root, trainable=True) as c:
        ckpt.load(c.url(2), resumed)
        assert c.restore(resumed) == 5
    check_loaded(resumed, {}, tensors(state), lambda name: True)
    with ckpt.Checkpointer(root, keep=Latest(1)) as c:
        c.save(6, state).result()
    assert [s.number for s in list_steps(root)] == [6]


class Quantised(nn.Linear):
    """As bitsandbytes' layers: scales of the frozen weight beside parameters and buffers, and what ``state_dict`` makes anew each time."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.requires_grad_(False)
        self.scales = torch.randn(size)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}SCB"] = self.scales
        destination[f"{prefix}weight.quant_map.0"] = torch.arange(4.0)


def adapted(kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Adapted(6)
    if kind == "scales":
        model.base = Quantised(6)
    else:  # as torchao's weights: a class that computes its elements
        weight = TwoTensor(torch.randn(6, 6), torch.randn(6, 6))
        model.base.weight = nn.Parameter(weight, requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    (model.lora_B.weight.sum() + model.lora_A.weight.sum()).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("kind", ["scales", "class"])
def test_what_is_saved_beside_a_quantised_base_is_loaded(url: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    state, again = adapted(kind, 1), adapted(kind, 2)
    scales = again["model"].base.scales.clone() if kind == "scales" else None
    ckpt.save(url, state, trainable=True)
    assert {name.removeprefix("optimizer.state.").split(".")[1] for name in names(url)} == {"lora_A", "lora_B"}
    report = ckpt.load(url, again, trainable=True)
    assert report.missing == report.unexpected == ()
    assert torch.equal(again["model"].lora_A.weight, state["model"].lora_A.weight)
    assert caplog.records == []
    if scales is not None:
        assert torch.equal(again["model"].base.scales, scales)  # they are of its own base


def test_a_module_that_cannot_be_loaded_into_says_so_when_it_is_saved(root: str, caplog: pytest.LogCaptureFixture) -> None:
    model = adapted("scales", 1)["model"]
    for step in (1, 2):
        ckpt.save(f"{root}/{step}", {"model": model})
    (record,) = caplog.records
    assert "model.base.weight.quant_map.0" in record.getMessage() and "module.state_dict()" in record.getMessage()
    with pytest.raises(StateError, match=r"gives copies of 1 tensor,.*model\.base\.weight\.quant_map\.0"):
        ckpt.load(f"{root}/1", {"model": model})
    other = adapted("scales", 2)["model"]
    values = other.state_dict()
    ckpt.load(f"{root}/1", {"model": values})  # the way out
    assert torch.equal(values["base.weight"], model.base.weight)
