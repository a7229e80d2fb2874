"""A Llama of torchtitan in FSDP2 with its containers and its adapter, and ckpt's manager, made from a configuration and called as the
trainer does it: in the background, at once, as Hugging Face files, and from the files of torchtitan's own manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components import checkpoint
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import ckpt
from ckpt.integrations.torchtitan import CheckpointManager

from .lives import END, SAVED, Job, digests


class TrainState:
    """The trainer's own state, and its data loader's, which has a position for each rank."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Loader(TrainState):
    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": self.step + 100 * dist.get_rank(), "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state.get(f"dp_rank_{dist.get_rank()}", 0) - 100 * dist.get_rank()


class Run(Job):
    """``own``: torchtitan's own manager saves. ``named``: with the names of ckpt 0.1.0. ``hf``: the last step is one of Hugging Face files,
    which the next job begins with."""

    def __init__(self, seed: int, *, own: bool = False, named: bool = False, hf: bool = False, **options: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.spec = model_registry("debugmodel")
        del self.spec.model.layers[2:]
        for config in self.spec.model.layers:  # the others need a GPU
            config.attention.inner_attention = ScaledDotProductAttention.Config()
        torch.manual_seed(seed)
        self.model = self.spec.model.build()
        self.model.init_weights(buffer_device=None)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.adapter = self.spec.state_dict_adapter(self.spec.model, None)
        self.begin()
        self.counter, self.loader = TrainState(), Loader()
        self.own, self.named, self.hf, self.options = own, named, hf, options
        state = {"model": self.model, "lr": self.schedulers, "state": self.counter, "loader": self.loader}
        super().__init__(state if not hf else {"model": self.model}, self.one)

    def begin(self) -> None:
        """Make an optimizer that has no state yet, and its schedule."""
        self.optimizers = default_adamw(lr=1e-2).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=self.optimizers, training_steps=END)

    def manager(self, url: str, kind: Any = CheckpointManager, **more: Any) -> Any:
        options = {"last_save_model_only": False, **self.options, **more}
        config = kind.Config(enable=True, folder="steps", interval=1, keep_latest_k=2, **options)
        return config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            sd_adapter=self.adapter,
            base_folder=url,
        )

    def one(self, number: int) -> None:
        if self.hf and number == SAVED:  # the files have weights alone
            self.begin()
        tokens = torch.arange(number, number + 16).reshape(1, 16)  # the same on every rank, so on every number of ranks
        self.model(tokens).float().square().mean().backward()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.counter.step, self.loader.step = number, 3 * number

    def digests(self) -> dict[str, str]:
        moments = {} if self.hf else digests(self.optimizers.state_dict())
        loader = {} if self.hf else {"position": str(self.loader.step if dist.get_rank() < 2 else 3 * self.counter.step)}
        state = {name: value for name, value in self.state.items() if name != "loader"}
        return digests(state) | {f"optimizer{name}": digest for name, digest in moments.items()} | loader

    def save(self, url: str) -> None:
        if self.hf:
            manager = self.manager(url, last_save_in_hf=True, last_save_model_only=True)
            assert manager.save(SAVED, last_step=True)
            manager.close()
            lacking = {"to_hf": lambda _, state: {k: v for k, v in state.items() if k != "norm.weight"}, "from_hf": lambda _, state: state}
            with (
                mock.patch.multiple(type(self.adapter), **lacking),
                pytest.raises(ckpt.errors.NamesError, match=r"nothing for norm\.weight"),
            ):
                self.manager(url, last_save_in_hf=True, last_save_model_only=True)
            names = {name for file in Path(url, "steps", "hf").glob("*.safetensors") for name in load_file(file)}
            assert "model.layers.0.self_attn.q_proj.weight" in names
            return
        manager = self.manager(url, checkpoint.CheckpointManager if self.own else CheckpointManager)
        if self.named:
            optimizer = {"optimizer": self.optimizers.state_dict()}
            others = {"lr_scheduler": self.schedulers, "dataloader": self.loader, "train_state": self.counter}
            ckpt.save(f"{url}/steps/step-{SAVED:08}", {"model": self.model.state_dict(), **optimizer, **others})
            return
        for step in (SAVED - 2, SAVED - 1, SAVED):
            assert manager.save(step, last_step=step == SAVED)
            manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
        manager.close()
        dist.barrier()
        if not self.own:
            assert [s.number for s in ckpt.list_steps(f"{url}/steps")] == [SAVED - 1, SAVED]
            with pytest.raises(ckpt.errors.NotFoundError):
                self.manager(url).load(step=SAVED + 1)
            self.exports(url)

    def exports(self, url: str) -> None:
        """A model of 16 bits begins a job of 32, as torchtitan's own does."""
        manager = self.manager(f"{url}/model", last_save_model_only=True, export_dtype="bfloat16")
        assert manager.save(SAVED, last_step=True)
        manager.close()
        rounded = digests({name: value.bfloat16().float() for name, value in self.model.state_dict().items()})
        manager = self.manager(f"{url}/next", initial_load_path=f"{url}/model/steps/step-{SAVED:08}")
        assert manager.load() and digests(self.model.state_dict()) == rounded
        manager.close()

    def load(self, url: str) -> None:
        if self.hf:
            more = {"initial_load_in_hf": True, "initial_load_path": f"{url}/steps/hf"}
        elif self.own:
            more = {"initial_load_path": f"{url}/steps/step-{SAVED}", "initial_load_model_only": False}
        else:
            more = {}
        manager = self.manager(f"{url}/next" if more else url, **more)
        assert manager.load(step=-1)
        manager.close()
        if more:
            assert not Path(url, "next", "steps").exists()
        if self.own:  # and in the folder that torchtitan saved to
            manager = self.manager(url)
            assert manager.load()
            manager.close()


def job(**options: Any) -> Callable[[int], Job]:
    return lambda seed: Run(seed, **options)


CASES = {
    "in-the-background": job(async_mode="async_with_pinned_mem"),
    "at-once": job(async_mode="disabled"),
    "files-of-torchtitan": job(own=True, async_mode="disabled"),
    "names-of-0.1.0": job(named=True),
    "hugging-face": job(hf=True, export_dtype="float32"),
}
