"""Conversion into Megatron's files of ranks: every rank has what Megatron's own rank had, or what plain numpy cuts for it, and all the
ways back.

Megatron-Core itself loads such files in tests/real/test_to_megatron.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import ConvertReport, MegatronParallel
from ckpt.converters.conversion import ConversionJournal
from ckpt.converters.mapping.convention import translated_views
from ckpt.errors import CkptError, ConflictError, NotCommittedError, UsageError
from tests.formats.megatron_files import assert_same, bits, read_all

HF = Path(__file__).parents[1] / "fixtures" / "hf"
LOCAL = {"transformer_impl": "local"}
GROUPS, HEAD = 4, 8  # of both fixtures of transformers
EXPERT = "model.decoder.layers.3.mlp.experts.local_experts.{}.linear_fc2.weight"


def convert(source: Path | str, url: Path | str, names: str | None = None, **more: Any) -> ConvertReport:
    views = None if names is None else translated_views(str(source), names, "megatron", {})
    fields = {k: more.pop(k) for k in ("tensor", "pipeline", "virtual", "expert", "arguments") if k in more}
    return ckpt.convert(str(source), str(url), to="megatron", views=views, parallel=MegatronParallel(**fields), verify=True, **more)


def loaded(path: Path) -> dict[str, Any]:
    """What torch has of a file, without running anything in it."""
    assert zipfile.ZipFile(path).testzip() is None
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def by_rank(folder: Path, name: str = "model_optim_rng.pt") -> dict[str, dict[str, Any]]:
    return {p.parent.name: loaded(p) for p in sorted(folder.glob(f"*/{name}"))}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
            assert np.array_equal(bits(found[name]), bits(value)), name
        else:
            assert found[name] is value is None, name


# ------------------------------------------------------------------------------------- what Megatron's own ranks had


@pytest.mark.parametrize(
    ("layout", "through", "back"),
    [
        ("tp2pp2vpp2", [{}, {"pipeline": 4}, {"tensor": 2}], {"tensor": 2, "pipeline": 2, "virtual": 2}),
        ("tp2ep2", [{}, {"expert": 4}, {"tensor": 2, "pipeline": 2}], {"tensor": 2, "expert": 2}),
        ("pp2tied", [{"tensor": 2}, {"tensor": 2, "pipeline": 2, "virtual": 2}], {"pipeline": 2}),
        ("moe_singleton", [{"tensor": 2, "expert": 2}], {}),
        ("dp2", [{"tensor": 2, "pipeline": 2}], {}),
    ],
)
def test_ranks_of_megatron_itself(
    megatron_files: Path, tmp_path: Path, layout: str, through: list[dict[str, int]], back: dict[str, int]
) -> None:
    source: Path = megatron_files / layout / "legacy"
    whole = read_all(source)
    for number, parallel in enumerate([*through, back]):
        made = tmp_path / str(number)
        report = convert(source, made, **parallel, arguments={"padded_vocab_size": 48})
        assert report.finished and not report.left_out and (made / "latest_checkpointed_iteration.txt").read_text() == "3"
        source = made
        assert_same(read_all(source), whole)
    found, expected = by_rank(source / "iter_0000003"), by_rank(megatron_files / layout / "legacy" / "iter_0000003")
    assert sorted(found) == sorted(expected)
    for rank, state in expected.items():
        chunks = [k for k in state if k.startswith("model")]
        assert chunks == [k for k in found[rank] if k.startswith("model")]
        for chunk in chunks:
            same(found[rank][chunk], state[chunk])
        assert (found[rank]["iteration"], found[rank]["checkpoint_version"]) == (3, 3.0)
        assert found[rank]["optimizer"] == state["optimizer"]
        told = {k: v for k, v in vars(state["args"]).items() if v is not None}
        assert {k: getattr(found[rank]["args"], k) for k in told} == told
    found, expected = (by_rank(p / "iter_0000003", "distrib_optim.pt") for p in (source, megatron_files / layout / "legacy"))
    assert sorted(found) == sorted(expected)
    for rank, buffers in expected.items():
        same_buffers(found[rank], buffers)


def same_buffers(found: Any, expected: Any) -> None:
    """All that a ``distrib_optim.pt`` has, to the last bit."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same_buffers(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same_buffers(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and np.array_equal(bits(found), bits(expected))
    else:
        assert found == expected


def test_from_torch_dist_and_from_ours(megatron_files: Path, tmp_path: Path) -> None:
    source = megatron_files / "tp2pp2vpp2" / "dp_reshardable"
    ckpt.convert(str(source), str(tmp_path / "ours"), to="native")
    for number, url in enumerate((source, tmp_path / "ours")):
        convert(url, tmp_path / str(number), tensor=2, pipeline=2, virtual=2, arguments={"padded_vocab_size": 48})
        expected = by_rank(megatron_files / "tp2pp2vpp2" / "legacy" / "iter_0000003")
        for rank, state in by_rank(tmp_path / str(number) / "iter_0000003").items():
            same(state["model0"], expected[rank]["model0"])
            same(state["model1"], expected[rank]["model1"])


# ----------------------------------------------------------------------------------------- what plain numpy cuts


def stored(name: str) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted((HF / name).glob("*.safetensors")) for k, v in load_file(path).items()}


def rows(tensor: torch.Tensor, rank: int, ranks: int, axis: int = 0) -> torch.Tensor:
    return torch.chunk(tensor, ranks, axis)[rank]


def attention(held: dict[str, torch.Tensor], layer: int, tp: int, tps: int) -> dict[str, torch.Tensor]:
    at = f"model.layers.{layer}.self_attn"
    q, k, v = (held[f"{at}.{p}_proj.weight"].reshape(GROUPS, -1, HEAD, 64) for p in "qkv")
    fused = torch.cat([q, k, v], 1)[tp * GROUPS // tps : (tp + 1) * GROUPS // tps]
    return {
        "self_attention.linear_qkv.weight": fused.reshape(-1, 64),
        "self_attention.linear_proj.weight": rows(held[f"{at}.o_proj.weight"], tp, tps, 1),
        "input_layernorm.weight": held[f"model.layers.{layer}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": held[f"model.layers.{layer}.post_attention_layernorm.weight"],
    }


def gated(gate: torch.Tensor, up: torch.Tensor, tp: int, tps: int) -> torch.Tensor:
    return torch.cat([rows(gate, tp, tps), rows(up, tp, tps)])


def embedded(table: torch.Tensor, tp: int, tps: int) -> torch.Tensor:
    total = -(-table.shape[0] // (128 * tps)) * 128 * tps
    return rows(torch.cat([table, torch.zeros(total - table.shape[0], 64, dtype=table.dtype)]), tp, tps)


def without_extra(model: dict[str, Any]) -> dict[str, Any]:
    assert all(v is None for k, v in model.items() if k.endswith("_extra_state"))
    return {k: v for k, v in model.items() if not k.endswith("_extra_state")}


@pytest.mark.parametrize(("tps", "stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_llama_cut_by_numpy(tmp_path: Path, tps: int, stages: int) -> None:
    held = stored("llama")
    report = convert(HF / "llama", tmp_path / "m", "llama", tensor=tps, pipeline=stages, arguments=LOCAL)
    assert report.left_out == () and (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    ranks = by_rank(tmp_path / "m" / "release")
    assert sorted(f"release/{r}/model_optim_rng.pt" for r in ranks) == sorted(report.files)
    assert sorted(ranks) == sorted(f"mp_rank_{t:02d}" + (f"_{p:03d}" if stages > 1 else "") for t in range(tps) for p in range(stages))
    for rank, state in ranks.items():
        tp, stage = (int(n) for n in (*rank.split("_")[2:], "0")[:2])
        expected: dict[str, torch.Tensor] = {}
        if stage == 0:
            expected["embedding.word_embeddings.weight"] = embedded(held["model.embed_tokens.weight"], tp, tps)
        for local, layer in enumerate(range(stage * 2 // stages, (stage + 1) * 2 // stages)):
            mlp = {p: held[f"model.layers.{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")}
            parts = attention(held, layer, tp, tps)
            parts["mlp.linear_fc1.weight"] = gated(mlp["gate"], mlp["up"], tp, tps)
            parts["mlp.linear_fc2.weight"] = rows(mlp["down"], tp, tps, 1)
            expected |= {f"decoder.layers.{local}.{k}": v for k, v in parts.items()}
        if stage == stages - 1:
            expected["decoder.final_layernorm.weight"] = held["model.norm.weight"]
            expected["output_layer.weight"] = embedded(held["lm_head.weight"], tp, tps)
        same(without_extra(state["model"]), expected)
        assert state["iteration"] == 0


@pytest.mark.parametrize("form", ["sequential", "grouped", "transposed"])
@pytest.mark.parametrize(("tps", "owners"), [(1, 1), (2, 2), (1, 4)])
def test_mixtral_cut_by_numpy(tmp_path: Path, form: str, tps: int, owners: int) -> None:
    held = stored("mixtral")
    arguments = {"sequential": LOCAL, "grouped": {"moe_grouped_gemm": True}, "transposed": {**LOCAL, "moe_grouped_gemm": True}}[form]
    convert(HF / "mixtral", tmp_path / "m", "mixtral", tensor=tps, expert=owners, arguments=arguments)
    ranks = by_rank(tmp_path / "m" / "release")
    assert len(ranks) == tps * owners
    for rank, state in ranks.items():
        tp, owner = (int(n) for n in (*rank.split("_")[2:], "0")[:2])
        model = without_extra(state["model"])
        experts = {k: v for k, v in model.items() if ".experts." in k}
        for layer in range(2):
            at, to = f"model.layers.{layer}.block_sparse_moe", f"decoder.layers.{layer}.mlp"
            assert torch.equal(model[f"{to}.router.weight"], held[f"{at}.gate.weight"])
            first, second = [], []
            for number in range(owner * 4 // owners, (owner + 1) * 4 // owners):
                w1, w2, w3 = (held[f"{at}.experts.{number}.w{i}.weight"] for i in (1, 2, 3))
                first.append(gated(w1, w3, tp, tps))
                second.append(rows(w2, tp, tps, 1))
            for linear, own in (("linear_fc1", first), ("linear_fc2", second)):
                for local, tensor in enumerate(own):
                    if form == "sequential":
                        assert torch.equal(experts.pop(f"{to}.experts.local_experts.{local}.{linear}.weight"), tensor)
                    elif form == "grouped":
                        assert torch.equal(experts.pop(f"{to}.experts.{linear}.weight{local}"), tensor)
            if form == "transposed":
                joined = experts.pop(f"{to}.experts.weight1")
                assert torch.equal(joined.view(len(first), 64, -1), torch.stack([t.T for t in first])) and joined.shape[0] == 64
                joined = experts.pop(f"{to}.experts.weight2")
                assert torch.equal(joined.view(len(second), -1, 64), torch.stack([t.T for t in second])) and joined.shape[1] == 64
        assert not experts


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama", {"tensor": 2, "pipeline": 2}),
        ("llama", {"tensor": 4, "arguments": {"make_vocab_size_divisible_by": 1}}),
        ("mixtral", {"tensor": 2, "expert": 4, "arguments": {"moe_grouped_gemm": True}}),
        ("mixtral", {"pipeline": 2, "expert": 2, "arguments": {**LOCAL, "moe_grouped_gemm": True}}),
        ("mixtral", {"tensor": 2, "expert": 2, "arguments": {"expert_tensor_parallel_size": 1}}),
    ],
)
def test_to_megatron_and_back(tmp_path: Path, name: str, parallel: dict[str, Any]) -> None:
    convert(HF / name, tmp_path / "m", name, **parallel)
    views = translated_views(str(tmp_path / "m"), name, "huggingface", {})
    ckpt.convert(str(tmp_path / "m"), str(tmp_path / "back"), to="hf", views=views)
    same(load_file(tmp_path / "back" / "model.safetensors"), stored(name))


def test_arguments_of_a_configuration(tmp_path: Path) -> None:
    convert(HF / "mixtral", tmp_path / "m", "mixtral", tensor=2, expert=2, arguments={"seq_length": 17})
    said = vars(by_rank(tmp_path / "m" / "release")["mp_rank_01_001"]["args"])
    expected = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 8,
        "num_experts": 4,
        "moe_ffn_hidden_size": 96,
        "moe_router_topk": 2,
        "vocab_size": 250,
        "padded_vocab_size": 256,
        "swiglu": True,
        "seq_length": 17,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "moe_layer_freq": 1,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_dist_ckpt": False,
        "ckpt_format": "torch",
        "group_query_attention": True,
    }
    assert {k: said[k] for k in expected} == expected


def test_all_files_are_of_one_configuration(tmp_path: Path) -> None:
    """Each has arguments, so a conversion does not go on with others."""
    shutil.copytree(HF / "llama", tmp_path / "source")
    url, views = str(tmp_path / "source"), translated_views(str(tmp_path / "source"), "llama", "megatron", {})
    options: dict[str, Any] = {"to": "megatron", "views": views, "parallel": MegatronParallel(tensor=2)}
    assert not ckpt.convert(url, str(tmp_path / "m"), **options, part=(0, 2)).finished
    config = tmp_path / "source" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 1234.0}))
    with pytest.raises(ConflictError, match="another conversion was begun here"):
        ckpt.convert(url, str(tmp_path / "m"), **options, part=(1, 2))


# --------------------------------------------------------------------------------------------------- how it is cut


def model(layers: int = 4, *, tied: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    made = {"embedding.word_embeddings.weight": torch.randn(10, 8), "decoder.final_layernorm.weight": torch.randn(8)}
    for i in range(layers):
        made[f"decoder.layers.{i}.mlp.linear_fc1.weight"] = torch.randn(12, 8)
        made[f"decoder.layers.{i}.mlp.linear_fc2.weight"] = torch.randn(8, 6)
    return made if tied else {**made, "output_layer.weight": torch.randn(10, 8)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"decoder_first_pipeline_num_layers": 1}, [[0], [1, 2, 3]]),
        ({"pipeline_model_parallel_layout": "Ettt|tL"}, [[0, 1, 2], [3]]),
        ({}, [[0, 1], [2, 3]]),
    ],
)
def test_layers_of_stages(tmp_path: Path, arguments: dict[str, Any], expected: list[list[int]]) -> None:
    held = model()
    ckpt.save(str(tmp_path / "s"), {"model": held, "iteration": 12, "opt_param_scheduler": {"num_steps": 5, "max_lr": 0.5}})
    convert(tmp_path / "s", tmp_path / "m", pipeline=2, arguments={**arguments, "num_attention_heads": 2})
    ranks = by_rank(tmp_path / "m" / "iter_0000012")
    for stage, layers in enumerate(expected):
        state = ranks[f"mp_rank_00_{stage:03d}"]
        found = [state["model"][f"decoder.layers.{i}.mlp.linear_fc1.weight"] for i in range(len(layers))]
        assert all(torch.equal(t, held[f"decoder.layers.{n}.mlp.linear_fc1.weight"]) for t, n in zip(found, layers, strict=True))
        assert f"decoder.layers.{len(layers)}.mlp.linear_fc1.weight" not in state["model"]
        assert (state["iteration"], state["opt_param_scheduler"]) == (12, {"num_steps": 5, "max_lr": 0.5})
        table = state["model"]["output_layer.weight" if stage else "embedding.word_embeddings.weight"]
        assert torch.equal(table[:10], held["embedding.word_embeddings.weight"]) and not table[10:].any() and len(table) == 128
    assert ckpt.open(str(tmp_path / "m")).state()["opt_param_scheduler"]["num_steps"] == 5


def test_groups_of_experts_come_and_go(megatron_files: Path, tmp_path: Path) -> None:
    """Experts have an optimizer of their own where they are on several ranks: then the groups are listed twice."""
    convert(megatron_files / "moe_singleton" / "legacy", tmp_path / "apart", expert=2)
    convert(tmp_path / "apart", tmp_path / "together")
    apart = by_rank(tmp_path / "apart" / "iter_0000003")["mp_rank_00_001"]["optimizer"]
    together = by_rank(tmp_path / "together" / "iter_0000003")["mp_rank_00"]["optimizer"]["optimizer"]["param_groups"]
    kinds = [[(g["wd_mult"], g["is_expert_parallel"], g["step"]) for g in part["optimizer"]["param_groups"]] for part in apart]
    assert kinds == [[(1.0, False, 3), (0.0, False, 3)], [(1.0, True, 3)]]
    assert [(g["wd_mult"], g["is_expert_parallel"], g["lr"], g["betas"]) for g in together] == [
        (1.0, False, 0.01, (0.9, 0.999)),
        (0.0, False, 0.01, (0.9, 0.999)),
    ]
    buffers = by_rank(tmp_path / "apart" / "iter_0000003", "distrib_optim.pt")
    assert [part is not None for part in buffers["mp_rank_00_001"]] == [False, True] and None not in buffers["mp_rank_00_000"]


def test_optimizer_of_experts_that_are_one_parameter(megatron_files: Path, tmp_path: Path) -> None:
    """GroupedMLP has its weights transposed, so in the buffers too."""
    convert(
        megatron_files / "moe_singleton" / "legacy", tmp_path / "m", tensor=2, arguments={"moe_grouped_gemm": True, "padded_vocab_size": 48}
    )
    states = read_all(megatron_files / "moe_singleton" / "legacy")
    assert_same(read_all(tmp_path / "m"), states)
    (_, first), (_, buffer) = sorted(by_rank(tmp_path / "m" / "iter_0000003", "distrib_optim.pt").items())
    state = by_rank(tmp_path / "m" / "iter_0000003")["mp_rank_01"]["model"]
    name = "decoder.layers.3.mlp.experts.weight2"  # before the final norm and the output layer, in reverse
    at = -(-24 // 64) * 64 + 24 * 24
    joined = torch.stack([torch.from_numpy(states[f"optimizer.state.{EXPERT.format(i)}.master"].view(np.float32)) for i in range(4)])
    expected = joined[:, :, 6:].transpose(1, 2).reshape(state[name].shape)
    (values,) = buffer[0].values()
    assert torch.equal(values["param"][at : at + expected.numel()].reshape(expected.shape), expected)
    assert first[0].keys() == buffer[0].keys()


def test_owners_of_buffers_where_experts_are_not_cut(megatron_files: Path, tmp_path: Path) -> None:
    """TP 2, EP 2, ETP 1: rank 0 has (0, 0) and rank 1 has (1, 1), and both come first among those with the same parameters."""
    convert(megatron_files / "tp2ep2" / "legacy", tmp_path / "m", tensor=2, expert=2, arguments={"expert_tensor_parallel_size": 1})
    buffers = by_rank(tmp_path / "m" / "iter_0000003", "distrib_optim.pt")
    assert sorted(buffers) == ["mp_rank_00_000", "mp_rank_01_001"] and None not in [b for pair in buffers.values() for b in pair]
    convert(tmp_path / "m", tmp_path / "back", tensor=2, expert=2, arguments={"padded_vocab_size": 48})
    assert_same(read_all(tmp_path / "back"), read_all(megatron_files / "tp2ep2" / "legacy"))


def test_the_embedding_that_two_stages_share_has_a_bucket_of_its_own(megatron_files: Path, tmp_path: Path) -> None:
    """So no gap follows it, whatever its size: 43 rows of 24 are no multiple of 64."""
    source = megatron_files / "pp2tied" / "legacy"
    convert(source, tmp_path / "m", pipeline=2, arguments={"padded_vocab_size": 43})
    buffers = by_rank(tmp_path / "m" / "iter_0000003", "distrib_optim.pt")["mp_rank_00_001"][0]
    (buffer,) = buffers.values()
    states = read_all(source)
    for key, ours in (("param", "master"), ("exp_avg", "exp_avg")):
        table, norm = (states[f"optimizer.state.model.{n}.weight.{ours}"] for n in ("embedding.word_embeddings", "decoder.final_layernorm"))
        assert np.array_equal(bits(buffer[key])[: 43 * 24], table[:43].reshape(-1))
        assert np.array_equal(bits(buffer[key])[43 * 24 : 44 * 24], norm)
    assert buffer["numel_unpadded"] == len(buffer["param"])


def test_the_optimizer_can_stay(megatron_files: Path, tmp_path: Path) -> None:
    report = convert(megatron_files / "dp2" / "legacy", tmp_path / "m", optimizer=False)
    assert report.left_out and all(n.startswith("optimizer.state.") for n in report.left_out)
    (state,) = by_rank(tmp_path / "m" / "iter_0000003").values()
    assert "optimizer" not in state and not list(tmp_path.rglob("distrib_optim.pt"))


def test_other_parts_of_the_state_are_told(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "s"), {"net": model(1, tied=False), "ema": {"w": torch.ones(3)}, "loss": 2.5})
    report = convert(tmp_path / "s", tmp_path / "m", root="net", arguments={"num_attention_heads": 2})
    assert report.left_out == ("ema.w",) and report.tensors == 5


def test_processes_divide_the_ranks(tmp_path: Path) -> None:
    reports = [convert(HF / "llama", tmp_path / "m", "llama", tensor=2, pipeline=2, part=(i, 2)) for i in range(2)]
    assert [r.written_files for r in reports] == [2, 2] and [r.finished for r in reports] == [False, True]
    assert len(by_rank(tmp_path / "m" / "release")) == 4
    looked = convert(HF / "llama", tmp_path / "other", "llama", tensor=2, pipeline=2, dry_run=True)
    assert looked.files == reports[0].files and not (tmp_path / "other").exists()


def test_stopped_and_gone_on_with(megatron_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, left = ConversionJournal.done, [3]

    def stops(self: ConversionJournal, number: int) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        done(self, number)

    source, made, rows = megatron_files / "tp2pp2vpp2" / "legacy", tmp_path / "m", {"padded_vocab_size": 48}
    monkeypatch.setattr(ConversionJournal, "done", stops)
    with pytest.raises(KeyboardInterrupt):
        convert(source, made, pipeline=4, arguments=rows)
    monkeypatch.setattr(ConversionJournal, "done", done)
    with pytest.raises(NotCommittedError):
        ckpt.open(str(made))
    assert not (made / "latest_checkpointed_iteration.txt").exists()
    with pytest.raises(ConflictError):
        convert(source, made, pipeline=2)
    assert convert(source, made, pipeline=4, arguments=rows).written_files == 5
    assert_same(read_all(made), read_all(source))
    assert sorted(p.name for p in made.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_coded_source_and_storage_that_is_no_file_system(megatron_files: Path, tmp_path: Path) -> None:
    """Chunks that are compressed, gaps between parameters of buffers, and a file that has to be written without holes."""
    source = megatron_files / "pp2tied" / "legacy"
    weights = {n: ckpt.open(str(source))[n].read() for n in read_all(source) if n.startswith("model.")}
    ckpt.save(str(tmp_path / "coded"), {"model": {n.removeprefix("model."): t for n, t in weights.items()}}, codec="zstd")
    arguments = {"num_attention_heads": 4, "padded_vocab_size": 48, "transformer_impl": "local"}
    convert(tmp_path / "coded", "inprocess://megatron/coded", tensor=2, arguments=arguments)
    convert(source, "inprocess://megatron/whole", tensor=2)
    for made in ("coded", "whole"):
        view = ckpt.open(f"inprocess://megatron/{made}")
        for name, tensor in weights.items():
            assert torch.equal(view[name].read(), tensor), name
        assert view["model.embedding.word_embeddings.weight"].shape == (42, 24)


def test_what_cannot_be(tmp_path: Path, megatron_files: Path) -> None:
    heads = {"num_attention_heads": 2}
    held = model()
    sources = {
        "plain": held,
        "odd": {**held, "decoder.layers.1.mixer.in_proj.weight": torch.ones(2, 2)},
        "hole": {k: v for k, v in held.items() if ".2." not in k},
    }
    for name, state in sources.items():
        ckpt.save(str(tmp_path / name), {"model": state})
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("plain", {"tensor": 2}, "how many attention heads"),
        ("plain", {"tensor": 4, "arguments": heads}, "2 attention heads cannot be divided among 4"),
        (
            "plain",
            {"tensor": 4, "arguments": {"num_attention_heads": 12, "num_query_groups": 6}},
            "6 query groups cannot be divided among 4",
        ),
        ("plain", {"tensor": 5, "arguments": {"num_attention_heads": 5}}, "linear_fc1.weight.* cannot be divided among 5"),
        ("plain", {"tensor": 4, "arguments": {"num_attention_heads": 4}}, "linear_fc1.weight.* cannot be divided among 4"),  # gate and up
        ("plain", {"pipeline": 3, "arguments": heads}, "4 layers cannot be divided among 3"),
        ("plain", {"expert": 2, "arguments": heads}, "0 experts cannot be divided"),
        ("plain", {"arguments": {**heads, "vocab_size": 11}}, "a vocabulary of 11"),
        ("plain", {"tensor": 2, "arguments": {**heads, "padded_vocab_size": 11}}, "padded to 11 rows on 2"),
        ("plain", {"tensor": 2, "arguments": {**heads, "expert_tensor_parallel_size": 4}}, "experts on 4"),
        ("plain", {"arguments": heads, "shard_size": 100}, "file for each rank"),
        ("plain", {"arguments": heads, "root": "net"}, "below 'net'"),
        ("odd", {"arguments": heads}, re.escape("'model.decoder.layers.1.mixer.in_proj.weight'")),
        ("hole", {"arguments": heads}, "layer 2 is missing"),
    ]
    for name, options, match in cases:
        with pytest.raises(UsageError, match=match):
            convert(tmp_path / name, tmp_path / "m", **options)
    with pytest.raises(UsageError, match="'model.embed_tokens.weight'"):
        convert(HF / "llama", tmp_path / "m")
    with pytest.raises(UsageError, match="output layer is missing"):
        convert(megatron_files / "dp2" / "legacy", tmp_path / "m", exclude=["model.output_layer.*"])
    with pytest.raises(CkptError, match="experts"):
        convert(megatron_files / "tp2ep2" / "legacy", tmp_path / "m", expert=3)
    with pytest.raises(UsageError, match="does not depend on ranks"):
        ckpt.convert(str(tmp_path / "plain"), str(tmp_path / "m"), to="dcp", parallel=MegatronParallel(tensor=2))
    for wrong in ({"virtual": 2}, {"tensor": 0}, {"arguments": {"tensor_model_parallel_size": 2}}):
        with pytest.raises(UsageError):
            MegatronParallel(**wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()
