"""Exports of Megatron checkpoints carry a ``config.json`` where all of its numbers are known, and say what is missing where not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.converters.mapping.convention import translated_views
from tests.formats.reading import FIXTURES

LLAMA = FIXTURES / "hf/llama"
COMPLETE = {"rotary_percent": 1.0, "use_rope_scaling": False}
"""What Megatron-LM's own script says of every job, and no configuration of transformers does."""


def megatron(root: Path, **arguments: Any) -> str:
    """The fixture as a checkpoint of a Megatron job with these arguments."""
    views = translated_views(str(LLAMA), "llama", "megatron", {})
    parallel = ckpt.MegatronParallel(arguments=arguments)
    ckpt.convert(str(LLAMA), str(root / "megatron"), to="megatron", views=views, parallel=parallel)
    return str(root / "megatron")


def export(source: str, root: Path) -> tuple[ckpt.ConvertReport, dict[str, Any] | None]:
    views = translated_views(source, "llama", "huggingface", {})
    report = ckpt.convert(source, str(root / "export"), to="hf", views=views)
    made = root / "export" / "config.json"
    return report, json.loads(made.read_text()) if made.exists() else None


def test_the_model_computes_what_it_computed(tmp_path: Path) -> None:
    """transformers → Megatron → transformers: the file that was never copied says the same, and the logits are the same bits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    report, config = export(megatron(tmp_path, **COMPLETE), tmp_path)
    assert report.notes == ("config.json: made of the source's arguments",)
    original = json.loads((LLAMA / "config.json").read_text())
    assert config is not None
    given = {"bos_token_id", "eos_token_id", "rope_theta", "torch_dtype"}  # tokens nobody knows; two words of older versions
    assert {k: v for k, v in config.items() if k not in given} == {k: original[k] for k in config.keys() - given}
    assert (config["rope_theta"], config["torch_dtype"], config["eos_token_id"]) == (10000.0, original["dtype"], None)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        one, two = (transformers.AutoModelForCausalLM.from_pretrained(p)(tokens).logits for p in (LLAMA, tmp_path / "export"))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "do not say rotary_percent"),
        ({**COMPLETE, "norm_epsilon": None}, "do not say norm_epsilon"),
        ({**COMPLETE, "use_rope_scaling": True}, "cannot express use_rope_scaling=True"),
        ({**COMPLETE, "rotary_percent": 0.5}, "cannot express rotary_percent=0.5"),
        ({**COMPLETE, "window_size": [127, 0]}, r"cannot express window_size=\[127, 0\]"),
    ],
)
def test_what_is_not_known_is_said_and_not_invented(arguments: dict[str, Any], reason: str, tmp_path: Path) -> None:
    report, config = export(megatron(tmp_path, **arguments), tmp_path)
    (note,) = report.notes
    assert config is None
    assert re.search(reason, note), note


def test_arguments_that_do_not_fit_the_tensors(tmp_path: Path) -> None:
    report, config = export(megatron(tmp_path, **COMPLETE, ffn_hidden_size=97), tmp_path)
    assert config is None and report.notes == ("config.json is not written: the source's arguments do not fit the shapes of the tensors",)


def test_names_of_megatron_get_no_configuration(tmp_path: Path) -> None:
    source = megatron(tmp_path, **COMPLETE)
    report = ckpt.convert(source, str(tmp_path / "export"), to="hf")
    assert report.notes == ("config.json is not written: the tensors are not those of LlamaForCausalLM",)


def test_a_given_configuration_and_one_beside_the_source_come_first(tmp_path: Path) -> None:
    source = megatron(tmp_path, **COMPLETE)
    views = translated_views(source, "llama", "huggingface", {})
    assert ckpt.convert(source, str(tmp_path / "given"), to="hf", views=views, config=str(LLAMA)).notes == ()
    assert ckpt.convert(str(LLAMA), str(tmp_path / "copied"), to="hf").notes == ()
    for made in ("given", "copied"):
        assert (tmp_path / made / "config.json").read_bytes() == (LLAMA / "config.json").read_bytes()
