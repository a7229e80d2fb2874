"""Adapters of PEFT on a small Llama, alone and with the base, which is the same for every seed, as a pretrained one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from .lives import Job

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def job(options: dict[str, Any], **adapter: Any) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        torch.manual_seed(0)
        base = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, **adapter))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

        def step(number: int) -> None:
            tokens = torch.arange(number, number + 16).remainder(64).reshape(2, 8)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return Job({"model": model, "optimizer": optimizer}, step, **options)

    return made


CASES = {
    "whole": job({}),
    "trainable": job({"trainable": True}),
    "dora-trainable": job({"trainable": True}, use_dora=True, modules_to_save=["lm_head"]),
}
