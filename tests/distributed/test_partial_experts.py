"""Partial experts on several ranks: experts that are divided over ranks in any way, numbered or in one tensor, and other ranks later."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.verify.verify import verify
from ckpt.policies import EverySteps, PartialExperts
from tests.distributed.ranks import Ranks
from tests.formats import oracle

EXPERTS, SHAPE = 8, (8, 12, 10)
KINDS = ("weight", "exp_avg")
STACKED = [
    f"{kind}.layers.{layer}.{place}.experts.w" for kind in KINDS for layer in (0, 1) for place in ("rows", "columns", "flat", "same")
]
"""Tensors with all experts of a layer; the ranks divide them as the name says."""
NUMBERED = [f"{kind}.{place}.experts.{n}.w" for kind in KINDS for place in ("every", "own") for n in range(EXPERTS)]
FLAT = {4: (100, 380, 290, 190), 2: (333, 627)}
"""How many elements each rank has of a flat tensor: ranges end within an expert."""
PILED = [f"{kind}.piled.experts.w" for kind in KINDS]
"""Tensors with all experts that are stored so, of ranks that have one for each of theirs."""


def value(name: str, step: int) -> torch.Tensor:
    """All of a stored tensor at a step, whose number is in each element."""
    shape = SHAPE if name in (*STACKED, *PILED) else SHAPE[1:]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + 1e3 * (sum(name.encode()) % 89) + 1e6 * step


def local_state(step: int, size: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank has."""
    state, each = {"gate": value("gate", step)}, EXPERTS // size
    for name in STACKED:
        whole, place = value(name, step), name.split(".")[3]
        flat = whole.reshape(-1).split(FLAT[size])[rank]
        parts = {"rows": whole.chunk(size)[rank], "columns": whole.chunk(size, dim=1)[rank], "flat": flat, "same": whole}
        state[name] = parts[place].clone()
    for kind in KINDS:
        state |= {f"{kind}.every.experts.{n}.w": value(f"{kind}.every.experts.{n}.w", step) for n in range(EXPERTS)}
        for n in range(each):
            state[f"{kind}.own.experts.{n}.w"] = value(f"{kind}.own.experts.{rank * each + n}.w", step)
            state[f"{kind}.piled.experts.{n}.w"] = value(f"{kind}.piled.experts.w", step)[rank * each + n]
    return state


def live(root: str, steps: range, per_save: int) -> None:
    """One life of a job."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rules = [("*.rows.*", ckpt.Shard(0, "ep")), ("*.columns.*", ckpt.Shard(1, "ep"))]
    rules += [("*.flat.*", ckpt.Flat("ep", sizes=FLAT[size]), ckpt.GlobalShape(SHAPE)), ("*", ckpt.Replicate())]
    divided = [ckpt.experts(f"{kind}.own.experts.{{n}}", count=EXPERTS, ranks=size) for kind in KINDS]
    divided += [ckpt.experts(f"{kind}.piled.experts.{{n}}", count=EXPERTS, ranks=size, stack=0) for kind in KINDS]
    layout = ckpt.Layout({"ep": size}, rules, numbered=divided)
    policy = PartialExperts(experts=EXPERTS, per_save=per_save)
    with ckpt.Checkpointer(root, save=EverySteps(1), partial_experts=policy, layout=layout, timeout=60) as checkpointer:
        for step in steps:
            checkpointer.save(step, local_state(step, size, rank)).result()


def steps_of(url: Path, step: int) -> dict[tuple[str, int], set[int]]:
    """The steps of each expert's weights and moments, by place and number. Each has the bytes of the step that the index says."""
    rows, stored = oracle.read_row_steps(url), oracle.read(url)
    assert stored.keys() == {"gate", *STACKED, *NUMBERED, *PILED}
    steps: dict[tuple[str, int], set[int]] = {}
    for name, (_, shape, raw) in stored.items():
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.float64).reshape(shape)
        told = {row: of or step for row, of in enumerate(rows.get(name, [None] * len(tensor)))}
        for row, part in enumerate(tensor):
            assert torch.equal(part, value(name, told[row])[row]), (step, name, row)
        place = name.partition(".")[2]
        if name in NUMBERED:
            place, _, rest = place.partition(".experts.")
            steps.setdefault((place, int(rest.split(".")[0])), set()).update(told.values())
        elif name != "gate":
            for row, of in told.items():
                steps.setdefault((place, row), set()).add(of)
        else:
            assert {*told.values()} == {step}
    return steps


def test_an_expert_is_of_one_step_whatever_ranks_have_it(ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks, then two: each life begins with all experts, and refers to nothing of another layout."""
    choose, first = random.Random(5), 1
    for size in (4, 2):
        saves, per_save = choose.randrange(3, 6), choose.choice((2, 3, 4))
        steps, period = range(first, first + saves), -(-EXPERTS // per_save)
        ranks.run(size, live, str(tmp_path), steps, per_save)
        for step in steps:
            url = tmp_path / f"step-{step:08d}"
            found = steps_of(url, step)
            assert all(len(of) == 1 for of in found.values()), (step, found)
            ages = {expert: step - min(of) for expert, of in found.items()}
            since = (step - first) % (2 * period)  # one that wrote everything
            assert max(ages.values()) == min(since, period - 1), (step, ages)
            if since:
                for place in {place for place, _ in ages}:
                    assert 0 < sum(age == 0 for (at, _), age in ages.items() if at == place) <= per_save, (step, ages)
            assert not verify(str(url)).problems
        first += saves
