"""The torchtitan-style manager, with torch's own optimizers and, where torchtitan is installed, as its trainer builds it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.integrations import titan
from tests.distributed.models import Trained, fsdp, mesh_of, trained, whole_model
from tests.distributed.ranks import Ranks
from tests.integrations.test_dcp import Full, flat, same


class Counter:
    """A state of the trainer's own, as torchtitan's ``train_state``."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Loader(Counter):
    """Each rank's position, under a key of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {f"rank_{dist.get_rank()}": self.step + 100 * dist.get_rank(), "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state.get(f"rank_{dist.get_rank()}", 0) - 100 * dist.get_rank()


class Job:
    """A model in FSDP2, and all that a trainer gives the manager."""

    def __init__(self, folder: str, seed: int, *, per_rank: bool = False, **options: Any) -> None:
        self.which: Trained = trained(fsdp(whole_model(seed), mesh_of(dp=dist.get_world_size())))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.which.optimizer, 1, gamma=0.9)
        self.counter, self.loader = Counter(), Loader()
        self.manager = titan.CheckpointManager(
            titan.Config(folder="checkpoint", **{"interval": 2, "keep_latest_k": 2} | options),
            dataloader=ckpt.PerRank(self.loader) if per_rank else self.loader,
            model_parts=[self.which.model],
            optimizers=self.which.optimizer,
            lr_schedulers=self.scheduler,
            states={"train_state": self.counter},
            base_folder=folder,
        )

    def train(self, last: int) -> list[bool]:
        saved = []
        while self.counter.step < last:
            self.which.train()
            self.scheduler.step()
            self.counter.step += 1
            self.loader.step += 3
            saved.append(self.manager.save(self.counter.step, last_step=self.counter.step == last))
        return saved

    def full(self) -> Full:
        state = self.which.optimizer.state_dict()["state"]
        return flat({"model": self.which.model.state_dict(), "optimizer": state})


def save(folder: str, last: int) -> tuple[Full, list[bool], list[int]]:
    job = Job(folder, 1, last_save_model_only=False, async_mode="async")
    saved = job.train(last)
    job.manager.close()
    return job.full(), saved, [s.number for s in job.manager.checkpointer.steps()]


def go_on(folder: str) -> tuple[Full, Any]:
    job = Job(folder, 2, last_save_model_only=False)
    assert job.manager.load()
    at = job.counter.step, job.loader.step, job.scheduler.get_last_lr()
    found = job.full()
    job.manager.close()
    return found, at


def test_saved_on_two_ranks_gone_on_with_on_three(ranks: Ranks, tmp_path: Path) -> None:
    expected, saved, steps = ranks.run(2, save, str(tmp_path), 7)[0]
    assert saved == [False, True, False, True, False, True, True]
    assert steps == [6, 7]
    for rank, (found, (step, position, rates)) in enumerate(ranks.run(3, go_on, str(tmp_path))):
        same(found, expected)
        assert step == 7 and rates == [pytest.approx(0.01 * 0.9**7), pytest.approx(0.005 * 0.9**7)]
        assert position == (21 if rank < 2 else -200)


def only_parts(folder: str) -> list[Any]:
    job = Job(folder, 1, per_rank=True, async_mode="disabled", enable_first_step_checkpoint=True, export_dtype="bfloat16")
    assert not job.manager.load()
    with pytest.raises(ckpt.errors.NotFoundError):
        job.manager.load(step=5)
    job.train(3)
    job.manager.close()
    url = f"{folder}/checkpoint/step-00000003"
    stored = {(t.name.partition(".")[0], str(t.dtype)) for t in ckpt.open(url).tensors() if t.dtype.is_floating_point}
    other = Job(f"{folder}/other", 2, per_rank=True, initial_load_path=f"{folder}/checkpoint/step-00000002", load_only=True)
    assert other.manager.load()
    model = [flat({"m": j.which.model.state_dict()}) for j in (job, other)]
    with_step = Job(folder, 3, per_rank=True, exclude_from_loading=["lr_scheduler"])
    assert with_step.manager.load(step=2)
    there = other.counter.step, with_step.counter.step, with_step.scheduler.last_epoch, with_step.loader.step, other.train(2)
    other.manager.close()
    with_step.manager.close()
    same(flat({"m": with_step.which.model.state_dict()}), model[1])
    return [stored, there, model[0].keys() == model[1].keys()]


def test_parts_the_first_and_the_last_step(ranks: Ranks, tmp_path: Path) -> None:
    stored, there, alike = ranks.run(1, only_parts, str(tmp_path))[0]
    assert stored == {("model", "torch.bfloat16")}
    assert there == (0, 2, 0, 6, [False, False])
    assert alike


class Fused(torch.nn.Module):
    """Its state has the two halves of one weight, as copies."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.name, self.weight = name, torch.nn.Parameter(torch.full((4, 3), value))
        self.register_state_dict_post_hook(Fused._split)
        self.register_load_state_dict_pre_hook(Fused._join)

    def _split(self, state: dict[str, Any], *_: Any) -> None:
        first, second = state.pop("weight").clone().chunk(2)
        state |= {f"{self.name}.first": first.clone(), f"{self.name}.second": second.clone()}

    def _join(self, state: dict[str, Any], *_: Any) -> None:
        state["weight"] = torch.cat([state.pop(f"{self.name}.first"), state.pop(f"{self.name}.second")])


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one-part", "two-parts"])
def test_a_model_whose_state_has_copies_gets_what_was_loaded(tmp_path: Path, names: tuple[str, ...]) -> None:
    def manager(offset: float) -> tuple[list[Fused], titan.CheckpointManager]:
        parts = [Fused(name, offset + at) for at, name in enumerate(names)]
        return parts, titan.CheckpointManager(
            titan.Config(folder=str(tmp_path), interval=1),
            dataloader=None,
            model_parts=parts,
            optimizers=None,
            lr_schedulers=None,
            states={"train_state": Counter()},
        )

    _, saving = manager(1.0)
    saving.save(1)
    saving.close()
    parts, loading = manager(5.0)
    assert loading.load()
    assert [part.weight.unique().tolist() for part in parts] == [[1.0 + at] for at in range(len(names))]
    loading.close()


class Adapter:
    """Names below ``model.``, and one weight with its rows in another order, as rotary embeddings need it."""

    def __init__(self, assets: str | None, lacks: str = "") -> None:
        self.hf_assets_path, self.lacks = assets, lacks

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": _turned(value, name) for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        state = {name.removeprefix("model."): value for name, value in state.items()}
        return {name: _turned(value, name) for name, value in state.items() if name != self.lacks}


def _turned(value: Any, name: str) -> Any:
    """Halves of rows swapped: its own inverse."""
    return torch.cat(value.chunk(2)[::-1]) if name.endswith("weight") and value.ndim == 2 and value.shape[0] % 2 == 0 else value


def fail(*_: Any) -> None:
    raise KeyError("no such weight")


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ckpt.CkptError, KeyError) as err:
        return f"{type(err).__name__}: {err}"
    return ""


def in_hugging_face_files(folder: str) -> list[Any]:
    def job(name: str, seed: int, adapter: Adapter, **options: Any) -> Job:
        made = Job(f"{folder}/{name}", seed)
        made.manager = titan.CheckpointManager(
            titan.Config(interval=2, async_mode="disabled", **options),
            dataloader=None,
            model_parts=[made.which.model],
            optimizers=made.which.optimizer,
            lr_schedulers=None,
            states={"train_state": made.counter},
            sd_adapter=adapter,
            base_folder=f"{folder}/{name}",
        )
        return made

    first = job("first", 1, Adapter(None), last_save_in_hf=True, export_dtype="bfloat16")
    first.train(3)
    assert [s.number for s in first.manager.checkpointer.steps()] == [2]
    written = f"{folder}/first/checkpoint/hf"
    second = job("second", 2, Adapter(written), initial_load_in_hf=True)
    assert second.manager.load() and second.counter.step == 0
    lacking = job("third", 3, Adapter(None, "layers.0.wq.weight"), initial_load_in_hf=True, initial_load_path=written)
    name = next(name for name, _ in lacking.which.model.named_parameters())
    lacking.manager.sd_adapter.lacks = name
    before = flat({"m": lacking.which.model.state_dict()})
    with pytest.raises(ckpt.errors.NamesError, match=f"nothing for 1 tensor: {name}"):
        lacking.manager.load()
    same(flat({"m": lacking.which.model.state_dict()}), before)
    with pytest.raises(ckpt.errors.UsageError, match="no model to load"):
        job("fourth", 4, Adapter(None), initial_load_in_hf=True).manager.load()
    state = first.which.model.state_dict()
    rounded = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    expected = flat({"m": {name: value.to(state[name].dtype) for name, value in rounded.items()}})
    same(flat({"m": second.which.model.state_dict()}), expected)
    opened = ckpt.open(written)
    names = {t.name: (t.shape, str(t.dtype)) for t in opened.tensors()}
    assert names == {f"model.{name}": (tuple(value.shape), str(value.dtype)) for name, value in rounded.items()}
    errors, first.manager.sd_adapter = [], SimpleNamespace(to_hf=dict)  # without collectives of its own
    for alone in (0, 1):  # the leader, or another: what one rank lacks ends the call on all
        mine = dist.get_rank() == alone
        lacking.manager.sd_adapter.lacks = name if mine else ""
        errors.append(error_of(lacking.manager.load))
        hook = first.which.model.register_state_dict_post_hook(fail if mine else lambda *_: None)
        for in_hf in (True, False):
            first.manager._save_in_hf = in_hf
            errors.append(error_of(lambda: first.manager.save(4, last_step=True)))
        hook.remove()
        first.manager._save_in_hf = True
        assert first.manager.save(4, last_step=True)
    same(flat({"m": lacking.which.model.state_dict()}), before)
    for manager in (first.manager, second.manager, lacking.manager):
        manager.close()
    return [sorted(names), errors]


def test_the_last_step_and_the_first_are_hugging_face_models(ranks: Ranks, tmp_path: Path) -> None:
    (one, errors_of_0), (two, errors_of_1) = ranks.run(2, in_hugging_face_files, str(tmp_path))
    assert one == two and one
    own = ["NamesError: sd_adapter gives nothing", "KeyError: 'no such weight'", "KeyError: 'no such weight'"]
    for alone, (mine, others) in enumerate([(errors_of_0[:3], errors_of_1[:3]), (errors_of_1[3:], errors_of_0[3:])]):
        assert [err[: len(text)] for err, text in zip(mine, own, strict=True)] == own
        assert all(err.startswith("RankFailedError: ") and f"rank {alone}" in err for err in others), others
    for base, adapter, why in (("", None, "need names of the model"), ("memory://runs/a", Adapter(None), "cannot be replaced")):
        parts: dict[str, Any] = {"dataloader": None, "optimizers": None, "lr_schedulers": None, "states": {}}
        config = titan.Config(last_save_in_hf=True)
        with pytest.raises(ckpt.errors.UsageError, match=why):  # at the start, not at the last step
            titan.CheckpointManager(config, model_parts=[], sd_adapter=adapter, base_folder=base, **parts)


class Experts(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts, self.gate = torch.nn.Parameter(torch.randn(4, 3, 2)), torch.nn.Parameter(torch.randn(4, 2))


class ExpertAdapter:
    """As torchtitan's: the experts that a rank has are tensors of its own, and other ranks have others."""

    hf_assets_path = None
    lacks = "nothing"

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        state = {name: value for name, value in state.items() if name != self.lacks}
        self.experts = state.pop("experts", None)
        local = self.experts.to_local() if self.experts is not None else []
        return state | {f"experts.{dist.get_rank() * len(local) + i}": weight for i, weight in enumerate(local)}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        if mine := [state.pop(name) for name in sorted(state) if name.startswith("experts.")]:
            state["experts"] = DTensor.from_local(torch.stack(mine), self.experts.device_mesh, self.experts.placements)
        return state


def different_tensors_on_each_rank(folder: str) -> list[str]:
    def manager(part: torch.nn.Module, name: str, **options: Any) -> titan.CheckpointManager:
        return titan.CheckpointManager(
            titan.Config(folder=name, **options),
            dataloader=None,
            model_parts=[part],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=ExpertAdapter(),
            base_folder=folder,
        )

    def sharded(seed: int) -> torch.nn.Module:
        fully_shard(model := Experts(seed), mesh=mesh_of(dp=2))
        return model

    def stage(seed: int) -> torch.nn.Module:
        return torch.nn.Sequential(OrderedDict([(f"stage{dist.get_rank()}", Experts(seed + dist.get_rank()).requires_grad_(False))]))

    for name, make in (("experts", sharded), ("stages", stage)):
        first = manager(make(1), name, last_save_in_hf=True)
        assert first.save(3, last_step=True)
        second = manager(part := make(5), f"{name}-again", initial_load_in_hf=True, initial_load_path=f"{folder}/{name}/hf")
        assert second.load()
        same(flat({"m": part.state_dict()}), flat({"m": first.model_parts[0].state_dict()}))
        first.close()
        second.close()
    ExpertAdapter.lacks = "gate"
    error = error_of(lambda: manager(sharded(1), "lacks", last_save_in_hf=True))
    ExpertAdapter.lacks = "nothing"
    return [error, *(p.name for p in Path(folder, "lacks").glob("*"))]


def test_experts_and_stages_are_written_from_the_ranks_that_have_them(ranks: Ranks, tmp_path: Path) -> None:
    for error, *files in ranks.run(2, different_tensors_on_each_rank, str(tmp_path)):
        assert error.startswith("NamesError: sd_adapter gives nothing for 1 tensor: gate") and files == []
    one, two = Experts(1).state_dict(), Experts(2).state_dict()
    expected = {"gate": one["gate"], **{f"experts.{i}": weight for i, weight in enumerate(one["experts"])}}
    same(load_file(tmp_path / "experts/hf/model.safetensors"), expected)
    stages = {f"stage{n}.{name}": value for n, state in enumerate((one, two)) for name, value in state.items()}
    same(load_file(tmp_path / "stages/hf/model.safetensors"), stages)


def test_a_configuration_that_knows_nothing_of_hugging_face(tmp_path: Path) -> None:
    config = SimpleNamespace(**{name: value for name, value in asdict(titan.Config(interval=1)).items() if "in_hf" not in name})
    for step in (1, 2):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        manager = titan.CheckpointManager(
            config,  # type: ignore[arg-type]
            dataloader=None,
            model_parts=[model],
            optimizers=optimizer,
            lr_schedulers=None,
            states={},
            base_folder=str(tmp_path),
        )
        assert manager.load() == (step > 1)
        assert manager.save(step, last_step=step == 2)
        manager.close()
    assert [s.number for s in ckpt.list_steps(tmp_path / "checkpoint")] == [1, 2]


# ----------------------------------------------------------------------------------------------------------- torchtitan


def built_by_torchtitan(folder: str, seed: int, last: int) -> tuple[Full, int]:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from ckpt.integrations.torchtitan import CheckpointManager

    model = fsdp(whole_model(seed), mesh_of(dp=dist.get_world_size()))
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer(OptimizersContainer.Config(param_groups=[group], implementation="for-loop"), model_parts=[model])
    counter = Counter()
    config = CheckpointManager.Config(enable=True, folder="checkpoint", interval=2, last_save_model_only=False)
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=torch.optim.lr_scheduler.StepLR(optimizers.optimizers[0], 1),
        states={"train_state": counter},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load(step=-1)
    began = counter.step
    step = trained(model)
    for n in range(began + 1, last + 1):
        step.model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        optimizers.zero_grad()
        counter.step = n
        manager.save(n, last_step=n == last)
    manager.maybe_wait_for_saving()
    manager.close()
    return flat({"model": model.state_dict(), "optimizer": optimizers.state_dict()}), began


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitan_builds_it_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    straight, _ = ranks.run(2, built_by_torchtitan, str(tmp_path / "a"), 1, 4)[0]
    ranks.run(2, built_by_torchtitan, str(tmp_path / "b"), 1, 2)
    found, began = ranks.run(2, built_by_torchtitan, str(tmp_path / "b"), 2, 4)[0]
    assert began == 2
    same(found, straight)
