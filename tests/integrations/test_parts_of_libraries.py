"""Parts of a state that other libraries make: adapters of PEFT, optimizers with 8-bit states of bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.cli.main import cli
from tests.formats import oracle

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of the libraries among themselves


def adapted(seed: int) -> torch.nn.Module:
    """A small Llama with an adapter of PEFT. The base is the same for every seed, as a pretrained one is."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    torch.manual_seed(seed)
    model: torch.nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.arange(step, step + 16).remainder(64).reshape(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_part(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters() if p.requires_grad}


def test_an_adapter_of_peft_is_saved_alone_and_training_goes_on_from_it(tmp_path: Path) -> None:
    model = adapted(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in (1, 2):
        train(model, optimizer, step)
    report = ckpt.save(tmp_path / "part", {"model": model, "optimizer": optimizer}, trainable=True)
    part = trained_part(model)
    nbytes = sum(map(len, part.values()))
    assert nbytes <= report.tensor_bytes <= 3 * nbytes + 4 * len(part)  # the adapter, its two moments, and a number of steps each
    stored = oracle.read(tmp_path / "part")
    assert {name.removeprefix("model."): stored[name][2] for name in stored if name.startswith("model.")} == part

    again = adapted(2)
    assert trained_part(again) != part
    resumed = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    ckpt.load(tmp_path / "part", {"model": again, "optimizer": resumed}, trainable=True)
    assert trained_part(again) == part
    train(model, optimizer, 3)
    train(again, resumed, 3)
    assert trained_part(again) == trained_part(model)


@pytest.mark.parametrize("trainable", [True, False])
def test_the_adapter_in_a_checkpoint_is_merged_as_peft_merges_it(tmp_path: Path, trainable: bool) -> None:
    model: Any = adapted(1)
    model.get_base_model().config.save_pretrained(tmp_path / "base")
    base = {n.replace(".base_layer.", "."): p.clone() for n, p in model.get_base_model().state_dict().items() if "lora_" not in n}
    save_file(base, tmp_path / "base" / "model.safetensors")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in (1, 2):
        train(model, optimizer, step)
    state = {"model": model, "optimizer": optimizer, "ema": {"copy": torch.ones(2)}}
    ckpt.save(tmp_path / "part", state, trainable=trainable)
    model.peft_config["default"].save_pretrained(tmp_path / "settings")
    words = ["lora", "merge", *(str(tmp_path / name) for name in ("base", "part", "out")), "--no-config"]
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code == 10 and "for a checkpoint of a model of PEFT add --adapter-config DIR" in refused.output
    words += ["--adapter-config", str(tmp_path / "settings" / "adapter_config.json")]
    assert "several parts of the state have tensors: model, ema" in CliRunner().invoke(cli, words).output
    done = CliRunner().invoke(cli, [*words, "--root", "model"])  # a key of the part, and only the beginning of the base's names
    assert done.exit_code == 0, done.output
    got, expected = load_file(tmp_path / "out" / "model.safetensors"), model.merge_and_unload().state_dict()
    assert got.keys() == expected.keys() and not torch.equal(got[name := next(n for n in got if "q_proj" in n)], base[name])
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)
    words[3] = words[2]  # the base itself has no adapter
    assert "no tensor is LoRA's in a model of PEFT" in CliRunner().invoke(cli, words).output


def test_a_whole_model_with_an_adapter_is_written_once(tmp_path: Path) -> None:
    model = adapted(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(tmp_path / "step-1", state, reuse=True)
    train(model, optimizer, 2)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert ckpt.save(tmp_path / "step-2", state, reuse=tmp_path / "step-1").reused_bytes >= frozen
    stored = oracle.read(tmp_path / "step-2")
    assert all(stored[f"model.{name}"][2] == p.detach().numpy().tobytes() for name, p in model.named_parameters())


def eight_bit(parameters: Any) -> torch.optim.Optimizer:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-3, min_8bit_size=1024)
    return optimizer


def job(make: Callable[[Any], torch.optim.Optimizer], seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(128, 64)
    return model, make(model.parameters())


def step_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(8, 128)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_with_8_bit_states_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = job(eight_bit, 1)
    for seed in (1, 2):
        step_on(model, optimizer, seed)
    report = ckpt.save(tmp_path / "step-1", {"model": model, "optimizer": optimizer})
    assert report.tensor_bytes < 2 * sum(p.nbytes for p in model.parameters())  # with AdamW's own states it would be three times
    again, resumed = job(eight_bit, 2)
    ckpt.load(tmp_path / "step-1", {"model": again, "optimizer": resumed})
    for seed in (3, 4):
        step_on(model, optimizer, seed)
        step_on(again, resumed, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def quantised(kind: str) -> torch.nn.Module:
    layer = torch.nn.Linear(64, 64)
    if kind == "int8":
        quantization = pytest.importorskip("torchao.quantization")
        layers = torch.nn.Sequential(layer)
        quantization.quantize_(layers, quantization.Int8WeightOnlyConfig())
        layer = layers[0]
    else:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        made = bitsandbytes.nn.Linear4bit(64, 64) if kind == "4 bit" else bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        made.load_state_dict(layer.state_dict())
        layer = made.to("cpu")
        layer(torch.zeros(1, 64))
    return layer.requires_grad_(False)


@pytest.mark.parametrize("kind", ["int8", "4 bit", "8 bit"])
def test_an_adapter_on_a_quantised_base_is_loaded_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    jobs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict({"base": quantised(kind), "lora": torch.nn.Linear(64, 4)})
        optimizer = torch.optim.AdamW(model["lora"].parameters())
        model["lora"](torch.randn(8, 64)).sum().backward()
        optimizer.step()
        jobs.append({"model": model, "optimizer": optimizer})
    ckpt.save(tmp_path / "step-1", jobs[0], trainable=True)
    report = ckpt.load(tmp_path / "step-1", jobs[1], trainable=True)
    assert report.missing == report.unexpected == () and not any("base" in name for name in ckpt.open(tmp_path / "step-1"))
    assert torch.equal(jobs[0]["model"]["lora"].weight, jobs[1]["model"]["lora"].weight)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_a_load_that_accelerate_would_undo_is_refused(offload: str, tmp_path: Path) -> None:
    """Offloaded weights come back before each forward pass, whatever was loaded. Without the hooks the same module takes all."""
    accelerate = pytest.importorskip("accelerate")
    hooks = pytest.importorskip("accelerate.hooks")
    tokens = torch.arange(8).reshape(1, 8)
    source, model = adapted(1).requires_grad_(False), adapted(2)
    ckpt.save(tmp_path / "a", {"m": source})
    arguments = [tmp_path / "off"] if offload == "disk_offload" else []
    getattr(accelerate, offload)(model, *arguments, execution_device="cpu")
    before = model(input_ids=tokens).logits
    for options in ({}, {"trainable": True}, {"only": "*lora*"}):
        with pytest.raises(ckpt.errors.StateError, match=r"(?s)accelerate offloads the module.*remove_hook_from_submodules"):
            ckpt.load(tmp_path / "a", {"m": model}, strict=False, **options)
    assert torch.equal(model(input_ids=tokens).logits, before)
    hooks.remove_hook_from_submodules(model)
    ckpt.load(tmp_path / "a", {"m": model})
    assert torch.equal(model(input_ids=tokens).logits, source(input_ids=tokens).logits)
