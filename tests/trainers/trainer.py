"""The Trainer of transformers on several ranks, with DDP and with FSDP2, which accelerate would leave out on CPUs. A mixture of experts
lies beside its checkpoints as ``from_pretrained`` loads it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckpt.integrations.transformers import use

from .lives import SAVED, Job, digests


def sharded(layer: str) -> dict[str, Any]:
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": [layer]}
    return {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, **wrap}}


_numbers = itertools.count()
_made = AcceleratorState.__init__


def made_with_fsdp(self: AcceleratorState, *given: Any, **named: Any) -> None:
    _made(self, *given, **named)
    if named.get("fsdp_plugin") is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, named["fsdp_plugin"]


AcceleratorState.__init__ = made_with_fsdp


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

    def __init__(self, seed: int, make: Callable[[], PreTrainedModel], **settings: Any) -> None:
        self.seed, self.make, self.settings = seed, make, settings
        self.root = os.path.abspath(f"alone-{os.environ['MASTER_PORT']}-{next(_numbers)}")  # one of this life, the same on all ranks
        self.saved: str | None = None

    def train(self, begin: int, end: int) -> None:
        """Saving needs the root, so it is done again in :meth:`save`."""
        self.run(self.root, end)

    def run(self, root: str, end: int) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        rows = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(self.seed)
        model = self.make()
        common = {"max_steps": 4, "save_steps": SAVED, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
        arguments = TrainingArguments(output_dir=root, use_cpu=True, report_to="none", **common, **self.settings)
        self.trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        mixture = isinstance(model, MixtralForCausalLM)
        use(self.trainer, root, weights=mixture)
        self.trainer.add_callback(Stop(end))
        with contextlib.suppress(StopError):
            self.trainer.train(resume_from_checkpoint=self.saved)
            if mixture:
                trained = digests({"model": self.trainer.model})  # of whole tensors, on all ranks
                loaded, about = AutoModelForCausalLM.from_pretrained(f"{root}/step-00000004", output_loading_info=True)
                assert digests({"model": loaded}) == trained and not any(about.values()), about
        assert all(isinstance(p, DTensor) is bool(self.settings) for p in self.trainer.model.parameters())

    def save(self, url: str) -> None:
        self.run(url, SAVED + 1)

    def load(self, url: str) -> None:
        """Up to the step that was saved the trainer makes none: it restores, and begins the next."""
        self.root, self.saved = url, f"{url}/step-{SAVED:08d}"
        self.run(url, SAVED)

    def digests(self) -> dict[str, str]:
        return digests({"model": self.trainer.model, "optimizer": getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)})


def dense() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def experts() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads))


def job(make: Callable[[], PreTrainedModel], **settings: Any) -> Callable[[int], Job]:
    return lambda seed: Trained(seed, make, **settings)


CASES = {"ddp": job(dense), "fsdp2": job(dense, **sharded("GPT2Block")), "fsdp2-experts": job(experts, **sharded("MixtralDecoderLayer"))}
