"""DeepSpeed checkpoints against what DeepSpeed's own tools made of them, and against flat partitions that are cut here by hand.

tests/matrix compares every tensor of every fixture, in every use, with ``by_hand`` or with what the ranks held in memory.
"""

from __future__ import annotations

import pickle
import shutil
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt.converters.comparison import compare
from ckpt.converters.semantic import check_semantic
from ckpt.errors import CkptError, CorruptError, FormatError
from ckpt.formats.registry import find_format, open_catalog
from tests.formats.reading import FIXTURES, counted, same

DEEPSPEED = FIXTURES / "deepspeed"
PREFIX = "optimizer.state.model."


class Stub:
    """Stands for any class of DeepSpeed."""

    def __new__(cls, *args: object) -> Stub:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Stub if module.startswith("deepspeed") else super().find_class(module, name)


class Net(nn.Module):
    """What ``zero1`` and ``zero3`` were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(33, 16)
        self.fc1 = nn.Linear(16, 23)
        self.fc2 = nn.Linear(23, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 33, bias=False)
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.register_buffer("buf", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc2(torch.relu(self.fc1(self.emb(x))))))


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False, pickle_module=SimpleNamespace(Unpickler=Unpickler, __name__="stubbed"))


def flat_values(tag: Path) -> tuple[list[OrderedDict[str, torch.Size]], list[dict[str, list[torch.Tensor]]]]:
    """Shapes by group, and every rank's flat tensors by key, one per group."""
    models = sorted(tag.glob("*mp_rank_00_model_states.pt"))
    ranks = []
    for path in sorted(tag.glob("*_mp_rank_00_optim_states.pt")):
        held = loaded(path)["optimizer_state_dict"]
        each = "fp32_flat_groups" in held
        base = held["optimizer_state_dict" if each else "base_optimizer_state"]
        values = {"master": held["fp32_flat_groups" if each else "single_partition_of_fp32_groups"]}
        values |= {key: [base["state"][g][key] for g in base["state"]] for key in ("exp_avg", "exp_avg_sq")}
        ranks.append(values)
    return loaded(models[0])["param_shapes"], ranks


def by_hand(tag: Path) -> dict[str, torch.Tensor]:
    """Masters and moments of ZeRO-1 and 3: the layouts as DeepSpeed's ``zero_to_fp32.py`` walks them."""
    groups, ranks = flat_values(tag)
    found = {}
    for key in ranks[0]:
        for g, shapes in enumerate(groups):
            whole, at = torch.cat([rank[key][g] for rank in ranks]), 0
            for name, shape in shapes.items():
                if (tag / "mp_rank_00_model_states.pt").exists():
                    flat, at = whole[at : at + shape.numel()], at + shape.numel()
                else:
                    part = -(-shape.numel() // len(ranks))
                    flat, at = torch.cat([rank[key][g][at : at + part] for rank in ranks])[: shape.numel()], at + part
                found[f"{PREFIX}{name}.{key}"] = flat.reshape(shape)
    return found


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_what_zero_to_fp32_made(name: str) -> None:
    """It made float32 of everything, and of ZeRO-1 left the frozen parameter out, which is there."""
    view = ckpt.open(str(DEEPSPEED / name))
    made = torch.load(DEEPSPEED / f"{name}_fp32.bin")
    for n, expected in made.items():
        master = f"{PREFIX}{n}.master"
        assert same(view[master if master in view else f"model.{n}"].read().float(), expected), n
    assert set(made) | {"frozen"} == {n.removeprefix("model.") for n in view if n.startswith("model.")}


def test_values_and_parameter_groups() -> None:
    for name in ("zero1", "zero1/global_step3_universal", "zero3", "zero3/global_step3_universal"):
        view = ckpt.open(str(DEEPSPEED / name))
        state = view.state()
        assert (state["global_steps"], state["my"], state["ds_version"]) == (3, 1, "0.19.8")
        groups = state["optimizer"]["param_groups"]
        assert [(g["weight_decay"], g["params"]) for g in groups] == [
            (0.01, ["model.emb.weight", "model.fc1.weight", "model.fc2.weight", "model.head.weight"]),
            (0.0, ["model.fc1.bias", "model.norm.weight", "model.norm.bias"]),
        ]
        assert state["zero_optimizer"]["loss_scaler"]["__state__"] == {"cur_scale": 1.0, "dynamic": False}
        assert groups[0]["betas"] == (0.9, 0.999) and "params" in groups[0]
        assert view[f"{PREFIX}norm.bias.step"].read() == 3


def test_the_parent_leads_to_the_latest_tag() -> None:
    for name, kind in {"zero1": "DeepSpeed ZeRO-1", "zero3": "DeepSpeed ZeRO-3"}.items():
        parent, tag = open_catalog(str(DEEPSPEED / name)), open_catalog(str(DEEPSPEED / name / "global_step3"))
        assert parent.url == tag.url == str(DEEPSPEED / name / "global_step3")
        assert (parent.format, parent.world_size, set(parent.tensors)) == (kind, 2, set(tag.tensors))
        assert find_format(str(DEEPSPEED / name)) == "DeepSpeed"
    assert parent.tensors[f"{PREFIX}fc2.weight.master"].alias == "model.fc2.weight"  # of ZeRO-3, which saves no weights
    assert open_catalog(str(DEEPSPEED / "zero3/global_step3_universal")).format == "DeepSpeed ZeRO-3 universal"
    assert open_catalog(str(DEEPSPEED / "zero1/global_step3/mp_rank_00_model_states.pt")).format == "torch.save archive"


def test_a_pipeline_with_a_tied_layer() -> None:
    """Two stages, each on two data-parallel ranks; the first and last layer share a weight, which both stages train."""
    path = DEEPSPEED / "pipeline/global_step3"
    view, catalog = ckpt.open(str(path)), open_catalog(str(path))
    assert catalog.tensors["model.tied_modules.embed.weight"].alias == "model.0.weight"
    assert catalog.world_size == 4
    assert [view.per_rank("mine.rank", rank) for rank in (0, 2)] == [0, 2]
    groups = view.state()["optimizer"]["param_groups"]
    assert [len(g["params"]) for g in groups] == [5, 12] and groups[0]["params"][-1] == "model.4.fc.weight"


def test_experts() -> None:
    """Four experts on 2 × 2 ranks: those of an expert-parallel rank, which counts its own from 0, lie on two ranks each."""
    path = DEEPSPEED / "experts/global_step3"
    view = ckpt.open(str(path))
    expected = {f"model.{n}" for p in path.glob("layer_*_expert_*") for n in torch.load(p)}
    trained = {n for g in view.state()["optimizer"]["param_groups"] for n in g["params"]}
    assert len(expected) == 16 and expected < trained and {f"{PREFIX}{n[6:]}.exp_avg" for n in trained} <= set(view)
    assert open_catalog(str(path)).tensors["model.head.weight"].alias == "model.emb.weight"


def test_groups_in_another_order(tmp_path: Path) -> None:
    """DeepSpeed orders groups of experts differently in every process: their names tell. Without names they are refused."""
    path = tmp_path / "c"
    shutil.copytree(DEEPSPEED / "experts", path)
    name = "global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    order = [2, 0, 3, 1]

    def shuffle(held: Any) -> None:
        states = held["optimizer_state_dict"]
        base = states["base_optimizer_state"]
        states["zero_stage"] = 2
        for key in ("single_partition_of_fp32_groups", "partition_count", "param_slice_mappings", "param_alignment_paddings"):
            states[key] = [states[key][i] for i in order] if key in states else None
        base["state"] = {n: base["state"][i] for n, i in enumerate(order)}
        base["param_groups"] = [{**base["param_groups"][i], "params": [n]} for n, i in enumerate(order)]

    rewrite(path, name, shuffle)
    assert compare(str(DEEPSPEED / "experts"), str(path)).same

    def nameless(held: Any) -> None:
        for group in held["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            del group["name"]

    rewrite(path, name, nameless)
    refused(path, CorruptError, "flat groups|fragment of")


def test_round_robin_partitions() -> None:
    """Parameters lie in another order than the slice mappings of the files say: that of the shapes, which DeepSpeed's tools go by."""
    view = ckpt.open(str(DEEPSPEED / "round_robin"))
    made = torch.load(DEEPSPEED / "round_robin_fp32.bin")
    masters = {n for n in made if f"{PREFIX}{n}.master" in view}
    assert len(masters) == 7 and all(same(view[f"{PREFIX}{n}.master"].read(), made[n]) for n in masters)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_strictly_into_a_model_and_its_optimizer(name: str) -> None:
    """As docs/formats.md shows it: nothing is missing, and only what was not asked for is left."""
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    state = {"model": model, "optimizer": optimizer, "global_steps": 0}
    aside = {"optimizer.state.*.master": "masters.*"}
    ckpt.load(str(DEEPSPEED / name), state, only=["model.*", "optimizer.*", "global_steps"], rename=aside, cast=True)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.01, 0.01), (0.01, 0.0)]
    expected = by_hand(DEEPSPEED / name / "global_step3")
    found = optimizer.state[model.fc2.weight]
    assert set(found) == {"exp_avg", "exp_avg_sq", "step"} and found["step"] == 3
    assert all(same(found[key], expected[f"{PREFIX}fc2.weight.{key}"]) for key in ("exp_avg", "exp_avg_sq"))
    assert state["global_steps"] == 3 and same(model.frozen.detach(), torch.arange(5.0))


def test_one_tensor_takes_little_more_than_its_bytes(tmp_path: Path) -> None:
    job = Job(zero=3, ranks=3, shapes=[{"big": (3, 1 << 19), "other": (1 << 19,)}])
    job.write(tmp_path)
    view = ckpt.open(str(tmp_path))
    with counted() as counts:
        view["model.big"][1].sum()
    assert counts.bytes < (4 << 19) + (1 << 20)


# ------------------------------------------------------------------------------------------------------------ made by hand


@dataclass
class Job:
    """A checkpoint in the layout of DeepSpeed, cut here: ``shapes`` of the parameters of each group."""

    zero: int
    ranks: int
    shapes: list[dict[str, tuple[int, ...]]]
    elastic: bool = False
    lean: bool = True
    gap: int = 0
    cuts: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    slices: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        names = [(n, s) for group in self.shapes for n, s in group.items()]
        keys = ("master", "exp_avg", "second")
        self.tensors = {f"{n}.{k}": torch.randn(s, generator=generator) for n, s in names for k in keys}

    def write(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        shapes = [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in self.shapes]
        model: dict[str, Any] = {"buffer_names": [], "param_shapes": shapes, "shared_params": {}, "global_steps": 1} | self.extra
        for rank in range(self.ranks if self.zero == 3 else 1):
            empty = {n: torch.empty(0) for group in self.shapes for n in group}
            weights = {n: self.tensors[f"{n}.master"].bfloat16() for n in empty}
            module = {"module": empty if self.zero == 3 else weights}
            name = f"zero_pp_rank_{rank}_mp_rank_00" if self.zero == 3 else "mp_rank_00"
            torch.save(module | model, path / f"{name}_model_states.pt")
        for rank in range(self.ranks):
            states = self.each(rank) if self.zero == 3 else self.evenly(rank)
            whole = {"optimizer_state_dict": states, "ds_config": {"zero_optimization": self.config}}
            torch.save(whole, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def optimizer(self, flat: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        count = len(flat["master"])
        states = {i: {"step": 5, "exp_avg": flat["exp_avg"][i], "second": flat["second"][i]} for i in range(count)}
        return {"state": states, "param_groups": [{"lr": 0.5, "params": list(range(count))}]}

    def evenly(self, rank: int) -> dict[str, Any]:
        flat: dict[str, list[torch.Tensor]] = {"master": [], "exp_avg": [], "second": []}
        addresses: list[dict[str, Any]] = []
        for group in self.shapes:
            for key, into in flat.items():
                whole = torch.cat([torch.cat([self.tensors[f"{n}.{key}"].flatten(), torch.zeros(self.gap)]) for n in group])
                used = whole.numel()
                size = -(-used // (2 * self.ranks)) * 2
                part = torch.cat([whole, torch.zeros(size * self.ranks - used)])[rank * size : (rank + 1) * size]
                lean = part[: max(min(used - rank * size, size), 0)].clone()
                into.append(lean if self.elastic or (self.lean and key == "master") else part.clone())
            addresses.append(self.addresses(group, rank * size, (rank + 1) * size))
        base = self.optimizer(flat)
        states = [base["state"][i] for i in range(len(self.shapes))] if self.elastic else base
        held = {"base_optimizer_state": states, "single_partition_of_fp32_groups": flat["master"], "zero_stage": self.zero}
        held |= {"partition_count": [self.ranks] * len(self.shapes)}
        if self.gap:
            held["param_alignment_paddings"] = [[self.gap] * len(group) for group in self.shapes]
        return held | ({"param_slice_mappings": addresses} if self.slices else {})

    def addresses(self, group: dict[str, tuple[int, ...]], start: int, stop: int) -> dict[str, Any]:
        found, at = OrderedDict(), 0
        for name, shape in group.items():
            first, last = max(at, start), min(at + torch.Size(shape).numel(), stop)
            if last > first:
                found[name] = Address(first - start, last - first)
            at += torch.Size(shape).numel() + self.gap
        return found

    def each(self, rank: int) -> dict[str, Any]:
        flat: dict[str, list[torch.Tensor]] = {}
        for key in ("master", "exp_avg", "second"):
            parts = []
            for name in (n for group in self.shapes for n in group):
                whole = self.tensors[f"{name}.{key}"].flatten()
                part = -(-whole.numel() // self.ranks)
                parts.append(torch.cat([whole, torch.zeros(part * self.ranks - whole.numel())])[rank * part : (rank + 1) * part])
            flat[key] = [t.clone() for t in torch.cat(parts).tensor_split(self.cuts)]
        held = {"zero_stage": 3, "partition_count": self.ranks, "fp32_flat_groups": flat["master"]}
        return held | {"optimizer_state_dict": self.optimizer(flat)}


class Address:
    """Pickled under the name of DeepSpeed's class."""

    def __init__(self, start: int, numel: int) -> None:
        self.start = start
        self.numel = numel


Address.__module__, Address.__qualname__ = __name__, "Address"

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    zero=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 5),
    shapes=st.lists(SHAPES, min_size=1, max_size=2),
    elastic=st.booleans(),
    lean=st.booleans(),
    gap=st.sampled_from([0, 0, 3]),
    cuts=st.integers(1, 4),
)
def test_any_shapes_on_any_ranks(tmp_path_factory: pytest.TempPathFactory, zero: int, ranks: int, shapes: Any, **options: Any) -> None:
    path = tmp_path_factory.mktemp("deepspeed")
    groups = [{f"p{g}.{i}": shape for i, shape in enumerate(group)} for g, group in enumerate(shapes)]
    job = Job(zero=zero, ranks=ranks, shapes=groups, **options)
    job.write(path)
    view = ckpt.open(str(path))
    assert all(same(view[f"{PREFIX}{n}"].read(), t) for n, t in job.tensors.items())
    names = [n.removesuffix(".master") for n in job.tensors if n.endswith(".master")]
    assert {n for n in view if n.startswith("model.")} == {f"model.{n}" for n in names}
    steps = view.state()["optimizer"]["state"]
    assert all(same(steps[f"model.{n}"]["step"], torch.tensor(5.0)) for n in names)
    shutil.rmtree(path)


def test_a_universal_directory_of_slices(tmp_path: Path) -> None:
    """Two files of models, each with slices: the whole weights are the masters, and what has no file of its own is refused."""
    path = tmp_path / "u"
    shutil.copytree(DEEPSPEED / "zero1/global_step3_universal", path)
    model = "mp_rank_00_model_states.pt"

    def cut(held: Any) -> None:
        held["module"] = {n: t[: len(t) // 2].clone() for n, t in held["module"].items()}
        held["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}

    rewrite(path, model, cut)
    shutil.copy(path / model, path / "mp_rank_01_model_states.pt")
    view, whole = ckpt.open(str(path)), ckpt.open(str(DEEPSPEED / "zero1"))
    assert same(view["model.fc1.weight"].read(), whole[f"{PREFIX}fc1.weight.master"].read())
    assert same(view["model.buf"].read(), whole["model.buf"].read()) and set(view) == set(whole)
    shutil.rmtree(path / "zero/buf")
    refused(path, FormatError, "buf is cut for tensor parallelism")


def refused(path: Path, kind: type[CkptError], match: str) -> None:
    with pytest.raises(kind, match=match):
        open_catalog(str(path))


SOME = [{"a": (5, 3), "b": (7,)}]


@pytest.mark.parametrize(
    ("job", "match"),
    [
        (Job(zero=3, ranks=2, shapes=SOME, config={"zero_hpz_partition_size": 2}), "hpZ"),
        (Job(zero=3, ranks=2, shapes=SOME, config={"mics_shard_size": 1}), "MiCS"),
        (Job(zero=3, ranks=2, shapes=SOME, config={"offload_optimizer": {"device": "nvme"}}), "NVMe"),
        (Job(zero=1, ranks=2, shapes=SOME, extra={"ds_autoep_layers": [{}]}), "AutoEP"),
        (Job(zero=1, ranks=2, shapes=SOME, gap=0, extra={"checkpoint_parallel_dimensions": {"tp_degree": 2}}), "tensor parallelism"),
    ],
)
def test_partitions_that_are_not_known(job: Job, match: str, tmp_path: Path) -> None:
    job.write(tmp_path)
    refused(tmp_path, FormatError, match)


def rewrite(path: Path, name: str, change: Any) -> None:
    held = loaded(path / name)
    change(held)
    torch.save(held, path / name)


def test_states_that_are_not_known(tmp_path: Path) -> None:
    Job(zero=1, ranks=2, shapes=SOME, slices=False).write(tmp_path)
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        rewrite(tmp_path, name, lambda h: h["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(row=torch.ones(3, 4)))
    refused(tmp_path, FormatError, "row of a")


def test_an_unknown_stage(tmp_path: Path) -> None:
    Job(zero=1, ranks=1, shapes=SOME, slices=False).write(tmp_path)
    rewrite(tmp_path, "zero_pp_rank_0_mp_rank_00_optim_states.pt", lambda h: h["optimizer_state_dict"].update(zero_stage=4))
    refused(tmp_path, FormatError, "ZeRO stage 4")


@pytest.mark.parametrize("zero", [1, 3])
def test_files_that_are_missing(zero: int, tmp_path: Path) -> None:
    Job(zero=zero, ranks=3, shapes=SOME).write(tmp_path)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "kept")
    refused(tmp_path, CorruptError, "rank 1 are missing")
    (tmp_path / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    refused(tmp_path, CorruptError, "of 3 ranks were saved, those of 1" if zero == 1 else "1 files of optimizer states and 3 of models")
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    refused(tmp_path, CorruptError, "no optimizer states")


def test_a_rank_of_another_save(tmp_path: Path) -> None:
    Job(zero=3, ranks=2, shapes=SOME).write(tmp_path)
    other = tmp_path / "other"
    Job(zero=3, ranks=2, shapes=[{"a": (5, 4), "b": (7,)}]).write(other)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, tmp_path / name)
    refused(tmp_path, CorruptError, "flat groups have 14 elements, parts of the parameters 12")


def test_ranks_with_different_states(tmp_path: Path) -> None:
    Job(zero=3, ranks=2, shapes=SOME).write(tmp_path)

    def change(held: Any) -> None:
        held["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].pop("second")

    rewrite(tmp_path, "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)
    refused(tmp_path, CorruptError, "different states of a: exp_avg, second, step and exp_avg, step")


@pytest.mark.parametrize(
    "change",
    [
        {"param_shapes": [{"a": (-5, 3)}]},
        {"param_shapes": [{"a": "x"}]},
        {"param_shapes": 7},
        {"buffer_names": [{}]},
        {"module": [1]},
        {"shared_params": 3},
        {"model": 1},
    ],
    ids=lambda change: str(*change),
)
@pytest.mark.parametrize("zero", [1, 3])
def test_models_that_are_not_what_deepspeed_writes(zero: int, change: dict[str, Any], tmp_path: Path) -> None:
    Job(zero=zero, ranks=2, shapes=SOME, slices=False).write(tmp_path)
    name = "mp_rank_00_model_states.pt" if zero == 1 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    rewrite(tmp_path, name, lambda held: held.update(change))
    if "buffer_names" in change:
        assert "model.a" in open_catalog(str(tmp_path)).tensors
    else:
        refused(tmp_path, CorruptError, "should be|is none|among the values")


def test_slices_that_contradict_the_shapes(tmp_path: Path) -> None:
    Job(zero=1, ranks=2, shapes=SOME).write(tmp_path)

    def swap(held: Any) -> None:
        held["optimizer_state_dict"]["param_slice_mappings"][0]["a"].start = 1

    rewrite(tmp_path, "zero_pp_rank_0_mp_rank_00_optim_states.pt", swap)
    refused(tmp_path, CorruptError, r"fragment of a is \(1, 12\) by the file, and \(0, 12\)")


def test_files_of_two_saves(tmp_path: Path) -> None:
    Job(zero=1, ranks=2, shapes=SOME).write(tmp_path)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / name, tmp_path / f"bf16_{name}")
    refused(tmp_path, CorruptError, "different saves")


@pytest.mark.parametrize("text", ["../zero1/global_step3", "/etc", "", "nowhere", "\udcff"])
def test_a_latest_that_leads_nowhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(text.encode("utf-8", "surrogateescape"))
    shutil.copytree(DEEPSPEED / "zero1", tmp_path / "zero1")
    assert find_format(str(tmp_path)) is None


@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_of_different_steps(zero: int, tmp_path: Path) -> None:
    """Files of two saves with the same shapes: their steps tell."""
    Job(zero=zero, ranks=2, shapes=SOME, slices=False).write(tmp_path)
    first, second = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))

    def steps(name: str, step: Any) -> None:
        def change(held: Any) -> None:
            base = held["optimizer_state_dict"]
            for state in base["optimizer_state_dict" if zero == 3 else "base_optimizer_state"]["state"].values():
                state["step"] = step

        rewrite(tmp_path, name, change)

    steps(first, torch.tensor(7.0))
    steps(second, torch.tensor(7.0))
    report = check_semantic(open_catalog(str(tmp_path)))
    assert report.problems == () and report.replicas > 0
    steps(second, torch.tensor(99.0))
    problems = check_semantic(open_catalog(str(tmp_path))).problems
    assert any(f"differ from the copy in {second}" in p.message for p in problems)
    steps(first, 7)
    steps(second, 99)
    refused(tmp_path, CorruptError, "step 99 of")


def test_models_of_ranks_of_different_steps(tmp_path: Path) -> None:
    Job(zero=3, ranks=2, shapes=SOME).write(tmp_path)
    for rank in range(2):
        rewrite(tmp_path, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", lambda held, rank=rank: held.update(global_steps=3 + rank))
    refused(tmp_path, CorruptError, "different steps: 3, 4")
