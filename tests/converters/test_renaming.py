"""What optimizers say of parameters follows these through a translation: moments, steps and options are those of the files that DeepSpeed,
Megatron and torch wrote, as torch reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckpt
from ckpt import convert, translated
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import NamesError, NotFoundError, UsageError
from tests.formats.megatron_files import unpacked
from tests.formats.reading import FIXTURES
from tests.formats.test_deepspeed import PREFIX, by_hand, loaded
from tests.pairwise import pairwise

Tensors = dict[str, torch.Tensor]
WANTED = ["model.*", "optimizer.*"]
WAYS = ("import", "native", "memory")


def brought(way: str, source: str, target: str, names: str, convention: str, *skip: str) -> str:
    """The URL of a checkpoint in other names: by one command, or by a call."""
    if way == "memory":
        return translated(source, ckpt.Translation(names=names, convention=convention), skip=skip)
    command = ["import"] if way == "import" else ["convert", "--to", "native"]
    skips = [part for glob in skip for part in ("--skip", glob)]
    found = CliRunner().invoke(cli, [*command, "--names", names, "--convention", convention, *skips, source, target, "--json"])
    assert found.exit_code == 0, found.output
    return target


def module_of(shapes: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with these parameters, and others than theirs in them."""
    root = nn.Module()
    for name, tensor in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        trained = tensor.is_floating_point() and name not in ("frozen", "buf")
        at.register_parameter(last, nn.Parameter(torch.full(tensor.shape, 9.0), requires_grad=trained))
    return root


def trained(model: nn.Module) -> torch.optim.AdamW:
    """With two groups, as those who trained it had, and other options."""
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        kinds[p.ndim > 1] += [p] if p.requires_grad else []
    return torch.optim.AdamW([{"params": kinds[True]}, {"params": kinds[False]}], lr=7.0, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4)


def assert_goes_on(
    model: nn.Module, optimizer: torch.optim.AdamW, expected: Mapping[str, Tensors], step: float, options: list[Any]
) -> None:
    """Moments, steps and options; and what the next step makes of them is what AdamW makes of the same by hand."""
    named = {id(p): n for n, p in model.named_parameters()}
    for group, wanted in zip(optimizer.param_groups, options, strict=True):
        assert {key: group[key] for key in wanted} == wanted
        for p in group["params"]:
            state, moments = optimizer.state[p], expected[named[id(p)]]
            assert state["step"].dtype == torch.float32 and state["step"].item() == step
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key], moments[key]), (named[id(p)], key)
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    before = {named[id(p)]: p.detach().clone() for g in optimizer.param_groups for p in g["params"]}
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    for group, said in zip(optimizer.param_groups, options, strict=True):
        for p in group["params"]:
            held, (b1, b2) = expected[named[id(p)]], said["betas"]
            first, second = b1 * held["exp_avg"].double() + (1 - b1), b2 * held["exp_avg_sq"].double() + (1 - b2)
            size = said["lr"] / (1 - b1 ** (step + 1))
            weight = before[named[id(p)]].double() * (1 - said["lr"] * said["weight_decay"])
            weight -= size * first / ((second / (1 - b2 ** (step + 1))).sqrt() + said["eps"])
            assert torch.allclose(p.detach().double(), weight, rtol=1e-6), named[id(p)]


# ------------------------------------------------------------------------------------------------------------- Megatron


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron")) / "pp2tied" / "fully_reshardable"


def huggingface(whole: Tensors) -> Tensors:
    """Parameters of all layers in one, as torch reads them, by the names and in the cut of transformers' Llama."""
    found = {
        "model.embed_tokens.weight": whole["embedding.word_embeddings.weight"][:42],
        "model.norm.weight": whole["decoder.final_layernorm.weight"],
    }
    same = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    for n in range(4):
        layer = {name.removeprefix("decoder.layers."): t[n] for name, t in whole.items() if name.startswith("decoder.layers.")}
        fused = layer["self_attention.linear_qkv.weight"].reshape(2, 4, 6, 24)  # groups of two queries, a key and a value
        parts = {theirs: layer[ours] for ours, theirs in same.items()}
        parts |= {f"self_attn.{k}_proj.weight": fused[:, rows].reshape(-1, 24) for k, rows in (("q", [0, 1]), ("k", [2]), ("v", [3]))}
        parts |= dict(zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), layer["mlp.linear_fc1.weight"].chunk(2), strict=True))
        found |= {f"model.layers.{n}.{name}": t for name, t in parts.items()}
    return found


def read_by_torch(folder: Path) -> dict[str, Tensors]:
    """For the model and each key of the optimizer's state, the parameters in transformers' names."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {n: m for n, m in metadata.items() if isinstance(m, dcp.metadata.TensorStorageMetadata)}
    whole = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in stored.items()}
    dcp.load(whole, checkpoint_id=folder, no_dist=True)
    heads = {"model": "", **{key: f"optimizer.state.{key}." for key in ("param", "exp_avg", "exp_avg_sq")}}
    parts = {k: {n.removeprefix(h): t for n, t in whole.items() if n.startswith(h or ("decoder.", "embedding."))} for k, h in heads.items()}
    return {key: huggingface(part) for key, part in parts.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS)
def test_megatron_goes_on_in_torch(megatron: Path, tmp_path: Path, way: str) -> None:
    """QKV in one and a padded vocabulary become what a model of transformers has."""
    url = brought(way, str(megatron), str(tmp_path / "made"), "llama", "huggingface", "*.master")
    oracle = read_by_torch(megatron)
    common = torch.load(megatron / "common.pt", weights_only=False)
    model = module_of(oracle["model"])
    optimizer = trained(model)
    state = {"model": model, "optimizer": optimizer, "iteration": 0}
    ckpt.load(url, state, only=[*WANTED, "iteration"], cast=True)
    assert state["iteration"] == common["iteration"] == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, oracle["model"][name].float()), name
    assert_goes_on(model, optimizer, moments_of(oracle), 3.0, options_of(common))


def moments_of(oracle: Mapping[str, Tensors]) -> dict[str, Tensors]:
    return {n: {k: oracle[k][n] for k in ("exp_avg", "exp_avg_sq")} for n in oracle["model"]}


def options_of(common: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = common["optimizer"]["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["step"]) for g in groups] == [(1.0, 3), (0.0, 3)]
    return [{k: v for k, v in g.items() if k != "step"} for g in groups]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_masters_become_the_weights(megatron: Path) -> None:
    """As the guide says: for a model in full precision."""
    url = translated(str(megatron), ckpt.Translation(names="llama", convention="huggingface"), skip=["model.*"])
    oracle = read_by_torch(megatron)
    model = module_of(oracle["param"])
    optimizer = trained(model)
    ckpt.load(url, {"model": model, "optimizer": optimizer}, only=WANTED, rename={"optimizer.state.*.master": "*"})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, oracle["param"][name]), name
    assert_goes_on(model, optimizer, moments_of(oracle), 3.0, options_of(torch.load(megatron / "common.pt", weights_only=False)))


def test_experts_become_one_with_what_they_all_have(megatron: Path, tmp_path: Path) -> None:
    """Megatron's, first by the names in files of transformers, then stacked as its modules have them."""
    source, apart = str(megatron.parents[1] / "tp2ep2" / "legacy"), str(tmp_path / "apart")
    brought("native", source, apart, "mixtral", "huggingface")
    translation = ckpt.Translation(names="transformers-mixtral", convention="transformers")
    before, after = ckpt.open(apart), ckpt.open(translated(apart, translation))
    name, key = "model.model.layers.2.mlp.experts.gate_up_proj", "exp_avg"
    experts = [f"{PREFIX}model.layers.2.block_sparse_moe.experts.{n}" for n in range(4)]
    stacked = torch.stack([torch.cat([before[f"{e}.{w}.weight.{key}"].read() for w in ("w1", "w3")]) for e in experts])
    assert torch.equal(after[f"optimizer.state.{name}.{key}"].read(), stacked) and stacked.any()
    state = after.state()
    assert state["optimizer"]["state"][name]["step"] == 3 and state["iteration"] == 3
    groups = state["optimizer"]["param_groups"]
    assert [(len(g["params"]), g["is_expert_parallel"], g["wd_mult"]) for g in groups] == [(22, False, 1), (9, False, 0), (8, True, 1)]
    assert name in groups[2]["params"]


# ------------------------------------------------------------------------------------------------------------ DeepSpeed

FUSED = """
left = "deepspeed"
right = "mine"
[[term]]
left = ["emb.weight", "head.weight"]
right = "tables.weight"
steps = [{ concat = 0 }]
[[term]]
left = ["norm.weight", "norm.bias"]
right = "norm.both"
steps = [{ concat = 0 }]
[[term]]
left = "fc2.weight"
right = "down.weight"
steps = [{ transpose = [1, 0] }]
[[term]]
left = "{a}"
right = "{a}"
each = { a = ["fc1.weight", "fc1.bias", "frozen", "buf"] }
"""
APART = """
left = "mine"
right = "deepspeed"
[[term]]
left = ["mlp.gate", "mlp.up"]
right = "fc1.weight"
steps = [{ concat = 0, sizes = [11, 12] }]
[[term]]
left = "{a}"
right = "{a}"
each = { a = ["emb.weight", "head.weight", "norm.weight", "norm.bias", "fc1.bias", "fc2.weight", "frozen", "buf"] }
"""


def fused(t: Tensors) -> Tensors:
    made = {n: t[n] for n in ("fc1.weight", "fc1.bias", "frozen", "buf") if n in t}
    both = {"tables.weight": torch.cat([t["emb.weight"], t["head.weight"]]), "norm.both": torch.cat([t["norm.weight"], t["norm.bias"]])}
    return {**made, **both, "down.weight": t["fc2.weight"].T}


def apart(t: Tensors) -> Tensors:
    gate, up = t["fc1.weight"].split([11, 12])
    return {**{n: x for n, x in t.items() if n != "fc1.weight"}, "mlp.gate": gate, "mlp.up": up}


CASES: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {"fused": (FUSED, fused), "apart": (APART, apart)}


@pytest.mark.parametrize(("name", "case", "way"), pairwise(["zero1", "zero3", "zero3/global_step3_universal"], list(CASES), list(WAYS)))
def test_deepspeed_goes_on_in_torch(tmp_path: Path, name: str, case: str, way: str) -> None:
    rules, made_of = CASES[case]
    (tmp_path / "mine.toml").write_text(rules)
    source, tag = str(FIXTURES / "deepspeed" / name), FIXTURES / "deepspeed" / name.partition("/")[0] / "global_step3"
    url = brought(way, source, str(tmp_path / "made"), str(tmp_path / "mine.toml"), "mine", "*.master")
    parts: dict[str, Tensors] = {}
    for full, tensor in by_hand(tag).items():
        owner, _, key = full.removeprefix(PREFIX).rpartition(".")
        parts.setdefault(key, {})[owner] = tensor
    weights = made_of({**parts["master"], "frozen": torch.arange(5.0), "buf": torch.arange(7.0)})
    model = module_of(weights)
    optimizer = trained(model)
    state = {"model": model, "optimizer": optimizer, "global_steps": 0}
    ckpt.load(url, state, only=[*WANTED, "global_steps"], cast=True)
    assert state["global_steps"] == 3
    for name_, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name_].bfloat16().float() if name == "zero1" else weights[name_]), name_
    moments = {key: made_of(parts[key]) for key in ("exp_avg", "exp_avg_sq")}
    states = loaded(min(tag.glob("*_optim_states.pt")))["optimizer_state_dict"]
    base = states["optimizer_state_dict" if "fp32_flat_groups" in states else "base_optimizer_state"]
    assert {float(s["step"]) for s in base["state"].values()} == {3.0}
    options = [{k: v for k, v in g.items() if k != "params"} for g in base["param_groups"]]
    assert [g["weight_decay"] for g in options] == [0.01, 0.0]
    assert_goes_on(model, optimizer, {n: {k: m[n] for k, m in moments.items()} for n in moments["exp_avg"]}, 3.0, options)


RENAMED = """
left = "deepspeed"
right = "mine"
keeps_others = true
[[term]]
left = "1.fc.weight"
right = "first"
"""


@pytest.mark.parametrize("to", ["import", "native"])
def test_values_of_ranks_stay(tmp_path: Path, to: str) -> None:
    (tmp_path / "mine.toml").write_text(RENAMED)
    source = str(FIXTURES / "deepspeed" / "pipeline")
    view = ckpt.open(brought(to, source, str(tmp_path / "made"), str(tmp_path / "mine.toml"), "mine"))
    assert [view.per_rank("mine.rank", rank) for rank in (0, 2)] == [0, 2]
    groups = view.state()["optimizer"]["param_groups"]
    assert "model.first" in groups[0]["params"] and [len(g["params"]) for g in groups] == [5, 12]
    assert view.state()["lr_scheduler"] == ckpt.open(source).state()["lr_scheduler"]


@pytest.mark.parametrize("to", ["import", "native"])
def test_tensors_of_single_ranks_are_no_parameters(tmp_path: Path, rules: str, to: str) -> None:
    """So a translation leaves them where they are."""
    source, made = str(tmp_path / "s"), str(tmp_path / "made")
    weights = {name: torch.ones(2, 3) for name in ("q", "k", "other")}
    ckpt.save(source, {"net": weights, "mine": ckpt.PerRank({"seen": torch.arange(3), "n": 4})})
    value = ckpt.open(brought(to, source, made, rules, "one")).per_rank("mine", 0)
    assert torch.equal(value["seen"].read(), torch.arange(3)) and value["n"] == 4
    report = import_checkpoint(source, str(tmp_path / "v"), only=["net.*"])
    assert report.left_out == ("mine", "mine.seen@rank0")
    with pytest.raises(NotFoundError):
        ckpt.open(report.url).per_rank("mine", 0)


# ----------------------------------------------------------------------------------------------------- torch's own (DCP)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS)
def test_names_within_the_module(tmp_path: Path, way: str) -> None:
    """``torch.distributed.checkpoint`` names an optimizer's parameters within the model; what is made of it loads without renames."""
    named = {"e": "emb.weight", "h": "head.weight", "a.w": "l0.weight", "a.b": "l0.bias", "n.w": "norm.weight", "n.b": "norm.bias"}
    terms = [f'[[term]]\nleft = "m.{theirs}"\nright = "{mine}"' for mine, theirs in {**named, "b": "l1.weight"}.items()]
    (tmp_path / "mine.toml").write_text("\n".join(['left = "dcp"', 'right = "mine"', *terms, "steps = [{ transpose = [1, 0] }]"]))
    folder = FIXTURES / "fsdp" / "fsdp2_ws2"
    url = brought(way, str(folder), str(tmp_path / "made"), str(tmp_path / "mine.toml"), "mine")
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    whole = {n: torch.empty(m.size) for n, m in metadata.items() if isinstance(m, dcp.metadata.TensorStorageMetadata)}
    dcp.load(whole, checkpoint_id=folder, no_dist=True)
    weights = {mine: whole[f"model.m.{theirs}"] for mine, theirs in named.items()} | {"b": whole["model.m.l1.weight"].T}
    model = module_of(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    ckpt.load(url, {"model": model, "optim": optimizer})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert optimizer.param_groups[0]["lr"] == 0.01
    for name, p in model.named_parameters():
        stored = f"optim.state.m.{named.get(name, 'l1.weight')}"
        held = whole[f"{stored}.exp_avg"]
        assert torch.equal(optimizer.state[p]["exp_avg"], held.T if name == "b" else held)
        assert torch.equal(optimizer.state[p]["step"], whole[f"{stored}.step"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("skip", [(), ("opt.param_groups.*",)])
def test_a_learning_rate_that_is_a_tensor_is_an_option(tmp_path: Path, rules: str, skip: tuple[str, ...]) -> None:
    """``torch.distributed.checkpoint`` stores it as a tensor, of which no translation speaks."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2, 3)) for name in ("q", "k", "other")})
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    for p in model.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    source = str(tmp_path / "s")
    dcp.save({"net": model.state_dict(), "opt": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=source, no_dist=True)
    mine = one_module()
    options = ["--names", rules, "--convention", "one", *(f"--skip={glob}" for glob in skip)]
    found = json.loads(CliRunner().invoke(cli, ["import", "--json", *options, source, str(tmp_path / "v")]).stdout)
    ckpt.load(found["url"], {"net": mine[0], "opt": mine[1]})
    assert mine[1].param_groups[0]["lr"] == (9.0 if skip else 0.25)
    assert found["left_out"] == (["opt.param_groups.0.lr", "opt.param_groups.lr"] if skip else [])
    assert torch.equal(mine[1].state[mine[0].same]["exp_avg"], optimizer.state[model["other"]]["exp_avg"])


# ---------------------------------------------------------------------------------------------------------------- rules

QKV = """
left = "apart"
right = "one"
[[term]]
left = ["q", "k"]
right = "qk"
steps = [{ concat = 0 }]
[[term]]
left = "other"
right = "same"
"""


def saved(url: str, *, rates: Sequence[float] = (0.1, 0.1), steps: Sequence[float] = (2, 2), kind: str = "tensor") -> str:
    """A model of which two parameters become one."""
    model = nn.ParameterDict({name: nn.Parameter(torch.full((2, 3), float(i))) for i, name in enumerate(("q", "k", "other"))})
    optimizer = torch.optim.Adam([{"params": [model["q"]], "lr": rates[0]}, {"params": [model["k"], model["other"]], "lr": rates[1]}])
    for p in model.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, step in zip(("q", "k"), steps, strict=True):
        optimizer.state[model[name]]["step"] = torch.tensor(float(step)) if kind == "tensor" else step
    ckpt.save(url, {"net": model, "opt": optimizer, "epoch": 5})
    return url


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "qkv.toml").write_text(QKV)
    return str(tmp_path / "qkv.toml")


def one_module() -> tuple[nn.Module, torch.optim.Adam]:
    model = module_of({"qk": torch.zeros(4, 3), "same": torch.zeros(2, 3)})
    return model, torch.optim.Adam(model.parameters(), lr=9.0)


@pytest.mark.parametrize("kind", ["tensor", "plain"])
def test_equal_options_and_steps_become_one(tmp_path: Path, rules: str, kind: str) -> None:
    """Whatever model and optimizer are called in the state."""
    url = translated(saved(str(tmp_path / "s"), kind=kind), ckpt.Translation(names=rules, convention="one"))
    model, optimizer = one_module()
    state = {"net": model, "opt": optimizer, "epoch": 0}
    ckpt.load(url, state)
    assert state["epoch"] == 5 and optimizer.param_groups[0]["lr"] == 0.1
    assert torch.allclose(model.qk, torch.tensor([[0.0], [0], [1], [1]]).expand(4, 3) - 0.1)
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [2, 1]


@pytest.mark.parametrize("to", ["import", "native"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"rates": (0.1, 0.2)}, "option lr: 'net.q' has 0.1, 'net.k' has 0.2"),
        ({"steps": (2, 3)}, "step: 'net.q' has 2.0, 'net.k' has 3.0"),
        ({"steps": (2, 3), "kind": "plain"}, "step: 'net.q' has 2, 'net.k' has 3"),
    ],
)
def test_different_options_or_steps_cannot_become_one(tmp_path: Path, rules: str, how: dict[str, Any], told: str, to: str) -> None:
    source, target = saved(str(tmp_path / "s"), **how), str(tmp_path / "made")
    command = ["import"] if to == "import" else ["convert", "--to", "native"]
    found = CliRunner().invoke(cli, [*command, "--names", rules, "--convention", "one", source, target])
    assert found.exit_code == 2 and f"'net.qk' would be made of parameters that differ in the {told}" in found.output
    assert not Path(target).exists()
    model, _ = one_module()
    state = {"net": model, "epoch": 0}
    ckpt.load(brought(to, source, target, rules, "one", "opt.*"), state)
    assert state["epoch"] == 5 and torch.allclose(model.same, torch.tensor(2.0 - how.get("rates", (0, 0.1))[1]))


@pytest.mark.parametrize("to", ["import", "native"])
def test_a_frozen_parameter_does_not_become_a_part_of_a_trained_one(tmp_path: Path, rules: str, to: str) -> None:
    """Where the optimizer has no tensors, only its groups say which parameters it has."""
    model, source = nn.ParameterDict({name: nn.Parameter(torch.ones(2, 3)) for name in ("q", "k", "other")}), str(tmp_path / "s")
    ckpt.save(source, {"net": model, "opt": torch.optim.SGD([model["q"], model["other"]], lr=0.5)})
    command = ["import"] if to == "import" else ["convert", "--to", to]
    found = CliRunner().invoke(cli, [*command, "--names", rules, "--convention", "one", source, str(tmp_path / "o")])
    assert found.exit_code == 2 and "groups of options: 'net.q' has one, 'net.k' has none" in found.output
    ckpt.save(source, {"net": model, "opt": torch.optim.SGD([model["other"]], lr=0.5)})
    made = one_module()[0]
    mine = torch.optim.SGD([made.same], lr=1.0)
    ckpt.load(brought(to, source, str(tmp_path / "p"), rules, "one"), {"net": made, "opt": mine})
    assert mine.param_groups[0]["lr"] == 0.5


def test_what_is_left_out_is_told(tmp_path: Path, rules: str) -> None:
    from ckpt.converters.mapping.convention import translated_views as views_of

    source = saved(str(tmp_path / "s"))
    tensors = {f"opt.state.net.{p}.{k}" for p in ("q", "k", "other") for k in ("exp_avg", "exp_avg_sq", "step")}
    values = {"opt.state", "opt.param_groups"}
    views = views_of(source, rules, "one", {})
    made = import_checkpoint(source, str(tmp_path / "v"), views=views, skip=["opt.*"])
    assert set(made.left_out) == tensors | values and not made.values
    made = convert(source, str(tmp_path / "n"), to="native", views=views, skip=["opt.*"])
    assert set(made.left_out) == tensors | values
    made = import_checkpoint(source, str(tmp_path / "w"), views=views, only=["net.*", "epoch"])
    assert set(made.left_out) == tensors | values and ckpt.open(made.url).state()["epoch"] == 5
    made = import_checkpoint(source, str(tmp_path / "x"), views=views, skip=["*.exp_avg"])
    assert set(made.left_out) == {n for n in tensors if n.endswith(".exp_avg")} and made.values
    assert import_checkpoint(source, str(tmp_path / "y"), views=views).left_out == ()


def test_only_takes_values_too(tmp_path: Path) -> None:
    source = saved(str(tmp_path / "s"))
    made = import_checkpoint(source, str(tmp_path / "v"), only=["opt.*"])
    assert set(ckpt.open(made.url).state()) == {"opt"} and "epoch" in made.left_out
    assert len(ckpt.open(made.url).state()["opt"]["param_groups"]) == 2
    made = import_checkpoint(source, str(tmp_path / "w"), only=["net.q"])
    assert list(ckpt.open(made.url).state()) == ["net"]
    for wrong in ("epochs", "net", "opt"):
        with pytest.raises(NamesError, match=f"'{wrong}'"):
            import_checkpoint(source, str(tmp_path / "x"), only=["net.*", wrong])


def test_skipped_names_need_no_rule_and_have_to_be_there(tmp_path: Path, rules: str) -> None:
    source, made = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(source, {"net": {name: torch.ones(2, 3) for name in ("q", "k", "other")}, "ema": torch.ones(2), "seen": torch.ones(1)})
    with pytest.raises(NamesError, match="(?s)match no term.*ema"):
        translated(source, ckpt.Translation(names=rules, convention="one"))
    with pytest.raises(NamesError, match="no tensor matches 'emas'"):
        translated(source, ckpt.Translation(names=rules, convention="one"), skip=["ema", "emas"])
    assert CliRunner().invoke(cli, ["convert", "--to", "hf", "--no-config", "--skip", "nothing", source, made]).exit_code == 21
    found = CliRunner().invoke(
        cli, ["import", "--json", "--names", rules, "--convention", "one", "--skip", "ema", "--skip", "s*", source, made]
    )
    assert json.loads(found.stdout)["left_out"] == ["ema", "seen"]
    assert set(ckpt.open(made)) == {"net.qk", "net.same"}
    with pytest.raises(UsageError, match="'q'.*not there"):
        translated(source, ckpt.Translation(names=rules, convention="one"), skip=["ema", "seen", "net.q"])


def test_states_of_another_shape_are_renamed_or_refused(tmp_path: Path, rules: str) -> None:
    """A factored second moment has a number for each row: of a fused parameter nobody says which."""
    source = str(tmp_path / "s")
    weights = {name: torch.ones(2, 3) for name in ("q", "k", "other")}
    rows = {f"net.{name}": {"row": torch.arange(2.0)} for name in weights}
    optimizer = {"state": rows, "param_groups": [{"lr": 0.1, "params": list(rows)}]}
    ckpt.save(source, {"net": weights, "opt": optimizer})
    with pytest.raises(UsageError, match=r"the state of 'q' has the shape \[2\], not that of the parameter, \[2, 3\]"):
        translated(source, ckpt.Translation(names=rules, convention="one"))
    url = translated(source, ckpt.Translation(names=rules, convention="one"), skip=["opt.state.net.[qk].row"])
    assert torch.equal(ckpt.open(url)["opt.state.net.same.row"].read(), torch.arange(2.0))


def test_an_optimizer_by_number_is_not_taken_for_one_by_name(tmp_path: Path, rules: str) -> None:
    """As ``torch.save`` keeps it: nothing says whose number is whose."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2, 3)) for name in ("q", "k", "other")})
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    source = str(tmp_path / "s.pt")
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 4}, source)
    with pytest.raises(NamesError, match=r"state\.0\.exp_avg"):
        translated(source, ckpt.Translation(names=rules, convention="one"))
    url = brought("import", source, str(tmp_path / "v"), rules, "one", "opt.*")
    assert ckpt.open(url).state()["epoch"] == 4 and set(ckpt.open(url)) == {"net.qk", "net.same"}
