"""``dcp.save`` and ``dcp.load`` through ckpt: what is there afterwards is what torch itself gathers, bit for bit, on any ranks."""

from __future__ import annotations

import ast
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt import settings
from ckpt.engine.verify import verify
from ckpt.formats.registry import open_catalog
from ckpt.integrations.dcp import CkptReader, CkptWriter
from tests.distributed.models import fsdp, mesh_of, trained, whole_model
from tests.distributed.ranks import ROOT, Ranks
from tests.scripts import load_script

Full = dict[str, torch.Tensor]


def flat(value: Any, path: str = "") -> Full:
    """All tensors of nested dicts, whole, by the names that DCP gives them."""
    if isinstance(value, torch.Tensor):
        return {path: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()}
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {n: t for key, child in children for n, t in flat(child, f"{path}.{key}" if path else str(key)).items()}


def same(a: Full, b: Full) -> None:
    assert a.keys() == b.keys()
    assert [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])] == []


def made(seed: int, steps: int) -> tuple[Any, dict[str, Any]]:
    which = trained(fsdp(whole_model(seed), mesh_of(dp=dist.get_world_size()))).steps(steps)
    model, optimizer = get_state_dict(which.model, which.optimizer)
    return which, {"model": model, "optim": optimizer, "step": steps, "note": {"list": [1, 2.5, "a"], "pair": (1, None)}}


def save(path: str, codec: Any = None) -> Full:
    _, state = made(1, 2)
    dcp.save(state, storage_writer=CkptWriter(path, codec=codec))
    return flat(state)


def save_async(path: str) -> Full:
    which, state = made(1, 2)
    before = flat(state)
    future = dcp.async_save(state, storage_writer=CkptWriter(path), process_group=dist.new_group())
    which.steps(2)  # what is saved is the state at the time of the call
    future.result()
    return before


def load(path: str) -> tuple[Full, Any]:
    which, state = made(2, 1)
    state["step"], state["note"] = 0, {"list": [], "pair": None}
    dcp.load(state, storage_reader=CkptReader(path))
    set_state_dict(which.model, which.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    model, optimizer = get_state_dict(which.model, which.optimizer)
    return flat({"model": model, "optim": optimizer}), (state["step"], state["note"], state["optim"]["param_groups"])


def load_natively(path: str) -> Full:
    _, state = made(2, 1)
    ckpt.load(path, state)
    return flat(state)


def save_natively(path: str) -> Full:
    _, state = made(1, 2)
    ckpt.save(path, state)
    return flat(state)


def in_one_process(path: str) -> Full:
    view = ckpt.open(path)
    return {name: view[name].read() for name in view}


@pytest.mark.parametrize("write", [save, save_async], ids=["save", "async_save"])
def test_saved_on_two_ranks_loaded_on_three(ranks: Ranks, tmp_path: Path, write: Any) -> None:
    url = str(tmp_path / "c")
    expected = ranks.run(2, write, url)[0]
    assert verify(url).ok
    same(in_one_process(url), expected)
    state = ckpt.open(url).state()
    assert (state["step"], state["note"]) == (2, {"list": [1, 2.5, "a"], "pair": (1, None)})
    for found, values in ranks.run(3, load, url):
        same(found, expected)
        assert values[:2] == (2, {"list": [1, 2.5, "a"], "pair": (1, None)})
        assert [g["weight_decay"] for g in values[2]] == [0.1, 0.0]
    same(ranks.run(1, load_natively, url)[0], expected)


def test_dcp_loads_what_ckpt_saved(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    expected = ranks.run(3, save_natively, url)[0]
    for found, values in ranks.run(2, load, url):
        same(found, expected)
        assert values[0] == 2


def test_saved_twice_to_one_url_with_a_codec(ranks: Ranks, tmp_path: Path) -> None:
    """The second save replaces the first, whose files go."""
    url = str(tmp_path / "c")
    ranks.run(3, save, url)
    expected = ranks.run(2, save, url, "planes-zstd")[0]
    same(in_one_process(url), expected)
    assert len(list((tmp_path / "c" / "data").iterdir())) == 2


# ------------------------------------------------------------------------------------------------------------- one rank


def odd_shapes(path: str) -> tuple[Full, Full]:
    settings.CHUNK = 64
    state = {
        "wide": torch.arange(210.0).reshape(3, 70),
        "turned": torch.arange(60, dtype=torch.int16).reshape(6, 10).t(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "list": [torch.ones(2), {"inside": torch.tensor([True, False])}],
        "complex": torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    }
    dcp.save(state, storage_writer=CkptWriter(path))
    into = {n: torch.zeros_like(t) for n, t in state.items() if n != "list"} | {
        "list": [torch.zeros(2), {"inside": torch.tensor([False, False])}]
    }
    dcp.load(into, storage_reader=CkptReader(path))
    return flat(state), flat(into)


def test_odd_shapes_in_small_chunks(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    expected, found = ranks.run(1, odd_shapes, url)[0]
    same(found, expected)
    same(in_one_process(url), {n: t.resolve_conj().contiguous() for n, t in expected.items()})
    assert len(open_catalog(url).tensors["wide"].grid) > 3


class Forgets(DefaultSavePlanner):
    """A planner that leaves out what the second rank should write, and does not notice."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return [plans[0], replace(plans[1], items=[])], metadata


def refused(path: str) -> list[str]:
    """Each has to fail on both ranks, and leave nothing that counts as a checkpoint."""
    tensor, mesh = torch.ones(4) * (1 + dist.get_rank()), mesh_of(dp=2)
    attempts = [
        lambda: dcp.save({"x": object()}, storage_writer=CkptWriter(f"{path}/object")),
        lambda: dcp.save({"x": (1, tensor)}, storage_writer=CkptWriter(f"{path}/tuple")),
        lambda: [dcp.save({"x": tensor}, storage_writer=CkptWriter(f"{path}/cached0", overwrite=False)) for _ in range(2)],
        lambda: dcp.save(
            {"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, storage_writer=CkptWriter(f"{path}/hole"), planner=Forgets()
        ),
        lambda: dcp.load({"x": torch.zeros(4, dtype=torch.float64)}, storage_reader=CkptReader(f"{path}/cached0")),
        lambda: dcp.load({"x": torch.zeros(4)}, storage_reader=CkptReader(f"{path}/nothing")),
    ]
    told = []
    for attempt in attempts:
        with pytest.raises(CheckpointException) as caught:
            attempt()
        told.append("; ".join(sorted({f"{type(error).__name__}: {error}"[:220] for error, _ in caught.value.failures.values()})))
    dcp.load(into := {"x": torch.zeros(4, dtype=torch.float64)}, storage_reader=CkptReader(f"{path}/cached0", cast=True))
    return [*told, str(into["x"].tolist())]


def test_what_cannot_be_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected = [
        "StateError.*object",
        "StateError.*tuple",
        "ConflictError.*already",
        "CoverageError.*2:4",
        "ShapeError.*float64",
        "no checkpoint",
        r"\[1.0, 1.0, 1.0, 1.0\]",
    ]
    for told in ranks.run(2, refused, str(tmp_path)):
        assert [text for text, pattern in zip(told, expected, strict=True) if not re.search(pattern, text)] == []
    assert sorted(p.parent.name for p in tmp_path.glob("*/checkpoint.json")) == ["cached0"]


class Other(DefaultSavePlanner):
    """Has a cache of its own, as those of NeMo Automodel for model and optimizer."""


def cached(path: str) -> list[tuple[Full, Full]]:
    """Four saves with a planner that caches plans: as before, changed values, another shape, and that again. Another planner saves in
    between."""
    found = []
    for i, size in enumerate((4, 4, 6, 6)):
        mesh = mesh_of(dp=2)
        state = {"x": distribute_tensor(torch.arange(float(size)) + i, mesh, [Shard(0)]), "y": torch.full((3,), float(i)), "n": i}
        state["file"] = io.BytesIO(bytes([i]))
        dcp.save(state, storage_writer=CkptWriter(f"{path}/{i}"), planner=DefaultSavePlanner(enable_plan_caching=True))
        into = {"x": distribute_tensor(torch.zeros(size), mesh, [Shard(0)]), "y": torch.zeros(3), "n": -1, "file": io.BytesIO()}
        dcp.load(into, storage_reader=CkptReader(f"{path}/{i}"))
        assert (into["n"], into.pop("file").getvalue()) == (i, state.pop("file").getvalue())
        found.append((flat(state), flat(into)))
        dcp.save(
            other := {"y": torch.full((2,), 9.0 + i)}, storage_writer=CkptWriter(f"{path}/other"), planner=Other(enable_plan_caching=True)
        )
        dcp.load(into := {"y": torch.zeros(2)}, storage_reader=CkptReader(f"{path}/other"))
        same(flat(into), flat(other))
    return found


class Packs(DefaultSavePlanner):
    """Megatron's gives bytes that it has made of objects, and makes these of them again."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


def packed(path: str) -> Any:
    torch.save(["of Megatron", 1], made := io.BytesIO())
    dcp.save({"a/shard_0_1": made}, storage_writer=CkptWriter(path), planner=Packs(flatten_state_dict=False))
    dcp.load(into := {"a/shard_0_1": None}, storage_reader=CkptReader(path))
    return into["a/shard_0_1"]


def test_what_a_planner_has_serialized_is_given_to_it_as_it_was(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, packed, str(tmp_path / "a")) == [["of Megatron", 1]]


def test_a_planner_may_cache_its_plans(ranks: Ranks, tmp_path: Path) -> None:
    for saves in ranks.run(2, cached, str(tmp_path)):
        for expected, found in saves:
            same(found, expected)
    for i in range(4):
        assert verify(str(tmp_path / str(i))).ok
        same(in_one_process(str(tmp_path / str(i))), saves[i][0])


def test_arguments_of_the_file_system_writer(tmp_path: Path) -> None:
    """Taken where they make no difference; what asks for something else is refused by name."""
    made = CkptWriter(tmp_path / "a", thread_count=2, single_file_per_rank=True, sync_files=True, cache_staged_state_dict=False)
    assert (made.threads, made.url) == (2, str(tmp_path / "a"))
    for argument in ({"sync_files": False}, {"single_file_per_rank": False}, {"per_thread_copy_ahead": 1}, {"thread_counts": 1}):
        with pytest.raises(ckpt.errors.UsageError, match=next(iter(argument))):
            CkptWriter("a", **argument)
    with pytest.raises(ckpt.errors.UsageError, match="thread_count"):
        CkptWriter("a", threads=1, thread_count=2)


EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "dcp_storage.py"


def example(run: str, steps: int) -> float:
    loss: float = load_script("examples_dcp_storage", EXAMPLE).train(run, steps)
    return loss


def test_the_suites_of_pytorch_name_what_there_is() -> None:
    """``make peers`` is not run with these tests: its module has to keep up with names that change."""
    tree = ast.parse((ROOT / "tests" / "peers" / "inside_dcp.py").read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "ours"}
    assert named == {CkptReader.__name__, CkptWriter.__name__}


def test_the_example_goes_on_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    run, straight = str(tmp_path / "run"), str(tmp_path / "straight")
    first = ranks.run(2, example, run, 20)[0]
    second = ranks.run(1, example, run, 40)[0]
    assert second < first / 2
    assert second == pytest.approx(ranks.run(1, example, straight, 40)[0], rel=1e-3)
    assert [(s.number, s.world_size) for s in ckpt.list_steps(run)] == [(20, 2), (40, 1)]
