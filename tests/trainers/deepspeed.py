"""DeepSpeed's engines of all stages on two ranks, then on one and three; loaded into another stage, and into plain modules and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import distributed as dist

import ckpt
from ckpt.integrations.deepspeed import use

from .failing import failing, raising
from .lives import Job, digest

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it compiles one for minutes
deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch computes it on CPUs
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def net() -> torch.nn.Module:
    """Sizes that no number of ranks divides, a parameter that is not trained, a tied one, and a buffer."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Linear(17, 8), torch.nn.Linear(8, 17), torch.nn.Linear(17, 8))
    model[2].weight = model[0].weight
    model[3].weight.requires_grad_(requires_grad=False)
    model.register_buffer("count", torch.tensor(3.0))
    return model


def optimizers(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:3], "weight_decay": 0.1}, {"params": trained[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Engine(Job):
    def __init__(self, stage: int, dtype: str, **zero: Any) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, **zero},
            "bf16": {"enabled": dtype == "bf16"},
            "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 4, "loss_scale_window": 1},
        }
        if not dist.is_initialized():
            deepspeed.init_distributed("gloo")
        self.engine = self.made(config)
        self.zero = stage > 0
        self.dtype, self.rank = DTYPES[dtype], dist.get_rank()
        super().__init__({"engine": self.engine}, self.one)

    def made(self, config: dict[str, Any]) -> Any:
        model = net()
        optimizer, scheduler = optimizers(model)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)[0]

    def one(self, number: int) -> None:
        self.engine.backward(self.engine((torch.randn(4, 8) + self.rank).to(self.dtype)).float().square().sum())
        self.engine.step()

    def moment(self, param: Any, key: str) -> torch.Tensor:
        """As a whole, by what DeepSpeed says of its fragments."""
        if hasattr(param, "ds_id"):
            return safe_get_full_optimizer_state(param, key)  # type: ignore[no-any-return]
        if not hasattr(param, "_hp_mapping"):  # without ZeRO
            return self.engine.optimizer.state[param][key]  # type: ignore[no-any-return]
        states, mapping = self.engine.optimizer.optimizer.state, param._hp_mapping
        whole = torch.zeros(param.numel())
        if mapping is not None:
            of, own = mapping.lp_fragment_address, mapping.hp_fragment_address
            (flat,) = (f for f in states if f.untyped_storage().data_ptr() == mapping.hp_fragment.untyped_storage().data_ptr())
            whole[of.start : of.start + of.numel] = states[flat][key][own.start : own.start + own.numel]
        dist.all_reduce(whole, group=param._dp_group)
        return whole.view(param.shape)

    def in_whole(self, name: str) -> str:
        """The name of a parameter in the model of all ranks."""
        return name

    def digests(self) -> dict[str, str]:
        """By DeepSpeed's own means: masters, moments, weights, counters."""
        engine, values = self.engine, dict[str, Any]()
        for local, param in engine.module.named_parameters():
            name = self.in_whole(local)
            if param.requires_grad:
                values[f"{name}.master"] = safe_get_full_fp32_param(param) if self.zero else param
                for key in ("exp_avg", "exp_avg_sq"):
                    values[f"{name}.{key}"] = self.moment(param, key)
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                values[name] = param.detach().clone()
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        values |= {"steps": engine.global_steps, "skipped": engine.skipped_steps, "lr": engine.get_lr()}
        values |= {
            "scale": getattr(scaler, "cur_scale", 1),
            "iteration": getattr(scaler, "cur_iter", 0),
            **dict(engine.module.named_buffers()),
        }
        return {name: digest(value) for name, value in values.items()}


class InBackground(Engine):
    def save(self, url: str) -> None:
        """The next step waits for the copy, and the save has what was there before."""
        handle = ckpt.save_async(url, self.state)
        torch.manual_seed(100)
        self.one(100)
        handle.result()


class Used(Engine):
    def save(self, url: str) -> None:
        use(self.engine, url)
        self.engine.save_checkpoint(client_state={"epoch": 7, "seen": torch.arange(3)})
        self.loads(tag="global_step2")  # waits for the save that goes on

    def load(self, url: str) -> None:
        use(self.engine, url)
        self.loads()

    def loads(self, **named: Any) -> None:
        loaded, client = self.engine.load_checkpoint(**named)
        assert loaded.endswith("global_step2") and (client["epoch"], client["seen"].tolist()) == (7, [0, 1, 2]), (loaded, client)


class Moved(Used):
    """In a directory of DeepSpeed's own checkpoints, and by a number as DeepSpeed takes it for a tag: what was saved last is loaded, or
    what is named."""

    def save(self, url: str) -> None:
        self.engine.save_checkpoint(url, 0.5, {"epoch": 0})
        super().save(url)
        self.loads(load_dir=f"{url}/")
        self.engine.global_steps += 1
        self.engine.save_checkpoint(client_state={"epoch": 9})
        assert self.engine.load_checkpoint() == (f"{url}/global_step3", {"epoch": 9})
        self.loads(tag="global_step2")
        self.engine.save_checkpoint(f"{url}/", 0, {"epoch": 8})

    def load(self, url: str) -> None:
        use(self.engine, url)
        assert self.engine.load_checkpoint() == self.engine.load_checkpoint(url, 0) == (f"{url}/0", {"epoch": 8})


class Again(Engine):
    """A second engine around the module of one that was saved before, as of a second phase of training."""

    def __init__(self, stage: int, dtype: str, **zero: Any) -> None:
        super().__init__(stage, dtype, **zero)
        ckpt.save("before", self.state, dry_run=True)
        self.engine.destroy()
        optimizer, scheduler = optimizers(self.engine.module)
        config = self.engine._config._param_dict
        self.engine = deepspeed.initialize(model=self.engine.module, optimizer=optimizer, config=config, lr_scheduler=scheduler)[0]
        with pytest.raises(ckpt.errors.StateError, match="another engine trains the module now"):
            ckpt.save("before", {"module": self.engine.module}, dry_run=True)
        self.state = {"engine": self.engine}


class Weights(Engine):
    """What a plain module has saved, in 16 bits: the masters are set, so a step goes on from it."""

    def train(self, begin: int, end: int) -> None:
        super().train(end if begin == 0 else begin, end)

    def save(self, url: str) -> None:
        torch.manual_seed(1)
        ckpt.save(url, {"engine": {"module": net().bfloat16()}})

    def load(self, url: str) -> None:
        ckpt.load(url, self.state, only="engine.module.*", cast=True)

    def digests(self) -> dict[str, str]:
        values = super().digests() if self.engine.global_steps else {}
        masters = {f"{n}.master": safe_get_full_fp32_param(p) for n, p in self.engine.module.named_parameters() if p.requires_grad}
        return {**{name: digest(value) for name, value in masters.items()}, **values}


class Still(Engine):
    """Trains no further: a flat partition and a parameter are rounded otherwise."""

    def train(self, begin: int, end: int) -> None:
        if begin == 0:
            super().train(begin, end)


class Plain(Job):
    """A module and its optimizer, which take what an engine has saved."""

    def __init__(self, *_: Any) -> None:
        model = net()
        optimizer, scheduler = optimizers(model)
        self.parts = {"module": model, "optimizer": optimizer, "lr_scheduler": scheduler, "counters": {}}
        super().__init__({"engine": self.parts}, lambda number: None)

    def digests(self) -> dict[str, str]:
        model, optimizer = self.parts["module"], self.parts["optimizer"]
        values = {"count": model.count, "steps": self.parts["counters"]["global_steps"], "lr": [g["lr"] for g in optimizer.param_groups]}
        for name, param in model.named_parameters():
            values[name] = param.detach()
            values |= {f"{name}.{key}": v for key, v in optimizer.state.get(param, {}).items() if key != "step"}
            values |= {f"{name}.master": param.detach()} if param.requires_grad else {}
        return {name: digest(value) for name, value in (values | {"skipped": 0, "scale": 1.0, "iteration": 0}).items()}


def engine(
    stage: int, dtype: str = "bf16", kind: type[Engine] = Engine, then: Callable[[int], Job] | None = None, **zero: Any
) -> Callable[[int], Job]:
    """``then``: what goes on, if that is something else."""

    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        return kind(stage, dtype, **zero) if seed == 1 or then is None else then(seed)

    return made


def part(name: str, stage: int = 2, *, dict_of: bool = False) -> Callable[[int], Job]:
    """Without its engine: loading into it would be undone by the next step. ``dict_of``: its ``state_dict()``, in stage 3 empty tensors."""

    def made(seed: int) -> Job:
        job = engine(stage)(seed)
        whole = getattr(job.engine, name)  # type: ignore[attr-defined]
        job.state = {name: whole.state_dict() if dict_of else whole}
        return job

    return made


CASES: dict[str, Any] = {
    "stage-0-fp32": engine(0, "fp32"),
    "stage-1-bf16": engine(1),
    "stage-2-fp16": engine(2, "fp16"),
    "stage-2-fp32-offloaded": engine(2, "fp32", offload_optimizer={"device": "cpu"}),
    "stage-3-bf16": engine(3, sub_group_size=40, stage3_param_persistence_threshold=20),
    "stage-3-fp32": engine(3, "fp32"),
    "stage-3-offloaded": engine(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
    "stage-1-then-3": engine(1, then=engine(3)),
    "stage-3-then-2": engine(3, then=engine(2)),
    "stage-1-then-plain": engine(1, "fp32", Still, then=Plain),
    "stage-1-in-background": engine(1, kind=InBackground),
    "stage-3-in-background": engine(3, kind=InBackground),
    "use-stage-2": engine(2, kind=Used),
    "use-after-own": engine(2, kind=Moved),
    "one-rank-fails-stage-1": failing(engine(1), lambda job: raising(job.engine.lr_scheduler, "state_dict"), late=True),
    "one-rank-fails-stage-3": failing(engine(3), lambda job: raising(job.engine.lr_scheduler, "state_dict")),
    "use-one-rank-fails": failing(engine(2, kind=Used), lambda job: raising(job.engine.lr_scheduler, "state_dict")),
    "weights-into-stage-1": engine(1, kind=Weights),
    "weights-into-stage-3": engine(3, kind=Weights),
    "module-alone": part("module"),
    "optimizer-alone": part("optimizer"),
    "state-dict-of-stage-3": part("module", 3, dict_of=True),
    "second-engine-stage-1": engine(1, kind=Again),
}
