"""Numbers that a Megatron checkpoint's own arguments tell, and padding. tests/matrix has its tensors under other names, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt
from ckpt import convert
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import numbers_of_files, translated_views
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import STATE


def test_arguments_tell_numbers(megatron_files):
    for form in ("legacy", "dp_reshardable"):
        numbers = numbers_of_files(str(megatron_files / "dp2" / form))
        assert (numbers["heads"], numbers["query_groups"], numbers["head_size"]) == (4, 2, 6)
        assert (numbers["vocabulary"], numbers["padded_vocabulary"], numbers["layers"]) == (42, 48, 4)


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
