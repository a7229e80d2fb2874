"""vLLM on two ranks, on CPUs: the models that it builds are filled from a training checkpoint, and compared with its own loader's.

Its release is built for GPUs. Here it needs no kernel: nothing is generated, only models are built and filled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model_loader

import ckpt
from ckpt.integrations.vllm import register

from .lives import Job, digests, world

torch.accelerator.empty_cache = lambda: None  # raises without an accelerator
base_loader.process_weights_after_loading = lambda *_: None  # packs experts for CPUs by a kernel that this release has not
COMMON = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"vocab_size": 260, "max_position_embeddings": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **COMMON},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True, **COMMON},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **COMMON, **EXPERTS},
}


def built(folder: Path, load: LoadConfig) -> Any:
    """The model of this rank, as a worker of vLLM builds it."""
    size = world()
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64)
    arguments.tensor_parallel_size, arguments.distributed_executor_backend = size, "external_launcher"
    config = arguments.create_engine_config()
    config.load_config = load
    with set_current_vllm_config(config):
        if not dist.is_initialized():
            init_distributed_environment(size, int(os.environ.get("RANK", "0")), "env://", 0, backend="gloo")
        destroy_model_parallel()
        initialize_model_parallel(size)  # for this model: only some have experts
        return get_model_loader(load).load_model(vllm_config=config, model_config=config.model_config)


class Served(Job):
    """A model that was trained, and what vLLM makes of it: without a checkpoint by its own loader, from the model hub's files."""

    def __init__(self, seed: int, model: str, kind: str) -> None:
        self.folder, self.kind = Path(f"{model}-{kind}-{seed}-{os.environ.get('RANK', '0')}").absolute(), kind
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(MODELS[model]))
        torch.manual_seed(seed)
        self.trained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder), dtype=torch.float32)
        self.served: Any = None

    def train(self, begin: int, end: int) -> None:
        """Not here."""

    def save(self, url: str) -> None:
        state = {"model": self.trained, "optimizer": torch.optim.AdamW(self.trained.parameters()), "step": 3}
        if self.kind == "native":
            ckpt.save(url, state)
        elif os.environ.get("RANK", "0") == "0":
            dcp.save({"model": self.trained.state_dict()}, checkpoint_id=url, no_dist=True)

    def load(self, url: str) -> None:
        register()
        options = {"url": url, "only": ["model.*", "lm_head.*"], "rename": {"model.*": "*"}}
        self.served = built(self.folder, LoadConfig(load_format="ckpt", model_loader_extra_config=options))

    def digests(self) -> dict[str, str]:
        if self.served is None:
            tensors = {name: tensor.clone().contiguous() for name, tensor in self.trained.state_dict().items()}
            save_file(tensors, self.folder / "model.safetensors")
            self.served = built(self.folder, LoadConfig(load_format="safetensors"))
        return digests(self.served.state_dict())


def case(model: str, kind: str) -> Callable[[int], Job]:
    return lambda seed: Served(seed, model, kind)


CASES = {f"{model}-{kind}": case(model, kind) for model in MODELS for kind in ("native", "dcp")}
