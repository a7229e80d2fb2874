"""Saves that write some experts of each layer in turns, and keep of the others what an earlier save wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.convert import convert
from ckpt.coordination.group import current_group
from ckpt.engine.save.base.reuse import SeenVersions
from ckpt.engine.save.job import save_cache
from ckpt.engine.verify.verify import verify
from ckpt.errors import ConflictError, ConsistencyError, CorruptError, FormatError, MismatchError, NamesError, NotFoundError, UsageError
from ckpt.formats.native import commit
from ckpt.formats.native.commit import CommitRecord
from ckpt.io_backends.registry import open_backend
from ckpt.maintenance.copy import copy_checkpoint
from ckpt.maintenance.orphans import find_orphans
from ckpt.maintenance.rebuild import rebuild_checkpoint
from ckpt.maintenance.removal import remove_at
from ckpt.policies import Anchor, EverySteps, Latest, PartialExperts
from tests.formats import oracle

HALF = PartialExperts(experts=4, per_save=2)
Tensors = dict[str, torch.Tensor]


class Job:
    """A model of two layers with four experts each, with AdamW; ``kept``: every tensor that is stored, at each step that was saved."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.ModuleDict({"gate": nn.Linear(6, 4), "experts": nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])}) for _ in "ab"]
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer, "n": 0}
        self.kept: dict[int, Tensors] = {}

    def train(self, step: int) -> None:
        for p in self.model.parameters():
            p.grad = torch.full_like(p, float(step))
        self.optimizer.step()
        self.state["n"] = step

    def tensors(self) -> Tensors:
        names = {p: n for n, p in self.model.named_parameters()}
        states = {f"optimizer.state.model.{names[p]}.{k}": t for p, s in self.optimizer.state.items() for k, t in s.items()}
        return {k: t.detach().clone() for k, t in {**{f"model.{n}": p for p, n in names.items()}, **states}.items()}

    def save(self, checkpointer: ckpt.Checkpointer, step: int) -> None:
        self.train(step)
        self.kept[step] = self.tensors()
        checkpointer.save(step, self.state)
        checkpointer.wait()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_cache(current_group()).seen = SeenVersions()  # other tests of this process save other tensors under these names
    return tmp_path / "run"


def checkpointer_at(run: Path, experts: PartialExperts | None = HALF, **options: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(run, save=EverySteps(1), partial_experts=experts, **options)


@pytest.fixture
def job(run: Path) -> Job:
    """A run of four steps."""
    made = Job()
    with checkpointer_at(run) as c:
        for step in range(1, 5):
            made.save(c, step)
    return made


def url(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def features(directory: Path) -> tuple[str, ...]:
    return CommitRecord.from_bytes((directory / "checkpoint.json").read_bytes(), "").features


def holds(directory: Path, job: Job, step: int) -> dict[str, int]:
    """Every tensor is that of the step that the index says, by our reader and one that was written from the specification alone. Gives
    the steps of those of earlier ones."""
    steps, stored = oracle.read_steps(directory), oracle.read(directory)
    view = ckpt.open(directory, mixed_steps=True)
    assert {name: view[name].step for name in view if view[name].step is not None} == steps
    for name in job.kept[step]:
        wanted = job.kept[steps.get(name, step)][name]
        assert torch.equal(view[name][...], wanted), name
        assert stored[name][2] == wanted.contiguous().numpy().tobytes(), name
    assert not verify(directory).problems
    return steps


def expert(name: str) -> tuple[int, int] | None:
    return HALF.place(name)


# ------------------------------------------------------------------------------------------------------------ rotation


def test_each_save_writes_its_experts_and_the_next_ones_the_others(run: Path, job: Job) -> None:
    assert holds(url(run, 1), job, 1) == {}
    assert features(url(run, 1)) == ()
    for step, turn in ((2, 0), (3, 1), (4, 0)):
        steps = holds(url(run, step), job, step)
        experts = {name for name in job.kept[1] if expert(name) is not None}
        assert len(experts) == 2 * 4 * 2 * 4  # weights and biases, each with what AdamW has for it
        # What the base wrote itself is of its step. So everything was written once in two saves.
        assert steps == {name: step - 1 for name in experts if sum(expert(name) or ()) % 2 != turn}
        assert features(url(run, step)) == ("references", "mixed-steps")
        assert sum(f.stat().st_size for f in (url(run, step) / "data").iterdir()) < 20_000


def test_what_a_save_refers_to_stays_until_a_whole_save_needs_nothing(run: Path) -> None:
    """Of four experts one is written at a time: the oldest is three saves old, and is not read from the save that took it over."""
    job, experts = Job(), PartialExperts(experts=4, per_save=1, whole_every=6)
    with checkpointer_at(run, experts, keep=Latest(1)) as c:
        for step in range(1, 7):
            job.save(c, step)
        assert [s.number for s in c.steps()] == [1, 2, 3, 4, 5, 6]
        assert set(holds(url(run, 6), job, 6).values()) == {3, 4, 5}
        with pytest.raises(ConflictError, match="step-00000006"):
            remove_at(str(url(run, 3)))
        job.save(c, 7)
        assert [s.number for s in c.steps()] == [7]
        job.save(c, 8)
    assert holds(url(run, 7), job, 7) == {} and features(url(run, 7)) == ()
    assert set(holds(url(run, 8), job, 8).values()) == {7}
    backend = open_backend(str(run))
    assert not find_orphans(backend, older_than=0, now=backend.now() or 0.0)


def test_frozen_experts_are_exact_when_it_is_their_turn(run: Path) -> None:
    job = Job()
    job.model["layers"][0]["experts"].requires_grad_(False)
    with checkpointer_at(run) as c:
        for step in range(1, 4):
            for p in job.model.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            job.optimizer.step()
            job.kept[step] = job.tensors()
            c.save(step, job.state)
            c.wait()
    steps = holds(url(run, 3), job, 3)
    assert "model.layers.0.experts.1.weight" not in steps and steps["model.layers.0.experts.0.weight"] == 2


def test_codecs_do_not_matter(run: Path) -> None:
    job = Job()
    with checkpointer_at(run, codec="zstd") as c:
        for step in range(1, 4):
            job.save(c, step)
    assert len(holds(url(run, 3), job, 3)) == 32


# ------------------------------------------------------------------------------------------------------- asked for or not


def test_nothing_reads_it_without_being_asked_to(run: Path, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest, before = url(run, 4), job.tensors()
    refused: list[Any] = [
        lambda: ckpt.open(newest),
        lambda: ckpt.load(newest, job.state),
        lambda: ckpt.load(newest, job.state, dry_run=True),
        lambda: convert(newest, tmp_path / "converted", to="native"),
        lambda: ckpt.merge(tmp_path / "merged", [newest, newest]),
        lambda: checkpointer_at(run).restore(job.state),
    ]
    for read in refused:
        with pytest.raises(ConsistencyError, match=r"32 of its 80 tensors are of earlier steps than the others: 32 of step 3, such as"):
            read()
    assert all(torch.equal(t, before[name]) for name, t in job.tensors().items())
    assert not (tmp_path / "converted").exists()

    again = Job()
    report = ckpt.load(newest, again.state, mixed_steps=True)
    assert report.mixed_steps == oracle.read_steps(newest)
    assert "32 of step 3" in caplog.text
    assert all(torch.equal(t, job.kept[report.mixed_steps.get(name, 4)][name]) for name, t in again.tensors().items())
    converted = convert(newest, tmp_path / "converted", to="native", mixed_steps=True)
    assert converted.mixed_steps == report.mixed_steps
    assert oracle.read_steps(tmp_path / "converted") == {}
    assert ckpt.load(url(run, 1), again.state).mixed_steps == {}


def test_the_commands_tell_it(run: Path, job: Job, tmp_path: Path) -> None:
    def output(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == code, result.output
        return result.output

    assert output("ls", str(run)).count("some tensors are of earlier steps") == 3
    assert [s["mixed_steps"] for s in json.loads(output("ls", "--json", str(run)))["steps"]] == [False, True, True, True]
    assert "tensors of earlier steps: 32 of step 3" in output("inspect", str(url(run, 4)))
    assert "of step 3" in output("inspect", str(url(run, 4)), "model.layers.0.experts.1.*")
    tensors = {t["name"]: t["step"] for t in json.loads(output("inspect", "--json", str(url(run, 4))))["tensors"]}
    assert {name: step for name, step in tensors.items() if step is not None} == oracle.read_steps(url(run, 4))
    target = str(tmp_path / "model.pt")
    assert "mixed_steps=True" in output("convert", "--to", "torch", str(url(run, 4)), target, code=22)
    assert "32 of step 3" in output("convert", "--to", "torch", "--mixed-steps", str(url(run, 4)), target)
    output("verify", str(url(run, 4)))
    output("diff", str(url(run, 3)), str(url(run, 4)), code=3)


def test_readers_that_do_not_know_it_refuse_it_by_name(run: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "FEATURES", commit.FEATURES - {commit.MIXED})
    with pytest.raises(FormatError, match="'mixed-steps'"):
        ckpt.open(url(run, 4), mixed_steps=True)


# ----------------------------------------------------------------------------------------------------- restarts and losses


def test_the_first_save_of_a_process_writes_all(run: Path, job: Job) -> None:
    again = Job()
    again.kept = job.kept
    with checkpointer_at(run) as c:
        assert c.restore(again.state, mixed_steps=True) == 4
        again.save(c, 5)
        again.save(c, 6)
    assert holds(url(run, 5), again, 5) == {}
    assert set(holds(url(run, 6), again, 6).values()) == {5}


def lose(run: Path, job: Job) -> None:
    shutil.rmtree(url(run, 1))


def lose_a_file(run: Path, job: Job) -> None:
    next((url(run, 1) / "data").iterdir()).unlink()


def reshape(run: Path, job: Job) -> None:
    job.state["model"] = job.model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)] * 4)})])}
    )
    del job.state["optimizer"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lose, (CorruptError, NotFoundError), "there is no checkpoint|is missing"),
        (lose_a_file, CorruptError, "is missing"),
        (reshape, MismatchError, "the base has none of this state's tensors|model.layers.0.experts.1.weight: this save does not write it"),
    ],
)
def test_a_base_that_lacks_an_expert_fails_the_save_and_the_next_one_is_whole(run: Path, change: Any, error: Any, message: str) -> None:
    job = Job()
    with checkpointer_at(run) as c:
        job.save(c, 1)
        change(run, job)
        with pytest.raises(error, match=message):
            c.save(2, job.state).result()
        assert not (url(run, 2) / "checkpoint.json").exists()
        c.save(3, job.state)
        c.wait()
    assert oracle.read_steps(url(run, 3)) == {}


def test_an_expert_of_another_shape_is_named(run: Path) -> None:
    state = {"experts": {str(i): {"w": torch.full((4, 4), float(i))} for i in range(4)}}
    with checkpointer_at(run, PartialExperts(names="experts.{expert}.*", experts=4, per_save=2)) as c:
        c.save(1, state)
        c.wait()
        state["experts"]["1"]["w"] = torch.zeros(5, 4)
        with pytest.raises(MismatchError, match=r"tensor experts.1.w: this save does not write it.*has none of this name, dtype and shape"):
            c.save(2, state)


def test_a_copy_needs_no_other_checkpoint_and_still_says_it(run: Path, job: Job, tmp_path: Path) -> None:
    wanted = holds(url(run, 4), job, 4)
    assert copy_checkpoint(url(run, 4), tmp_path / "copy").committed
    shutil.rmtree(run)
    assert features(tmp_path / "copy") == ("mixed-steps",)
    assert holds(tmp_path / "copy", job, 4) == wanted
    with pytest.raises(ConsistencyError, match="earlier steps"):
        ckpt.open(tmp_path / "copy")
    for state in (tmp_path / "copy").glob("index-*/state.json"):
        state.write_bytes(b"")
    assert rebuild_checkpoint(str(tmp_path / "copy")).rebuilt  # with the tables that are left
    assert oracle.read_steps(tmp_path / "copy") == wanted
    record = (tmp_path / "copy" / "checkpoint.json").read_bytes()
    (tmp_path / "copy" / "checkpoint.json").write_bytes(record[:-9])
    with pytest.raises(FormatError, match="no data file says which"):
        rebuild_checkpoint(str(tmp_path / "copy"), id=json.loads(record)["id"])
    (tmp_path / "copy" / "checkpoint.json").write_bytes(record)
    for table in (tmp_path / "copy").glob("index-*/tensors.arrow"):
        table.write_bytes(b"")
    with pytest.raises(FormatError, match="no data file says which"):
        rebuild_checkpoint(str(tmp_path / "copy"))


# -------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": 0, "per_save": 1}, "is a number, at least 1"),
        ({"experts": 4, "per_save": True}, "is a number, at least 1"),
        ({"experts": 4, "per_save": 1, "whole_every": 0}, "is a number, at least 1"),
        ({"experts": 4, "per_save": 5}, "cannot write 5 of 4 experts"),
        ({"experts": 4, "per_save": 2, "names": "*.experts.*"}, "is a glob with one {expert}"),
        ({"experts": 4, "per_save": 2, "stacked": "*.experts.{expert}.*"}, "is a glob without {expert}, or None"),
        ({"experts": 4, "per_save": 2, "stacked": ["*.experts.*"]}, "is a glob without {expert}, or None"),
    ],
)
def test_policies_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PartialExperts(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial_experts": 4}, "says which experts a save writes"),
        ({"partial_experts": HALF, "anchor": Anchor()}, "does not go with anchor="),
        ({"partial_experts": HALF, "local": "fast"}, "partial_experts= does not work with a local tier"),
        ({"partial_experts": HALF, "local": ckpt.NodeLocal("fast")}, "partial_experts= does not work with a local tier"),
        ({"partial_experts": HALF, "memory": ckpt.Memory(every=EverySteps(1))}, "partial_experts= does not work with a local tier"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ckpt.Checkpointer(run, **options)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [("w", NamesError, "no tensor of the state has such a name"), ("m.experts.4.w", UsageError, "is of expert 4")],
)
def test_a_state_without_experts_or_with_more_is_an_error(run: Path, name: str, error: type[Exception], message: str) -> None:
    c = checkpointer_at(run)
    with pytest.raises(error, match=message):
        c.save(1, {name: torch.ones(3)}).result()


@pytest.mark.parametrize(("experts", "per_save"), [(4, 2), (8, 3), (5, 4), (7, 1), (3, 3), (64, 7)])
def test_every_expert_has_its_turn_and_no_save_writes_more_than_it_should(experts: int, per_save: int) -> None:
    policy = PartialExperts(experts=experts, per_save=per_save)
    for layer in range(3):
        turns = [{n for n in range(experts) if policy.is_written((layer, n), turn)} for turn in range(policy.period)]
        assert sorted(n for written in turns for n in written) == list(range(experts))
        assert max(map(len, turns)) <= per_save
        assert turns[0] == {n for n in range(experts) if policy.is_written((layer, n), policy.period)}


def test_names() -> None:
    assert HALF.place("optimizer.state.model.layers.3.mlp.experts.2.w1.weight.exp_avg") == (3, 2)
    assert HALF.place("model.layers.3.mlp.experts.2.w1.weight") == (3, 2)
    assert HALF.place("model.layers.3.mlp.shared_experts.2.weight") is None
    assert HALF.place("model.layers.3.mlp.experts.gate.weight") is None
    assert PartialExperts(names="e{expert}?[0]*", experts=4, per_save=1).place("e2.[0].w") == (0, 2)
