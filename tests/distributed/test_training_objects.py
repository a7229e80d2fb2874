"""What real training scripts bring: resumed runs, tied weights, meta-device models, wrappers, frozen parameters, other optimizers,
schedulers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import MismatchError
from tests.distributed.gathered import Full, differences, full_state, spoil
from tests.distributed.models import TORCH_LAYOUTS, Model, Trained, fsdp, loss_of, mesh_of, trained, whole_model
from tests.distributed.plain import build, world_size
from tests.distributed.ranks import Ranks

Made = Callable[[int], Trained]
"""Builds a model from a seed, in a rank."""


def sharded(model: Model) -> Model:
    return fsdp(model, mesh_of(dp=dist.get_world_size()))


def save(make: Made, url: str) -> Full:
    which = make(1).steps(2)
    ckpt.save(url, which.state())
    return full_state(which)


def load(make: Made, url: str, wanted: Full) -> list[str]:
    """Problems of a load into a model of another seed with a new optimizer."""
    which = make(2)
    spoil(which)
    report = ckpt.load(url, which.state())
    return [*differences(full_state(which), wanted), *report.missing, *report.unexpected]


# ---------------------------------------------------------------------------------------------------------- going on


def save_and_go_on(layout: str, url: str) -> tuple[Full, float]:
    which = build(layout, 1).steps(2)
    ckpt.save(url, which.state())
    loss = loss_of(which.model).item()
    which.model.zero_grad()
    return full_state(which.steps(1)), loss


def load_and_go_on(layout: str, url: str) -> tuple[Full, float]:
    which = build(layout, 2).steps(1)
    spoil(which)
    ckpt.load(url, which.state())
    loss = loss_of(which.model).item()
    which.model.zero_grad()
    return full_state(which.steps(1)), loss


@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path, world: int) -> None:
    runs = [(layout, str(tmp_path / layout)) for layout in TORCH_LAYOUTS if world_size(layout) == world]
    saved = ranks.run_in_turn(world, [(save_and_go_on, *run) for run in runs])
    resumed = ranks.run_in_turn(world, [(load_and_go_on, *run) for run in runs])
    for (layout, _), ((wanted, loss), *_), each_rank in zip(runs, saved, resumed, strict=True):
        for found, again in each_rank:
            assert (layout, differences(found, wanted), again) == (layout, [], loss)


# ---------------------------------------------------------------------------------------------------------- meta device


def on_meta() -> Trained:
    with torch.device("meta"):
        model = Model()
    return trained(sharded(model))


def load_on_meta(url: str, wanted: Full) -> tuple[list[str], float, Full]:
    which = on_meta()
    ckpt.load(url, which.state())
    problems = [f"{n} is on {t.device}" for n, t in which.model.state_dict().items() if t.device.type != "cpu"]
    problems += differences(full_state(which), wanted)
    loss = loss_of(which.model).item()
    which.model.zero_grad()
    return problems, loss, full_state(which.steps(1))


def load_weights_on_meta(url: str) -> tuple[Full, float]:
    which = on_meta()
    ckpt.load(url, {"model": which.model}, only="model.*")
    return full_state(which), loss_of(which.model).item()


def save_and_tell(url: str) -> tuple[Full, float, Full]:
    which = trained(sharded(whole_model(1))).steps(2)
    ckpt.save(url, which.state())
    full = full_state(which)
    loss = loss_of(which.model).item()
    which.model.zero_grad()
    return full, loss, full_state(which.steps(1))


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_on_the_meta_device_gets_its_memory_from_the_load(ranks: Ranks, tmp_path: Path, world: int) -> None:
    full, loss, later = ranks.run(world, save_and_tell, str(tmp_path / "a"))[0]
    for problems, found, after in ranks.run(world, load_on_meta, str(tmp_path / "a"), full):
        assert problems == []
        assert found == loss
        assert differences(after, later) == []
    weights = {n: t for n, t in full.items() if n.startswith("model.")}
    for state, found in ranks.run(3, load_weights_on_meta, str(tmp_path / "a")):
        assert differences(state, weights) == []
        assert found == pytest.approx(loss, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- tied weights


def tied(seed: int) -> Trained:
    return trained(sharded(whole_model(seed, tied=True)))


def untied(seed: int) -> Trained:
    return trained(sharded(whole_model(seed)))


def load_weights(make: Made, url: str) -> Full | ckpt.CkptError:
    which = make(2)
    try:
        ckpt.load(url, {"model": which.model}, only="model.*")
    except ckpt.CkptError as err:
        return err
    return {n: t for n, t in full_state(which).items() if n.startswith("model.")}


def save_tied(url: str) -> tuple[Full, bool]:
    which = tied(1).steps(2)
    ckpt.save(url, which.state())
    return full_state(which), which.model.head.weight is which.model.embed.weight


def load_tied(url: str, wanted: Full) -> tuple[list[str], bool]:
    which = tied(2)
    ckpt.load(url, which.state())
    return differences(full_state(which), wanted), which.model.head.weight is which.model.embed.weight


def test_tied_weights(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    full, is_tied = ranks.run(3, save_tied, url)[0]
    assert is_tied and torch.equal(full["model.head.weight"], full["model.embed.weight"])
    assert ranks.run(2, load_tied, url, full) == [([], True)] * 2
    view = ckpt.open(url)
    assert differences({n: view[n].read() for n in view}, full) == []
    stored = sum(t.nbytes for n, t in full.items() if n != "model.head.weight")
    assert sum(p.stat().st_size for p in Path(url, "data").iterdir()) < stored + 3 * 16384, "a tied tensor is stored once"


def test_tied_weights_into_an_untied_model(ranks: Ranks, tmp_path: Path) -> None:
    full, _ = ranks.run(2, save_tied, str(tmp_path / "a"))[0]
    weights = {n: t for n, t in full.items() if n.startswith("model.")}
    for found in ranks.run(3, load_weights, untied, str(tmp_path / "a")):
        assert differences(found, weights) == []


def test_different_weights_into_a_tied_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save, untied, str(tmp_path / "a"))
    for found in ranks.run(2, load_weights, tied, str(tmp_path / "a")):
        assert isinstance(found, MismatchError)
        assert "model.head.weight" in str(found) and "model.embed.weight" in str(found)


# ---------------------------------------------------------------------------------------------------------- wrappers


def bare(seed: int) -> Trained:
    return trained(whole_model(seed))


def ddp(seed: int) -> Trained:
    return trained(DistributedDataParallel(whole_model(seed)))


def checkpointed(seed: int) -> Trained:
    model = whole_model(seed)
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return trained(sharded(model))


def compiled_in_place(seed: int) -> Trained:
    """Blocks are compiled one by one, which leaves names alone, and the model as a whole, which does not."""
    model = whole_model(seed)
    for block in model.blocks:
        block.compile(backend="eager")
    return trained(sharded(model))


def wrapped_compiled(seed: int) -> Trained:
    """Trained as it is and then wrapped: a compiled model of compiled and checkpointed blocks within DDP."""
    which = trained(whole_model(seed)).steps(1)
    model = which.model
    model.blocks = nn.ModuleList(checkpoint_wrapper(torch.compile(block, backend="eager")) for block in model.blocks)
    which.model = DistributedDataParallel(torch.compile(model, backend="eager"))
    which.train = lambda: None
    return which


def plain_names(full: Full) -> Full:
    for segment in ("_orig_mod.", "_checkpoint_wrapped_module."):
        full = {n.replace(segment, ""): t for n, t in full.items()}
    return full


def save_wrapped(make: Made, url: str) -> Full:
    return plain_names(save(make, url))


def load_wrapped(make: Made, url: str, wanted: Full) -> list[str]:
    which = make(2)
    spoil(which)
    report = ckpt.load(url, which.state())
    return [*differences(plain_names(full_state(which)), wanted), *report.missing, *report.unexpected]


def test_wrappers_do_not_change_names(ranks: Ranks, tmp_path: Path) -> None:
    wrapped: list[tuple[Made, str]] = [(w, str(tmp_path / w.__name__)) for w in (ddp, checkpointed, compiled_in_place, wrapped_compiled)]
    states = [full for full, *_ in ranks.run_in_turn(2, [(save_wrapped, *each) for each in wrapped])]
    loads = [(bare, url, full) for (_, url), full in zip(wrapped, states, strict=True)]
    names, *bare_loads = ranks.run_in_turn(1, [(save, bare, str(tmp_path / "bare")), *((load, *each) for each in loads)])
    loads = [(*each, full) for each, full in zip(wrapped, states, strict=True)]
    assert ranks.run_in_turn(2, [(load_wrapped, *each) for each in loads]) == [[[], []]] * len(wrapped)
    assert bare_loads == [[[]]] * len(wrapped)
    for (_, url), full in zip(wrapped, states, strict=True):
        view = ckpt.open(url)
        assert (url, differences({n: view[n].read() for n in view}, full)) == (url, [])
        assert set(full) == set(names[0])


# ------------------------------------------------------------------------------------------------- other ways to train


def frozen(seed: int) -> Trained:
    """Half of the parameters are frozen and unknown to the optimizer."""
    model = whole_model(seed)
    for name, param in model.named_parameters():
        param.requires_grad = "mlp" in name or "norm" in name
    model = sharded(model)
    which = trained(model)
    which.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    which.train = lambda: _step(which)
    return which


def _step(which: Trained) -> None:
    loss_of(which.model).backward()
    which.optimizer.step()
    which.optimizer.zero_grad()


def with_optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], seed: int) -> Trained:
    which = trained(sharded(whole_model(seed)))
    which.optimizer = make(list(which.model.parameters()))
    which.train = lambda: _step(which)
    return which


def momentum(seed: int) -> Trained:
    return with_optimizer(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True), seed)


def no_state(seed: int) -> Trained:
    return with_optimizer(lambda params: torch.optim.SGD(params, lr=0.1), seed)


def amsgrad(seed: int) -> Trained:
    """With a learning rate that is a tensor."""
    return with_optimizer(lambda params: torch.optim.Adam(params, amsgrad=True, lr=torch.tensor(0.03), foreach=False), seed)


def adagrad(seed: int) -> Trained:
    """Has its state from the start, not from the first step."""
    return with_optimizer(lambda params: torch.optim.Adagrad(params, lr=0.1), seed)


OTHER_WAYS: dict[Made, set[str]] = {
    frozen: {"step", "exp_avg", "exp_avg_sq"},
    momentum: {"momentum_buffer"},
    no_state: set(),
    amsgrad: {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    adagrad: {"step", "sum"},
}
"""What the optimizer remembers of each parameter."""


def test_other_ways_to_train(ranks: Ranks, tmp_path: Path) -> None:
    urls = {make: str(tmp_path / make.__name__) for make in OTHER_WAYS}
    states = [full for full, *_ in ranks.run_in_turn(2, [(save, make, url) for make, url in urls.items()])]
    for (make, url), full in zip(urls.items(), states, strict=True):
        assert (url, {n.rpartition(".")[2] for n in full if n.startswith("optimizer.")}) == (url, OTHER_WAYS[make])
        view = ckpt.open(url)
        assert (url, differences({n: view[n].read() for n in view}, full)) == (url, [])
    loads = [(load, make, url, full) for (make, url), full in zip(urls.items(), states, strict=True)]
    assert ranks.run_in_turn(4, loads) == [[[]] * 4] * len(loads)


# ---------------------------------------------------------------------------------------------------------- schedulers


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[3])


def rates(which: Trained, scheduler: torch.optim.lr_scheduler.LRScheduler, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        which.train()
        scheduler.step()
        found.append([group["lr"] for group in which.optimizer.param_groups])
    return found


def save_scheduled(url: str) -> list[list[float]]:
    which = untied(1)
    scheduler = schedule(which.optimizer)
    rates(which, scheduler, 5)
    ckpt.save(url, {**which.state(), "scheduler": scheduler})
    return rates(which, scheduler, 4)


def load_scheduled(url: str) -> list[list[float]]:
    which = untied(2)
    scheduler = schedule(which.optimizer)
    ckpt.load(url, {**which.state(), "scheduler": scheduler})
    return rates(which, scheduler, 4)


def test_a_learning_rate_schedule_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks.run(2, save_scheduled, str(tmp_path / "a"))[0]
    assert len({rate for step in wanted for rate in step}) == 8
    assert ranks.run(3, load_scheduled, str(tmp_path / "a")) == [wanted] * 3
