"""Megatron checkpoints under the names of transformers, and back, bit for bit; the numbers come from the checkpoint's own arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt
from ckpt import convert
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import numbers_of_files, translated_views
from ckpt.converters.mapping.translation import load_translation
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import STATE, Arrays, read_all
from tests.plan.test_views import read

HEAD, GROUPS, PER_GROUP = 6, 2, 2  # of tests/real/megatron_writer.py


def test_arguments_tell_numbers(megatron_files):
    for form in ("legacy", "dp_reshardable"):
        numbers = numbers_of_files(str(megatron_files / "dp2" / form))
        assert (numbers["heads"], numbers["query_groups"], numbers["head_size"]) == (4, 2, 6)
        assert (numbers["vocabulary"], numbers["padded_vocabulary"], numbers["layers"]) == (42, 48, 4)


def huggingface(arrays: Arrays, layer: int, head: str, tail: str = "") -> Arrays:
    """What of a layer has to be where (tools/checkpoint/saver_hf_*.py of Megatron-LM), by plain numpy."""
    at, to = f"{head}decoder.layers.{layer}.", f"{head}model.layers.{layer}."
    fused = arrays[f"{at}self_attention.linear_qkv.weight{tail}"].reshape(GROUPS, PER_GROUP + 2, HEAD, -1)
    hidden = fused.shape[-1]
    gate, up = np.split(arrays[f"{at}mlp.linear_fc1.weight{tail}"], 2)
    return {
        f"{to}self_attn.q_proj.weight{tail}": fused[:, :PER_GROUP].reshape(-1, hidden),
        f"{to}self_attn.k_proj.weight{tail}": fused[:, PER_GROUP].reshape(-1, hidden),
        f"{to}self_attn.v_proj.weight{tail}": fused[:, PER_GROUP + 1].reshape(-1, hidden),
        f"{to}mlp.gate_proj.weight{tail}": gate,
        f"{to}mlp.up_proj.weight{tail}": up,
        f"{to}mlp.down_proj.weight{tail}": arrays[f"{at}mlp.linear_fc2.weight{tail}"],
    }


@pytest.mark.parametrize("form", ["legacy", "dp_reshardable"])
def test_to_transformers(megatron_files, tmp_path, form):
    url = str(megatron_files / "tp2pp2vpp2" / form)
    arrays = read_all(url)
    import_checkpoint(url, str(tmp_path / "hf"), views=translated_views(url, "llama", "huggingface", {}))
    found = read_all(tmp_path / "hf")
    for layer in range(4):
        for head, tail in (("model.", ""), (STATE, ".exp_avg"), (STATE, ".master")):
            for name, expected in huggingface(arrays, layer, head, tail).items():
                assert np.array_equal(found[name], expected), name
    assert np.array_equal(found["model.lm_head.weight"], arrays["model.output_layer.weight"][:42])
    assert ckpt.open(str(tmp_path / "hf"))["model.model.norm.weight"].shape == (24,)


@pytest.mark.parametrize(("layout", "names"), [("tp2pp2vpp2", "llama"), ("tp2ep2", "mixtral"), ("moe_singleton", "mixtral")])
def test_there_and_back(megatron_files, layout, names):
    url = str(megatron_files / layout / "legacy")
    numbers, rules = numbers_of_files(url), load_translation(names)
    weights = {n.removeprefix("model."): a.astype(np.int64) for n, a in read_all(url).items() if n.startswith("model.")}
    there = {n: read(v, weights) for n, v in rules.views({n: a.shape for n, a in weights.items()}, "leftwards", numbers).items()}
    back = {n: read(v, there) for n, v in rules.views({n: a.shape for n, a in there.items()}, "rightwards", numbers).items()}
    assert sorted(back) == sorted(weights)
    for name, array in weights.items():
        rows = 42 if "word_embeddings" in name or "output_layer" in name else len(array)
        assert np.array_equal(back[name][:rows], array[:rows]), name
    assert any(".w3.weight" in n for n in there) == (names == "mixtral")


# --------------------------------------------------------------------------------------------------------------- padding

LLAMA = Path(__file__).parents[1] / "fixtures" / "hf" / "llama"


@pytest.mark.parametrize("way", ["import", "native"])
def test_a_vocabulary_is_padded_with_zeros(tmp_path, way):
    """Also where nothing is written: 250 rows become the 256 that a job on two tensor-parallel ranks has."""
    command = ["import"] if way == "import" else ["convert", "--to", "native"]
    options = ["--names", "llama", "--convention", "megatron", "--set", "padded_vocabulary=256"]
    found = CliRunner().invoke(cli, [*command, *options, str(LLAMA), str(tmp_path / "made")])
    assert found.exit_code == 0, found.output
    stored = {k: t for path in LLAMA.glob("*.safetensors") for k, t in load_file(path).items()}
    module = torch.nn.Module()
    module.output_layer = torch.nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
    ckpt.load(str(tmp_path / "made"), module.state_dict(), only="output_layer.weight")
    assert torch.equal(module.output_layer.weight[:250], stored["lm_head.weight"])
    assert not module.output_layer.weight[250:].any()
    entry = open_catalog(str(tmp_path / "made")).tensors["embedding.word_embeddings.weight"]
    assert (entry.shape, entry.logical) == ((256, 64), (250, 64))
    back = ckpt.open(str(tmp_path / "made"))["embedding.word_embeddings.weight"].read()
    assert torch.equal(back, stored["model.embed_tokens.weight"])
    other = torch.ones(384, 64, dtype=torch.bfloat16)  # what a job with more ranks pads to
    layout = ckpt.Layout({"tp": 1}, rules=[("*", ckpt.Padded(0, 250))])
    ckpt.load(str(tmp_path / "made"), {"output_layer.weight": other}, only="output_layer.weight", layout=layout)
    assert torch.equal(other[:250], stored["lm_head.weight"]) and not other[250:].any()


def test_a_load_pads_where_the_layout_says_so(tmp_path):
    """Nothing has to be asked for at the import."""
    import_checkpoint(str(LLAMA), str(tmp_path / "made"), views=translated_views(str(LLAMA), "llama", "megatron", {}))
    weight = torch.ones(256, 64, dtype=torch.bfloat16)
    layout = ckpt.Layout({"tp": 1}, rules=[("*", ckpt.Padded(0, 250))])
    ckpt.load(str(tmp_path / "made"), {"output_layer.weight": weight}, only="output_layer.weight", layout=layout)
    stored = {k: t for path in LLAMA.glob("*.safetensors") for k, t in load_file(path).items()}
    assert torch.equal(weight[:250], stored["lm_head.weight"]) and not weight[250:].any()


@pytest.mark.parametrize("way", ["import", "native"])
def test_padding_that_is_only_renamed_stays_padding(megatron_files, tmp_path, way):
    rules = 'left = "megatron"\nright = "mine"\nkeeps_others = true\n'
    (tmp_path / "mine.toml").write_text(rules + '[[term]]\nleft = "embedding.word_embeddings.weight"\nright = "emb"\n')
    url, made = str(megatron_files / "dp2" / "legacy"), str(tmp_path / "made")
    views = translated_views(url, str(tmp_path / "mine.toml"), "mine", {})
    if way == "import":
        import_checkpoint(url, made, views=views)
    else:
        convert(url, made, to="native", views=views)
    for name in ("model.emb", f"{STATE}emb.exp_avg", "model.output_layer.weight"):
        assert (open_catalog(made).tensors[name].shape, open_catalog(made).tensors[name].logical) == ((48, 24), (42, 24))


def test_a_converted_checkpoint_tells_numbers_too(megatron_files, tmp_path):
    url = str(megatron_files / "tp2ep2" / "legacy")
    convert(url, str(tmp_path / "native"), to="native")
    assert numbers_of_files(str(tmp_path / "native")) == numbers_of_files(url)
    assert numbers_of_files(url)["experts"] == 4
