"""FSDP version 1: flat parameters are stored as the parameters that they are made of, without a gather, and load into any layout."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt import live
from ckpt.engine.save.capture import Capture
from ckpt.engine.verify import verify
from tests.distributed.gathered import Full, differences, full_state, spoil
from tests.distributed.models import LEARNING_RATE, Model, Trained, fsdp, loss_of, mesh_of, trained, whole_model
from tests.distributed.ranks import Ranks

warnings.filterwarnings("ignore", category=FutureWarning)


def flat(model: Model, *, orig: bool, strategy: str = "FULL_SHARD", mesh: Any = None) -> nn.Module:
    """The blocks, and what is around them, each in a flat parameter."""
    options = {
        "use_orig_params": orig,
        "sharding_strategy": ShardingStrategy[strategy],
        "device_id": torch.device("cpu"),
        "device_mesh": mesh,
    }
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def one_group(model: nn.Module) -> Trained:
    """A flat parameter can only be in one group."""
    which = trained(model)
    which.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.8, 0.95))

    def step() -> None:
        loss_of(model).backward()
        which.optimizer.step()
        which.optimizer.zero_grad()

    which.train = step
    return which


def hybrid(model: Model, *, orig: bool) -> nn.Module:
    return flat(model, orig=orig, strategy="HYBRID_SHARD", mesh=mesh_of(copies=2, dp=2))


LAYOUTS: dict[str, tuple[int, Callable[[Model], nn.Module]]] = {
    "flat2": (2, lambda m: flat(m, orig=False)),
    "flat3": (3, lambda m: flat(m, orig=False)),
    "orig2": (2, lambda m: flat(m, orig=True)),
    "orig3": (3, lambda m: flat(m, orig=True)),
    "grad-op2": (2, lambda m: flat(m, orig=True, strategy="SHARD_GRAD_OP")),
    "no-shard2": (2, lambda m: flat(m, orig=True, strategy="NO_SHARD")),
    "no-shard-flat2": (2, lambda m: flat(m, orig=False, strategy="NO_SHARD")),
    "hybrid4": (4, lambda m: hybrid(m, orig=True)),
    "hybrid-flat4": (4, lambda m: hybrid(m, orig=False)),
    "fsdp2": (2, lambda m: fsdp(m, mesh_of(dp=2))),
    "ddp2": (2, DistributedDataParallel),
    "plain": (1, lambda m: m),
}


def build(layout: str, seed: int, *, tied: bool = False) -> Trained:
    return one_group(LAYOUTS[layout][1](whole_model(seed, tied=tied)))


def gathered(which: Trained) -> Full:
    """All of it as torch gathers it, by ckpt's names."""
    if not isinstance(which.model, FullyShardedDataParallel):
        return full_state(which)
    model, optimizer = get_state_dict(which.model, which.optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model.{name}": value.clone() for name, value in model.items()}
    for name, values in optimizer["state"].items():
        found |= {f"optimizer.state.model.{name}.{key}": value.clone() for key, value in values.items()}
    return found


def ruin(which: Trained) -> None:
    if isinstance(which.model, FullyShardedDataParallel):
        with torch.no_grad():
            for tensor in (
                *which.model.parameters(),
                *which.model.buffers(),
                *(t for s in which.optimizer.state.values() for t in s.values()),
            ):
                tensor.fill_(77)
    else:
        spoil(which)


def save(layout: str, url: str, how: str = "save", later: int = 2) -> tuple[Full, Full]:
    """What was saved, and what comes of more steps."""
    which = build(layout, 1).steps(2)
    if how == "save":
        ckpt.save(url, which.state())
        before = gathered(which)
    else:
        before = gathered(which)
        handle = ckpt.save_async(url, which.state())
        which.steps(2)
        handle.result()
        return before, gathered(which)
    return before, gathered(which.steps(later)) if later else {}


def load(layout: str, url: str, trained_before: int, later: int = 2) -> tuple[Full, Full, list[str]]:
    which = build(layout, 2).steps(trained_before)
    if trained_before:
        loss_of(which.model)  # leaves the root gathered
        ruin(which)
    report = ckpt.load(url, which.state())
    return gathered(which), gathered(which.steps(later)) if later else {}, [*report.missing, *report.unexpected]


def goes_on(layouts: list[str], root: str) -> list[str]:
    """Saves, trains on; loads into a model of another seed, new and trained, and trains on: what differs."""
    problems = []
    for layout in layouts:
        wanted, later = save(layout, f"{root}/{layout}")
        for trained_before in (0, 2):
            found, after, names = load(layout, f"{root}/{layout}", trained_before)
            problems += [f"{layout}: {text}" for text in (*names, *differences(found, wanted), *differences(after, later))]
    return problems


@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path, world: int) -> None:
    layouts = [name for name, (size, _) in LAYOUTS.items() if size == world and name not in ("fsdp2", "ddp2")]
    for problems in ranks.run(world, goes_on, layouts, str(tmp_path)):
        assert problems == []
    assert all(verify(str(tmp_path / layout)).ok for layout in layouts)


PAIRS = [
    ("flat2", "flat3"),
    ("flat3", "plain"),
    ("orig2", "fsdp2"),
    ("plain", "flat2"),
    ("fsdp2", "orig3"),
    ("ddp2", "hybrid-flat4"),
    ("hybrid4", "orig2"),
]


def test_into_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    saved: dict[str, Full] = {}
    for world in (1, 2, 3, 4):
        layouts = sorted({before for before, _ in PAIRS if LAYOUTS[before][0] == world})
        wanted = ranks.run_in_turn(world, [(save, layout, str(tmp_path / layout), "save", 0) for layout in layouts])
        saved |= {layout: full for layout, ((full, _), *_) in zip(layouts, wanted, strict=True)}
    for world in (1, 2, 3, 4):
        pairs = [pair for pair in PAIRS if LAYOUTS[pair[1]][0] == world]
        loads = ranks.run_in_turn(world, [(load, after, str(tmp_path / before), 0, 0) for before, after in pairs])
        for (before, after), each_rank in zip(pairs, loads, strict=True):
            for found, _, problems in each_rank:
                assert (before, after, problems, differences(found, saved[before])) == (before, after, [], [])


def hybrid_of_one_layer(url: str, dp: int) -> tuple[list[str], list[str]]:
    """Two replicas of three ranges; the second range of the weight ends left of where it begins."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh_of(copies=2, dp=dp)}
        layer = nn.Sequential(nn.Linear(12, 24))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of one rank: FSDP goes over to NO_SHARD
            model = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"), **options)
        made.append(Trained(model=model, optimizer=torch.optim.SGD(model.parameters()), train=lambda: None))
    ckpt.save(url, {"model": made[0].model})
    ckpt.load(url, {"model": made[1].model})
    wanted, after = map(gathered, made)
    moved = torch.zeros(24, 12)
    live.reshard({"model": made[0].model}, {"model.0.weight": moved}, strict=False)
    return differences(after, wanted), differences({"w": moved}, {"w": wanted["model.0.weight"]})


@pytest.mark.parametrize("dp", [3, 1])
def test_replicas_of_flat_ranges_are_compared(ranks: Ranks, tmp_path: Path, dp: int) -> None:
    assert ranks.run(2 * dp, hybrid_of_one_layer, str(tmp_path / "s"), dp) == [([], [])] * 2 * dp


def more(root: str) -> dict[str, Any]:
    """What one run of two ranks tells about the rest."""
    told: dict[str, Any] = {}
    before, _ = save("orig2", f"{root}/async", "async")
    told["async"] = differences(load("orig2", f"{root}/async", 0)[0], before)
    told["by hand"] = [changed_by_hand(f"{root}/by-hand-{layout}", layout) for layout in ("flat2", "orig2", "grad-op2", "no-shard2")]
    which = build("flat2", 1, tied=True).steps(2)
    ckpt.save(f"{root}/tied", which.state())
    again = build("flat2", 2, tied=True)
    ckpt.load(f"{root}/tied", again.state())
    told["tied"] = differences(gathered(again), gathered(which))
    which.steps(1)
    with FullyShardedDataParallel.summon_full_params(which.model), pytest.raises(ckpt.CkptError) as caught:
        ckpt.save(f"{root}/inside", which.state())
    told["inside"] = str(caught.value)
    return told


def changed_by_hand(url: str, layout: str) -> str:
    """Parameters of FSDP have their memory by ``.data``: what is done to one counts in no other tensor of that memory."""
    which = build(layout, 1).steps(1)
    held = threading.Event()
    capture = Capture.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capture, "run", lambda self, *args: (held.wait(30), capture(self, *args)))
        patch.setattr("ckpt.engine.save.capture.WHOLE", 0)  # small parameters would be captured in the call
        handle = ckpt.save_async(url, {"model": which.model})
        loss_of(which.model).backward()  # which is no change
        with torch.no_grad():
            next(p for p in which.model.parameters() if p.numel()).add_(1)
        held.set()
        with pytest.raises(ckpt.CkptError) as caught:
            handle.result()
    return str(caught.value)


def test_in_the_background_tied_and_refused(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, more, str(tmp_path)):
        assert told["async"] == [] and told["tied"] == []
        assert len(told["by hand"]) == 4 and all("changed before it was captured" in text for text in told["by hand"])
        assert "summon_full_params" in told["inside"] and "FSDP module" in told["inside"]


def sharded_tensors(root: str) -> tuple[Full, list[str], str]:
    """A state dict of ShardedTensors, saved, and loaded in place into that of a model of another seed."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.fsdp import StateDictType

    which, again = build("flat2", 1).steps(1), build("flat2", 2)
    states = []
    for model in (which.model, again.model):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            states.append(model.state_dict())
    assert any(isinstance(t, ShardedTensor) for t in states[0].values())
    ckpt.save(f"{root}/s", {"model": states[0]})
    ckpt.load(f"{root}/s", {"model": states[1]})
    with FullyShardedDataParallel.state_dict_type(again.model, StateDictType.SHARDED_STATE_DICT):
        again.model.load_state_dict(states[1])
    wanted = {n: t for n, t in gathered(which).items() if n.startswith("model.")}
    return wanted, differences({n: t for n, t in gathered(again).items() if n.startswith("model.")}, wanted), ""


def test_sharded_tensors_are_boxes_of_memory(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, problems, _ in ranks.run(2, sharded_tensors, str(tmp_path)):
        assert problems == []
        view = ckpt.open(str(tmp_path / "s"))
        assert differences({name: view[name].read() for name in view}, wanted) == []


def in_boxes(path: str) -> list[list[float]]:
    """ShardedTensors of any boxes: saved with one cut, loaded with another."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    rank = dist.get_rank()

    def made(boxes: list[tuple[int, list[int], list[int]]], whole: torch.Tensor) -> Any:
        mine = [(o, n) for at, o, n in boxes if at == rank]
        shards = [Shard.from_tensor_and_offsets(whole[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].clone(), o, rank) for o, n in mine]
        return init_from_local_shards(shards, list(whole.shape))

    whole = torch.arange(24.0).reshape(4, 6)
    quarters = [(0, [0, 0], [2, 3]), (1, [0, 3], [2, 3]), (1, [2, 0], [2, 2]), (0, [2, 2], [2, 4])]
    columns = [(1, [0, 0], [4, 5]), (0, [0, 5], [4, 1])]
    ckpt.save(path, {"w": made(quarters, whole)})
    into = [made(columns, torch.zeros(4, 6)), made(quarters, torch.zeros(4, 6))]
    for tensor in into:
        ckpt.load(path, {"w": tensor})
    wanted = [made(columns, whole), made(quarters, whole)]
    return [difference(a, b) for a, b in zip(into, wanted, strict=True)]


def difference(one: Any, other: Any) -> list[float]:
    pairs = zip(one.local_shards(), other.local_shards(), strict=True)
    return torch.cat([(a.tensor - b.tensor).flatten() for a, b in pairs]).tolist()


def test_sharded_tensors_of_any_boxes(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, in_boxes, str(tmp_path / "a")):
        assert [set(values) for values in found] == [{0.0}, {0.0}]
    assert verify(str(tmp_path / "a")).ok
    assert torch.equal(ckpt.open(str(tmp_path / "a"))["w"].read(), torch.arange(24.0).reshape(4, 6))
