"""Reshard between layouts of plain tensors, among any ranks: some leave, some join, the old ones are as they were.

The ranks' parts are cut from numbered arrays by the oracle of the plan's tests, which shares no arithmetic with the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Flat, GlobalShape, Interleaved, Layout, Mesh, OnMesh, PerRank, Replicate, Shard, Stage, Uneven, experts, live, pipeline
from ckpt.errors import CkptError, ConsistencyError, CoverageError, MismatchError, NamesError, ShapeError, UsageError
from ckpt.live.filling import Filling
from ckpt.live.reshard_offers import tensor_rows
from ckpt.training import Generators
from tests.distributed.ranks import Ranks
from tests.plan.layout_strategies import numbered

WORLD = 4
ROWS, COLUMNS, HEADS, KV = 24, 16, 8, 2


def tensor(values: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def chunk(array: np.ndarray, parts: int, index: int, dim: int) -> np.ndarray:
    return torch.from_numpy(array).chunk(parts, dim)[index].numpy()


WHOLE = {
    "up": numbered((ROWS, COLUMNS)).astype(np.float32),
    "down": numbered((COLUMNS, ROWS)).astype(np.float32) + 1000,
    "qkv": numbered(((HEADS + 2 * KV) * 4, COLUMNS)).astype(np.float32) + 2000,
    "gate_up": numbered((2 * ROWS, COLUMNS)).astype(np.float32) + 4000,
    "kv": numbered((KV * 4, COLUMNS)).astype(np.float32) + 6000,
    "embed": numbered((21, COLUMNS)).astype(np.float32) + 7000,
    "norm": numbered((COLUMNS,)).astype(np.float32) + 8000,
    "scale": np.float32(3.25),
}


# ---- sources and targets: ranks, what one of them has, and the layout


def whole(rank: int, ranks: Sequence[int]) -> tuple[dict[str, torch.Tensor], Layout | None]:
    """All of it on each rank."""
    return {n: tensor(a) for n, a in WHOLE.items()}, None


def flat(rank: int, ranks: Sequence[int]) -> tuple[dict[str, torch.Tensor], Layout]:
    """Ranges of the flattened tensors, as ZeRO has them."""
    at, count = list(ranks).index(rank), len(ranks)
    state = {n: tensor(chunk(a.reshape(-1), count, at, 0)) for n, a in WHOLE.items() if a.ndim and n != "norm"}
    state |= {"norm": tensor(WHOLE["norm"]), "scale": tensor(WHOLE["scale"])}
    rules = [(n, Flat("dp"), GlobalShape(WHOLE[n].shape)) for n in WHOLE if WHOLE[n].ndim and n != "norm"]
    return state, Layout(Mesh(("dp",), (count,), tuple(ranks)), [*rules, ("*", Replicate())])


def tensor_parallel(rank: int, ranks: Sequence[int]) -> tuple[dict[str, torch.Tensor], Layout]:
    """Columns, rows, fused projections; 21 rows of the vocabulary that do not divide, and fewer heads of keys than ranks."""
    tp = len(ranks)
    at = list(ranks).index(rank)
    q, k, v = np.split(WHOLE["qkv"], [HEADS * 4, (HEADS + KV) * 4])
    gate, up = np.split(WHOLE["gate_up"], 2)
    kv_parts = min(KV, tp)
    state = {
        "up": tensor(chunk(WHOLE["up"], tp, at, 0)),
        "down": tensor(chunk(WHOLE["down"], tp, at, 1)),
        "qkv": tensor(np.concatenate([chunk(x, tp, at, 0) for x in (q, k, v)])),
        "gate_up": tensor(np.concatenate([chunk(x, tp, at, 0) for x in (gate, up)])),
        "kv": tensor(chunk(WHOLE["kv"], kv_parts, at * kv_parts // tp, 0)),
        "embed": tensor(chunk(WHOLE["embed"], tp, at, 0)),
        "norm": tensor(WHOLE["norm"]),
        "scale": tensor(WHOLE["scale"]),
    }
    rules = [
        ("up", Shard(0, "tp")),
        ("down", Shard(1, "tp")),
        ("qkv", Interleaved(0, "tp", (HEADS * 4, KV * 4, KV * 4))),
        ("gate_up", Interleaved(0, "tp", 2)),
        ("kv", Shard(0, "head"), OnMesh("heads")),
        ("embed", Shard(0, "tp"), Uneven(0, 21)),
        ("*", Replicate()),
    ]
    meshes = {"heads": Mesh(("head", "copy"), (kv_parts, tp // kv_parts), tuple(ranks))}
    return state, Layout(Mesh(("tp",), (tp,), tuple(ranks)), rules, meshes=meshes)


SIDES = {"whole": whole, "flat": flat, "tp": tensor_parallel}

MOVES: list[tuple[str, tuple[int, ...], str, tuple[int, ...]]] = [
    ("flat", (0, 1, 2), "tp", (0, 1)),
    ("flat", (0, 1), "tp", (2, 3)),
    ("tp", (0, 1), "flat", (0, 1, 2, 3)),
    ("tp", (2, 3), "tp", (0, 1, 2, 3)),
    ("tp", (0, 1, 2, 3), "tp", (3,)),
    ("whole", (1, 2), "tp", (0, 1, 2, 3)),
    ("tp", (1, 3), "whole", (0, 2)),
    ("flat", (3, 1, 0), "flat", (0, 2)),
    ("whole", (0,), "whole", (0, 1, 2, 3)),
]


def run_moves() -> list[list[str]]:
    """Problems of each move on this rank."""
    return [one_move(*move) for move in MOVES]


def one_move(source: str, old_ranks: tuple[int, ...], target: str, new_ranks: tuple[int, ...]) -> list[str]:
    rank = dist.get_rank()
    old, layout = SIDES[source](rank, sorted(old_ranks)) if rank in old_ranks else ({}, None)
    wanted, new_layout = SIDES[target](rank, new_ranks) if rank in new_ranks else ({}, None)
    new = {name: torch.full_like(t, float("nan")) for name, t in wanted.items()}
    before = {name: t.clone() for name, t in old.items()}
    report = live.reshard(old or None, new, layout=layout, new_layout=new_layout)
    problems = [f"{n}: {new[n].flatten()[:4]} is not {t.flatten()[:4]}" for n, t in wanted.items() if not torch.equal(new[n], t)]
    problems += [f"old {n} was changed" for n, t in before.items() if not torch.equal(old[n], t)]
    needed = sum(t.nbytes for t in new.values())
    if (report.bytes_needed, report.bytes_copied + report.bytes_received) != (needed, needed):
        problems.append(f"{report}: the state has {needed} bytes")
    if dist.get_rank() == 0 and sum(t.sent for t in report.ranks.values()) != sum(t.received for t in report.ranks.values()):
        problems.append(f"{report.ranks}: not all that was sent was received")
    if rank not in old_ranks and report.bytes_sent:
        problems.append("sent bytes without having any")
    return problems


@pytest.fixture(scope="module")
def moved(ranks: Ranks) -> list[list[list[str]]]:
    return ranks.run(WORLD, run_moves)


@pytest.mark.parametrize("number", range(len(MOVES)), ids=[f"{s}{list(a)}-{t}{list(b)}" for s, a, t, b in MOVES])
def test_bytes_come_bit_for_bit(moved: list[list[list[str]]], number: int) -> None:
    assert [by_rank[number] for by_rank in moved] == [[]] * WORLD


# ---- stages, experts, values of ranks, generators


def other_states() -> dict[str, Any]:
    """Results of this rank, by what was moved."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    # two stages of two layers each → one stage on ranks 2 and 3, tensor parallel
    weights = {f"layers.{n}.w": numbered((6, 4)).astype(np.float32) + 100 * n for n in range(4)}
    old, layout, new, new_layout = {}, None, {}, None
    if rank < 2:
        old = {f"layers.{n}.w": tensor(weights[f"layers.{2 * rank + n}.w"]) for n in range(2)}
        layout = Layout(Mesh(("pp",), (2,), (0, 1)), [("*", Replicate())], numbered=[pipeline("layers.{n}", layers=4, stages=2)])
    else:
        new = {name: torch.zeros(3, 4) for name in weights}
        new_layout = Layout(Mesh(("tp",), (2,), (2, 3)), [("*", Shard(0, "tp"))])
    live.reshard(old, new, layout=layout, new_layout=new_layout)
    found["stages"] = all(torch.equal(new[n], tensor(chunk(w, 2, rank - 2, 0))) for n, w in weights.items()) if rank > 1 else not new

    # six experts on three ranks → on two
    every = [numbered((5, 4)).astype(np.float32) + 1000 * n for n in range(6)]
    old, layout, new, new_layout = {}, None, {}, None
    if rank < 3:
        old = {f"experts.{n}.w": tensor(every[2 * rank + n]) for n in range(2)}
        layout = Layout(Mesh(("ep",), (3,), (0, 1, 2)), [("*", Replicate())], numbered=[experts("experts.{n}", count=6, ranks=3)])
    if rank in (1, 3):
        new = {f"experts.{n}.w": torch.zeros(5, 4) for n in range(3)}
        new_layout = Layout(Mesh(("ep",), (2,), (1, 3)), [("*", Replicate())], numbered=[experts("experts.{n}", count=6, ranks=2)])
    live.reshard(old, new, layout=layout, new_layout=new_layout)
    first = 0 if rank == 1 else 3
    found["experts"] = all(torch.equal(new[f"experts.{n}.w"], tensor(every[first + n])) for n in range(3)) if new else True

    # values of ranks, generators, plain values, names that change, other dtypes, tied names
    shared = torch.arange(6.0)
    old = {
        "rng": Generators(mesh=Mesh(("dp",), (2,), (0, 1)), distinct=("dp",)) if rank < 2 else None,
        "own": PerRank({"position": rank, "seen": torch.tensor([rank, 5])}),
        "tied": {"a": shared, "b": shared},
        "w": torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7,
        "step": 41,
        "nested": {"list": [1, "x", None], "tuple": (2.5, True)},
    }
    new = {
        "rng": Generators(mesh=Mesh(("dp",), (2,), (1, 2)), distinct=("dp",)) if rank in (1, 2) else None,
        "own": PerRank(None, reshard=lambda values, at, count: values[at]),
        "tied": {"a": torch.zeros(6), "b": torch.zeros(6)},
        "v": torch.zeros(3, 4),
        "step": 0,
        "nested": {"list": [], "tuple": ()},
    }
    if rank > 1:
        old = {}
    if rank in (0, 3):
        new = {}
    torch.manual_seed(50 + rank if rank < 2 else 999)
    report = live.reshard(old, new, rename={"w": "v"}, cast=True)
    place = {1: 0, 2: 1}.get(rank)
    if place is not None:
        found["values"] = new["step"] == 41 and new["nested"] == {"list": [1, "x", None], "tuple": (2.5, True)}
        found["own"] = new["own"].value["position"] == place and new["own"].value["seen"].tolist() == [place, 5]
        found["tied"] = torch.equal(new["tied"]["a"], shared) and torch.equal(new["tied"]["b"], shared)
        found["cast"] = torch.equal(new["v"], (torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7).float()) and report.cast == ("v",)
        found["renamed"] = dict(report.renamed) == {"w": "v"}
        expected = torch.Generator().manual_seed(50 + place).get_state()
        found["rng"] = torch.equal(torch.get_rng_state(), expected)
    else:
        found["rng"] = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(50 if rank == 0 else 999).get_state())

    # padded: a vocabulary of 5 rows, padded to 6 in the old state and to 8 in the new one
    rows = numbered((5, 3)).astype(np.float32) + 1
    old, layout, new, new_layout = {}, None, {}, None
    if rank < 2:
        padded = np.concatenate([rows, np.full((1, 3), 77, np.float32)])
        old = {"vocab": tensor(chunk(padded, 2, rank, 0))}
        layout = Layout(Mesh(("tp",), (2,), (0, 1)), [("vocab", Shard(0, "tp"), ckpt.Padded(0, 5))])
    new = {"vocab": torch.full((2, 3), float("nan"))}
    new_layout = Layout(Mesh(("tp",), (4,), (0, 1, 2, 3)), [("vocab", Shard(0, "tp"), ckpt.Padded(0, 5))])
    live.reshard(old, new, layout=layout, new_layout=new_layout)
    wanted = np.concatenate([rows, np.zeros((3, 3), np.float32)])
    found["padded"] = torch.equal(new["vocab"], tensor(chunk(wanted, 4, rank, 0)))

    # a stage that two ranks share (tied embeddings of the first and the last stage)
    old, layout, new = {}, None, {}
    if rank < 2:
        old = {"embed": torch.arange(4.0), f"only{rank}": torch.ones(2) * rank}
        rules = [("embed", Replicate(), Stage("pp", (0, -1))), ("only0", Stage("pp", (0,))), ("only1", Stage("pp", (1,)))]
        layout = Layout(Mesh(("pp",), (2,), (0, 1)), rules)
    if rank == 3:
        new = {"embed": torch.zeros(4), "only0": torch.zeros(2), "only1": torch.zeros(2)}
    live.reshard(old, new, layout=layout)
    found["shared stage"] = rank != 3 or (new["embed"].tolist(), new["only1"].tolist()) == ([0.0, 1.0, 2.0, 3.0], [1.0, 1.0])
    return found


def test_stages_experts_values_and_generators(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(WORLD, other_states)):
        assert {name for name, fine in found.items() if not fine} == set(), f"rank {rank}"


# ---- what is refused, before anything changes


def refusals() -> dict[str, str]:
    """The errors of this rank, by what was tried; and that nothing was changed."""
    rank = dist.get_rank()
    said: dict[str, str] = {}

    def refused(name: str, kind: type[CkptError], old: Any, new: Any, **options: Any) -> None:
        before = {n: t.clone() for n, t in (new or {}).items() if isinstance(t, torch.Tensor)}
        try:
            live.reshard(old, new, **options)
            said[name] = "no error"
        except kind as err:
            said[name] = str(err)
        except CkptError as err:
            said[name] = f"{type(err).__name__} instead: {err}"
        if any(not torch.equal(new[n], t) for n, t in before.items()):
            said[name] += " AND THE STATE WAS CHANGED"

    w = torch.arange(8.0)
    refused("nothing", UsageError, {}, {"w": w.clone()})
    refused("names", NamesError, {"w": w, "x": w.clone()}, {"w": torch.zeros(8), "y": torch.zeros(8)})
    refused("shape", ShapeError, {"w": w}, {"w": torch.zeros(9)})
    refused("dtype", ShapeError, {"w": w}, {"w": torch.zeros(8, dtype=torch.bfloat16)})
    refused("one rank", MismatchError, {"w": w}, {"w": torch.zeros(8 if rank else 7)})
    refused("alias", MismatchError, {"w": w, "v": w.clone()}, {"v": w, "w": torch.zeros(8)})
    refused("view", MismatchError, {"w": w}, {"w": w[:]}, new_layout=Layout({"dp": 2}, [("w", Shard(0, "dp"))]))
    half = Layout({"dp": 2}, [("w", Shard(0, "dp")), ("*", Replicate())])
    refused("hole", CoverageError, {"w": w[:4]} if not rank else {"v": w}, {"w": torch.zeros(8)}, layout=half)
    refused("options", CkptError, {"w": w}, {"w": torch.zeros(8)}, cast=bool(rank))
    same = {"w": w, "moved": torch.ones(3)}
    report = live.reshard(same, {"w": w, "moved": torch.zeros(3)})
    said["in place"] = f"{report.bytes_copied} {w.tolist() == list(range(8))}"
    return said


def test_what_does_not_fit_changes_nothing_and_is_said_on_all_ranks(ranks: Ranks) -> None:
    expected = {
        "nothing": "no rank has an old state",
        "names": "missing in the old state (1):",
        "shape": "shape [8] in the old state, [9] in the new state",
        "dtype": "dtype float32 in the old state, bfloat16 in the new state",
        "one rank": "w: shape [8] in the old state, [7] in the new state (rank 0)",
        "alias": "v: its memory is also that of w in the old state",
        "view": "w: ",
        "hole": "should hold",
        "options": "different options",
        "in place": "44 True",
    }
    for said in ranks.run(2, refusals):
        for name, text in expected.items():
            assert text in said[name], (name, said[name])
            assert "AND THE STATE" not in said[name], name
        assert all(re.search("nothing in the (new )?state was changed", said[name]) for name in expected if name not in ("in place",))


def test_one_process_alone() -> None:
    """Without torch.distributed: another dtype, memory for a model on the meta device, an optimizer that is new, odd tensors."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        other = torch.nn.Linear(4, 3)
    live.reshard({"model": model}, {"model": other})
    assert torch.equal(other.weight, model.weight) and other.weight.device.type == "cpu"
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    report = live.reshard({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    assert torch.equal(fresh.state[other.bias]["exp_avg"], optimizer.state[model.bias]["exp_avg"])
    assert fresh.param_groups[0]["lr"] == 1e-3 and report.bytes_copied == report.bytes_needed and not report.bytes_received
    half = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    report = live.reshard({"model": model}, {"model": half}, cast=True)
    assert torch.equal(half.weight, model.weight.bfloat16()) and len(report.cast) == 2
    odd = {"c": torch.tensor([1 + 2j, -1j]).conj(), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), "t": torch.rand(3, 2).t()}
    into = {name: torch.zeros_like(tensor.resolve_conj()) for name, tensor in odd.items()}
    live.reshard(odd, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in odd.items())


@pytest.mark.parametrize(
    "write",
    [
        lambda old: old.add_(1),
        lambda old: old.data.add_(1),
        lambda old: np.add(old.numpy(), 1, out=old.numpy()),
        lambda old: setattr(old, "data", torch.ones(2)),
    ],
)
def test_an_old_state_that_is_written_to_meanwhile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], Any]
) -> None:
    from ckpt.live.filling import Filling

    kept = torch.ones(3)
    old = {"w": torch.zeros(8), "odd": torch.zeros(2, dtype=torch.complex64).conj(), "kept": kept}
    copy_own = Filling.copy_own

    def copy_and_write(*args: Any) -> None:
        copy_own(*args)
        write(old["w"])

    monkeypatch.setattr(Filling, "copy_own", copy_and_write)
    with pytest.raises(ConsistencyError, match="tensor w of the old state was changed while it was resharded"):
        live.reshard(old, {"w": torch.ones(8), "odd": torch.ones(2, dtype=torch.complex64), "kept": kept})
    monkeypatch.undo()
    old["w"] = torch.ones(8)
    into = {"w": torch.zeros(8), "odd": torch.ones(2, dtype=torch.complex64), "kept": kept}
    live.reshard(old, into)  # memory of both states is no change
    assert bool((into["w"] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_old_state_that_is_freed_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Its bytes are nowhere, and to read them would end the process."""
    old = torch.arange(12.0)
    copy_own = Filling.copy_own

    def freed(self: Filling, *args: Any) -> None:
        old.untyped_storage().resize_(0)
        copy_own(self, *args)

    monkeypatch.setattr(Filling, "copy_own", freed)
    with pytest.raises(ConsistencyError, match="was freed before it was read") as caught:
        live.reshard({"w": old}, {"w": torch.zeros(12, dtype=dtype)}, cast=True)
    assert "tensor w" in str(caught.value.where)
    with pytest.raises(ConsistencyError, match="was freed before it was read"):  # as a server reads it
        tensor_rows(old, (slice(0, 2),))
