"""A run that began elsewhere goes on with a Checkpointer: checkpoints that DCP makes here, and those of DeepSpeed and Megatron."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt
from ckpt.errors import CorruptError, MismatchError, NamesError, NotFoundError, UsageError
from ckpt.policies import EverySteps
from tests.formats.reading import FIXTURES, same
from tests.formats.test_deepspeed import PREFIX, Net, by_hand

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Job:
    """A model whose names could be read in several ways: ``1.0.weight`` is also ``0.weight`` of module 1."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 + seed)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state["step"] += 1
            torch.manual_seed(self.state["step"])
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def dcp_save(job: Job, url: Path) -> str:
    weights, moments = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": job.state["step"]}, checkpoint_id=url)
    return str(url)


def test_a_run_of_dcp_goes_on_bit_for_bit(tmp_path: Path) -> None:
    old = Job()
    old.train(3)
    url = dcp_save(old, tmp_path / "dcp" / "step-3")
    old.train(3)
    for start in (3, 5):  # the second start finds a checkpoint of the run's own, with the same line in the program
        job = Job(seed=1)
        with ckpt.Checkpointer(str(tmp_path / "run"), save=EverySteps(5)) as c:
            assert c.restore(job.state, begin_from=url) == start == job.state["step"]
            assert c.restored_from is not None and c.restored_from.url == (url if start == 3 else c.url(5))
            assert not c.step(3, job.state) or start == 5
            job.train(5 - start)
            assert c.step(5, job.state) == (start == 3)
            c.wait()
            job.train(1)
        assert all(map(same, job.weights(), old.weights()))
        assert job.optimizer.param_groups[0]["lr"] == 0.1
    with ckpt.Checkpointer(str(tmp_path / "run")) as c:
        assert c.restore(Job().state) == 5  # and nothing has to be said any more


def test_names_that_match_several_ways_or_are_renamed_by_hand_stay(tmp_path: Path) -> None:
    old = Job()
    old.train(1)
    url = dcp_save(old, tmp_path / "step-1")
    job = Job()
    ckpt.load(url, job.state, rename={"optimizer.state.*": "optimizer.state.model.*"})
    twin = {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})}
    optimizer = torch.optim.SGD(twin["model"].parameters(), momentum=0.9)
    single = nn.Linear(2, 2)
    other = torch.optim.SGD(single.parameters(), momentum=0.9)
    single(torch.ones(1, 2)).sum().backward()
    other.step()
    _, moments = get_state_dict(single, other)
    dcp.save({"optimizer": moments}, checkpoint_id=tmp_path / "single")
    with pytest.raises(NamesError, match="optimizer.param_groups of model.a.weight"):  # a or b: nobody knows, so nothing is mapped
        ckpt.load(str(tmp_path / "single"), twin | {"optimizer": optimizer}, only="optimizer.*")


@pytest.mark.parametrize("spelled", ["containers", "parts"])
def test_renames_of_the_caller_and_the_module_in_front_combine(tmp_path: Path, spelled: str) -> None:
    """DCP's checkpoint calls the model and the optimizer otherwise, and the optimizer's parameters by their names in the model."""
    old = Job()
    old.train(2)
    weights, moments = get_state_dict(old.model, old.optimizer)
    dcp.save({"net": weights, "optim": moments, "step": 2}, checkpoint_id=tmp_path / "old")
    rename = {"net.*": "model.*", "optim.*": "optimizer.*"}
    if spelled == "parts":
        rename = {"net.*": "model.*", "optim.state.*": "optimizer.state.*", "optim.param_groups": "optimizer.param_groups"}
    job = Job(seed=1)
    report = ckpt.load(str(tmp_path / "old"), job.state, rename=rename)
    assert report.renamed["optim.state.1.0.weight.exp_avg"] == "optimizer.state.model.1.0.weight.exp_avg"
    assert job.optimizer.param_groups[0]["lr"] == 0.1 and job.state["step"] == 2
    old.train(2)
    job.train(2)
    assert all(map(same, job.weights(), old.weights()))


def test_a_module_that_explains_only_a_part_is_not_taken_where_another_would_do(tmp_path: Path) -> None:
    """``0.weight`` and ``1.weight`` are of ``model`` with other layers, or of ``model.1``: nobody knows."""
    smaller = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(smaller.parameters())
    smaller(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    dcp.save({"optimizer": get_state_dict(smaller, optimizer)[1]}, checkpoint_id=tmp_path / "old")
    with pytest.raises(NamesError):
        ckpt.load(str(tmp_path / "old"), Job().state, only="optimizer.*")


def test_a_mismatch_says_what_was_mapped(tmp_path: Path) -> None:
    old = Job()
    old.train(1)
    url = dcp_save(old, tmp_path / "step-1")
    smaller = nn.Sequential(nn.Linear(8, 8))
    state = {"model": smaller, "optimizer": torch.optim.AdamW(smaller.parameters()), "step": 0}
    with pytest.raises(NamesError) as raised, ckpt.Checkpointer(str(tmp_path / "run")) as c:
        c.restore(state, begin_from=url)
    assert "optimizer.state.1.0.weight.exp_avg → optimizer.state.model.1.0.weight.exp_avg" in str(raised.value)


def test_which_step_it_was(tmp_path: Path) -> None:
    old = Job()
    old.train(2)
    named = dcp_save(old, tmp_path / "last")
    with ckpt.Checkpointer(str(tmp_path / "a")) as c:
        assert c.restore(Job().state, begin_from=named) == 2  # as the state counts it
        assert c.restore(Job().state, begin_from=ckpt.BeginFrom(named, step=40)) == 40
        assert c.restore(Job().state, begin_from=str(tmp_path / "last") + "/") == 2
        assert c.restore(Job().state, begin_from=tmp_path / "last") == 2
        assert c.restore(Job().state, begin_from=ckpt.BeginFrom(tmp_path / "last")) == 2
    misleading = dcp_save(old, tmp_path / "llama-3")  # the number of something else
    with ckpt.Checkpointer(str(tmp_path / "c")) as c:
        assert c.restore(Job().state, begin_from=misleading) == 2
    old.state.pop("step")
    weights, moments = get_state_dict(old.model, old.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "unnumbered")
    before = Job()
    untouched = before.weights()
    before.state.pop("step")
    with ckpt.Checkpointer(str(tmp_path / "b")) as c:
        with pytest.raises(UsageError, match="which step") as raised:
            c.restore(before.state, begin_from=str(tmp_path / "unnumbered"))
        assert "BeginFrom(url, step=" in str(raised.value.hint) and all(map(same, before.weights(), untouched))
        with pytest.raises(UsageError, match="whole number"):
            c.restore(before.state, begin_from=ckpt.BeginFrom(named, step=-1))
        with pytest.raises(UsageError, match="one of them|this run"):
            c.restore(before.state, step=1, begin_from=named)
        with pytest.raises(NotFoundError):
            c.restore(before.state, begin_from=str(tmp_path / "nowhere-7"))


def test_a_damaged_run_does_not_begin_again(tmp_path: Path) -> None:
    """Only a run without any checkpoint begins elsewhere: else days of training would go without a word."""
    old = Job()
    old.train(1)
    url = dcp_save(old, tmp_path / "step-1")
    with ckpt.Checkpointer(str(tmp_path / "run")) as c:
        c.save(9, Job().state).result()
        for path in (tmp_path / "run").rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
        with pytest.raises(CorruptError):
            c.restore(Job().state, begin_from=url)
        record = tmp_path / "run/step-00000009/checkpoint.json"
        record.write_bytes(record.read_bytes()[:-9])
        for options in ({"begin_from": url}, {}, {"step": 9}):
            with pytest.raises(CorruptError, match="no checkpoint here can be read") as raised:
                c.restore(Job().state, **options)
            assert "ckpt rebuild" in str(raised.value.hint)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_run_of_deepspeed(name: str, tmp_path: Path) -> None:
    """By the directory above the tags, as the job named it: ``latest`` says which tag counts, and the tag which step it is."""
    expected = by_hand(FIXTURES / "deepspeed" / name / "global_step3")
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    state = {"model": model, "optimizer": optimizer, "global_steps": 0}
    origin = ckpt.BeginFrom(
        str(FIXTURES / "deepspeed" / name),
        only=["model.*", "optimizer.*", "global_steps"],
        rename={"optimizer.state.*.master": "masters.*"},
        cast=True,
    )
    with ckpt.Checkpointer(str(tmp_path), save=EverySteps(2)) as c:
        assert c.restore(state, begin_from=origin) == 3 == state["global_steps"]
        assert [n for n in (3, 4) if c.step(n, state)] == [4]
    for parameter, tensor in model.named_parameters():
        for key, value in optimizer.state.get(tensor, {}).items():
            if key != "step":
                assert same(value, expected[f"{PREFIX}{parameter}.{key}"])
    with ckpt.Checkpointer(str(tmp_path)) as c:
        assert c.restore(state, begin_from=origin) == 4  # the options of the beginning are not those of the run


def test_a_run_of_megatron(tmp_path: Path) -> None:
    """A module with Megatron's names, from the directory of the run: the tracker file says which iteration."""
    with tarfile.open(FIXTURES / "megatron" / "plain_fp32.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    form = next(p for p in sorted((tmp_path / "plain_fp32").iterdir()) if p.name != "memory")
    view = ckpt.open(str(form))
    names = [n for n in view if n.startswith("model.")]
    model = _module({n.removeprefix("model."): view[n].read() for n in names})
    expected = {n: view[n].read() for n in view if n.startswith(("model.", "optimizer.state."))}
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == decayed]} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    state = {"model": model, "optimizer": optimizer}
    origin = ckpt.BeginFrom(str(form), step=12, only=["model.*", "optimizer.*"], strict=False)
    with ckpt.Checkpointer(str(tmp_path / "run")) as c:
        assert c.restore(state, begin_from=origin) == 12
    for name, param in model.named_parameters():
        assert same(param.detach(), expected[f"model.{name}"])
        assert same(optimizer.state[param]["exp_avg"], expected[f"optimizer.state.model.{name}.exp_avg"])


def _module(tensors: dict[str, torch.Tensor]) -> nn.Module:
    root = nn.Module()
    for name, value in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, nn.Parameter(torch.zeros_like(value)))
    return root


def test_a_state_that_does_not_fit_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    url = dcp_save(job, tmp_path / "step-1")
    with ckpt.Checkpointer(str(tmp_path / "run")) as c:
        c.save(2, {"other": torch.zeros(3)}).result()
        with pytest.raises(MismatchError):
            c.restore(job.state, begin_from=url)
