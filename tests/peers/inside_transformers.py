"""Loaded by transformers' own checkpoint tests: every Trainer that trains is given to ``use``, with its ``output_dir`` as the root.

What the tests look up in a checkpoint directory is asked of ckpt. ``PEERS_MODE=off`` changes nothing.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerState

import ckpt
from ckpt.engine.verify import verify
from ckpt.integrations.transformers import use


def check_saved(output_dir: str, freq: int, total: int, *args: Any, **kwargs: Any) -> None:
    """In place of ``check_saved_checkpoints``, which lists files: each step is there, and every byte of it is right."""
    there = {step.number: step for step in ckpt.list_steps(str(output_dir))}
    for number in range(freq, total, freq):
        assert verify(there[number].url).ok
        saved = ckpt.open(there[number].url).state()
        assert {"model", "optimizer", "scheduler", "rng", "trainer"} <= saved.keys()


def trainer_state(url: str) -> TrainerState:
    """In place of ``TrainerState.load_from_json`` of a file in the checkpoint."""
    return TrainerState(**json.loads(ckpt.open(url).state()["trainer"]))


def last_step(output_dir: str) -> str:
    """In place of ``get_last_checkpoint``."""
    return str(ckpt.list_steps(str(output_dir))[-1].url)


def weights(path: str) -> dict[str, torch.Tensor]:
    """In place of ``load_file`` of a checkpoint's ``model.safetensors``."""
    view = ckpt.open(os.path.dirname(path))
    return {name.removeprefix("model."): view[name].read() for name in view if name.startswith("model.")}


def check_best(output_dir: str, freq: int, total: int, trainer: Any, metric: str, **options: bool) -> None:
    """In place of ``check_best_model_has_been_loaded``: the model is that of the step whose logged metric is the best."""
    there = {step.number: step for step in ckpt.list_steps(str(output_dir))}
    logged = {entry["step"]: entry[metric] for entry in trainer_state(there[total].url).log_history if metric in entry}
    best = (max if options.get("greater_is_better") else min)(logged, key=logged.__getitem__)
    saved = weights(os.path.join(there[best].url, "model.safetensors"))
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert trainer.evaluate()[metric] == logged[best]


def tokenizer() -> Any:
    """In place of one of the hub."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["<unk>", "</s>", "a", "b"])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")


def llama() -> Any:
    """In place of one of the hub."""
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def texts(words: Any) -> list[dict[str, Any]]:
    """In place of a file of text, by token."""
    rows = [words("a b " * (1 + number % 3))["input_ids"] for number in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


def replace() -> None:
    own = Trainer.train

    @functools.wraps(own)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "_peers"):
            return own(self, *args, **kwargs)
        self._peers = use(self, str(self.args.output_dir))
        return self.train(*args, **kwargs)

    Trainer.train = train


if os.environ.get("PEERS_MODE") != "off" and not hasattr(Trainer, "_peers_replaced"):
    Trainer._peers_replaced = True
    replace()
