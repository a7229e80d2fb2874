"""Partial experts where one tensor has all experts of a layer: a save writes the rows of its experts, and of what AdamW has for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import cli
from ckpt.coordination.group import current_group
from ckpt.engine.save.base.reuse import SeenVersions
from ckpt.engine.save.job import save_cache
from ckpt.engine.verify.verify import verify
from ckpt.errors import ConsistencyError, NamesError, UsageError
from ckpt.maintenance.copy import copy_checkpoint
from ckpt.policies import EverySteps, PartialExperts
from tests.formats import oracle

HALF = PartialExperts(experts=4, per_save=2)
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(30, 4)
        self.experts = nn.ParameterDict({"w1": torch.randn(4, 30, 40), "bias": torch.randn(4, 40)})


class Job:
    """A model of two layers with four experts each, with AdamW; ``kept``: every tensor that is stored, at each step that was saved."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.kept: dict[int, Tensors] = {}

    def tensors(self) -> Tensors:
        names = {p: n for n, p in self.model.named_parameters()}
        states = {f"optimizer.state.model.{names[p]}.{k}": t for p, s in self.optimizer.state.items() for k, t in s.items()}
        return {k: t.detach().clone() for k, t in {**{f"model.{n}": p for p, n in names.items()}, **states}.items()}

    def save(self, checkpointer: ckpt.Checkpointer, step: int) -> int:
        """The bytes that were written."""
        for p in self.model.parameters():
            p.grad = torch.full_like(p, float(step))
        self.optimizer.step()
        self.kept[step] = self.tensors()
        return checkpointer.save(step, self.state).result().rank_bytes


def checkpointer_at(run: Path, experts: PartialExperts = HALF, **options: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(run, save=EverySteps(1), partial_experts=experts, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_cache(current_group()).seen = SeenVersions()  # other tests of this process save other tensors under these names
    return tmp_path / "run"


def url(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def holds(directory: Path, job: Job, step: int) -> dict[str, list[int | None]]:
    """Each row is that of the step that the index says, by our reader and one that was written from the specification alone."""
    rows, stored, view = oracle.read_row_steps(directory), oracle.read(directory), ckpt.open(directory, mixed_steps=True)
    assert {name: view[name].step for name in view if view[name].step is not None} == oracle.read_steps(directory)
    for name, tensor in job.kept[step].items():
        steps = rows.get(name, [None] * len(tensor)) if tensor.ndim else [None]
        wanted = torch.stack([job.kept[of or step][name][row] for row, of in enumerate(steps)]) if tensor.ndim else tensor
        assert torch.equal(view[name][...], wanted), name
        assert stored[name][2] == wanted.numpy().tobytes(), name
    assert not verify(directory).problems
    return rows


def is_stacked(name: str) -> bool:
    return ".experts." in name and not name.endswith(".step")


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_save_writes_the_rows_of_its_experts_and_of_their_moments(run: Path, codec: str | None) -> None:
    job = Job()
    with checkpointer_at(run, codec=codec) as c:
        written = [job.save(c, step) for step in range(1, 5)]
    assert holds(url(run, 1), job, 1) == {}
    stacked = [name for name in job.kept[1] if is_stacked(name)]
    assert len(stacked) == 2 * 2 * 3  # weights and biases, each with two moments
    for step, turn in ((2, 0), (3, 1), (4, 0)):
        steps = {layer: [None if (row + layer) % 2 == turn else step - 1 for row in range(4)] for layer in (0, 1)}
        assert holds(url(run, step), job, step) == {name: steps[1 if "layers.1" in name else 0] for name in stacked}
    assert max(written[1:]) < 0.6 * written[0]

    again = Job()
    with pytest.raises(ConsistencyError, match=r"12 of its \d+ tensors are of earlier steps than the others: 12 of step 3, such as"):
        ckpt.load(url(run, 4), again.state)
    report = ckpt.load(url(run, 4), again.state, mixed_steps=True)
    assert report.mixed_steps == dict.fromkeys(stacked, 3)
    loaded = again.tensors()
    for name in stacked:
        for row in range(4):
            assert torch.equal(loaded[name][row], job.kept[4 if (row + ("layers.1" in name)) % 2 == 0 else 3][name][row]), name
    text = CliRunner().invoke(cli, ["inspect", str(url(run, 4)), "model.layers.0.*"]).output
    assert text.count("2 of 4 chunks of step 3") == 2


def test_the_oldest_row_is_named_and_a_copy_keeps_the_steps(run: Path, tmp_path: Path) -> None:
    job = Job()
    with checkpointer_at(run, PartialExperts(experts=4, per_save=1, whole_every=6)) as c:
        for step in range(1, 8):
            job.save(c, step)
    rows = holds(url(run, 6), job, 6)
    assert rows["model.layers.0.experts.w1"] == [None, 3, 4, 5]
    assert rows["model.layers.1.experts.w1"] == [3, 4, 5, None]
    assert ckpt.load(url(run, 6), Job().state, mixed_steps=True).mixed_steps["model.layers.1.experts.bias"] == 3
    assert "3 of 4 chunks of steps 3, 4, 5" in CliRunner().invoke(cli, ["inspect", str(url(run, 6)), "model.layers.0.*"]).output
    assert holds(url(run, 7), job, 7) == {}
    assert copy_checkpoint(url(run, 6), tmp_path / "copy").committed
    shutil.rmtree(run)
    assert holds(tmp_path / "copy", job, 6) == rows


def test_numbered_and_stacked_experts_and_a_part_of_the_state(run: Path) -> None:
    """Both kinds in one state, of which a part is saved: what is left out has no step, and what is no expert is of every save."""
    experts = {str(n): {"w": torch.zeros(20, 5)} for n in range(4)}
    state = {"layers": {"1": {"experts": {"all": torch.zeros(4, 6), **experts}, "rest": torch.zeros(3)}}, "out": torch.zeros(9)}
    with checkpointer_at(run, only="layers.*") as c:
        for step in (1, 2, 3):
            for tensor in (state["layers"]["1"]["experts"]["all"], state["layers"]["1"]["rest"], *(e["w"] for e in experts.values())):
                tensor.fill_(step)
            c.save(step, state).result()
    rows = oracle.read_row_steps(url(run, 3))
    assert rows == {"layers.1.experts.all": [None, 2, None, 2], **{f"layers.1.experts.{n}.w": [2] * 20 for n in (1, 3)}}
    stored = {name: torch.frombuffer(bytearray(raw), dtype=torch.float32) for name, (_, _, raw) in oracle.read(url(run, 3)).items()}
    assert stored.keys() == {"layers.1.rest", "layers.1.experts.all", *(f"layers.1.experts.{n}.w" for n in range(4))}
    assert stored["layers.1.experts.all"].reshape(4, 6)[:, 0].tolist() == [3, 2, 3, 2]
    assert [stored[f"layers.1.experts.{n}.w"][0].item() for n in range(4)] == [3, 2, 3, 2]


def test_frozen_rows_are_exact_when_it_is_their_turn(run: Path) -> None:
    state = {"a.experts.w": torch.ones(4, 3000), "n": torch.zeros(1)}
    with checkpointer_at(run) as c:
        written = [c.save(step, state).result().rank_bytes for step in (1, 2, 3)]
    assert max(written[1:]) < 10_000  # what has not changed is referred to, and only the others are said to be of another step
    assert oracle.read_row_steps(url(run, 2)) == {"a.experts.w": [None, 1, None, 1]}
    assert oracle.read_row_steps(url(run, 3)) == {"a.experts.w": [2, None, 2, None]}


@pytest.mark.parametrize(
    ("name", "shape", "experts", "error", "message"),
    [
        ("experts.w", (5, 3), HALF, UsageError, r"tensor layers.0.experts.w of shape \[5, 3\] is one of PartialExperts\(stacked="),
        ("experts.w", (4, 3), PartialExperts(experts=4, per_save=2, stacked=None), NamesError, "no tensor of the state has such a name"),
        ("experts.absmax", (64,), HALF, UsageError, "its rows are not the 4 experts of a layer"),
    ],
)
def test_what_is_not_made_of_experts_is_named(run: Path, name: str, shape: tuple[int, ...], experts: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message), checkpointer_at(run, experts) as c:
        c.save(1, {"layers": {"0": {name: torch.zeros(shape)}}}).result()
    assert not (url(run, 1) / "checkpoint.json").exists()
