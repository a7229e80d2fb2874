"""TRL's trainers with ``use(trainer, root)``: SFT, also with an adapter of PEFT, on a base of 4 bits, and with 8-bit moments; DPO. The
trainer has the loop."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from ckpt.integrations.transformers import use

from .lives import SAVED, Job, digests

WORDS = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(29))])}
SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


class StopError(Exception):
    """The job ends in the middle of a step's work."""


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.at:
            raise StopError


class Trained(Job):
    """``train`` runs the trainer up to a step, from its newest checkpoint if it has one."""

    def __init__(
        self, seed: int, trainer: type, config: type, columns: dict[str, Any], adapter: bool, *, bits: int = 32, **settings: Any
    ) -> None:
        self.make = (trainer, config, columns, adapter, settings)
        self.bits = bits
        self.seed, self.root, self.trainer = seed, None, None

    def train(self, begin: int, end: int) -> None:
        """Saving needs the root, so it is done again in :meth:`save`."""
        if self.root is None:
            self._run(f"{tempfile.mkdtemp()}/run", end)

    def _run(self, root: str, end: int) -> None:
        trainer, config, columns, adapter, settings = self.make
        tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
        torch.manual_seed(0 if adapter else self.seed)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1))
        if self.bits == 4:
            with tempfile.TemporaryDirectory() as base:
                model.save_pretrained(base)
                quantised = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)}
                model = AutoModelForCausalLM.from_pretrained(base, device_map={"": "cpu"}, dtype=torch.float32, **quantised)
        torch.manual_seed(self.seed)
        arguments = config(
            output_dir=root, max_steps=4, save_steps=SAVED, per_device_train_batch_size=2, use_cpu=True, report_to="none", **settings
        )
        lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1) if adapter else None
        rows = Dataset.from_dict(columns)
        self.trainer = trainer(model=model, args=arguments, train_dataset=rows, processing_class=fast, peft_config=lora)
        use(self.trainer, root, **({"trainable": True} if adapter else {}))
        self.trainer.add_callback(Stop(end))
        with contextlib.suppress(StopError):
            self.trainer.train()
            if adapter:  # what PEFT loads lies beside the checkpoint
                beside, trained = (
                    load_file(f"{root}/step-00000004/adapter_model.safetensors"),
                    get_peft_model_state_dict(self.trainer.model),
                )
                assert beside.keys() == trained.keys() and all(torch.equal(beside[name], trained[name]) for name in beside)

    def save(self, url: str) -> None:
        self._run(url, SAVED + 1)

    def load(self, url: str) -> None:
        """Up to the step that was saved the trainer makes none: it restores, and begins the next."""
        self._run(url, SAVED)
        self.train = lambda begin, end: self._run(url, end)  # type: ignore[method-assign]

    def digests(self) -> dict[str, str]:
        assert self.trainer is not None
        losses = [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]
        return digests({"model": self.trainer.model, "optimizer": self.trainer.optimizer}) | {"losses": repr(losses)}


def sentence(number: int) -> str:
    return " ".join(f"w{(number * 7 + k * k) % 29}" for k in range(8))


TEXTS = {"text": [sentence(n) for n in range(32)]}
PAIRS = {
    "prompt": [sentence(n) for n in range(32)],
    "chosen": [sentence(n + 40) for n in range(32)],
    "rejected": [sentence(n + 80) for n in range(32)],
}


def sft(*, adapter: bool = False, bits: int = 32, **settings: Any) -> Callable[[int], Job]:
    settings = {"max_length": 16, "logging_steps": 1, "bf16": False, "learning_rate": 1e-2, **settings}
    return lambda seed: Trained(seed, SFTTrainer, SFTConfig, TEXTS, adapter, bits=bits, **settings)


def dpo(seed: int) -> Job:
    settings = {"max_length": 32, "logging_steps": 1, "bf16": False, "learning_rate": 1e-2}
    return Trained(seed, DPOTrainer, DPOConfig, PAIRS, True, **settings)


CASES = {
    "sft": sft(),
    "sft-accumulated": sft(gradient_accumulation_steps=2, gradient_checkpointing=False),
    "sft-adapter-trainable": sft(adapter=True),
    "sft-4bit-base-trainable": sft(adapter=True, bits=4),
    "sft-8bit-moments": sft(optim="adamw_bnb_8bit"),
    "dpo-adapter-trainable": dpo,
}
