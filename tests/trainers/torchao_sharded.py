"""torchao under fully_shard: optimizer states in 8 bits, 4 bits and FP8, and trained int8 weights, as DTensors over tensor subclasses. One
rank alone has them unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

from .lives import Job, digest, leaves


class Sharded(Job):
    def digests(self) -> dict[str, str]:
        """Of the inner tensors as all ranks have them together, whatever the number of ranks; what all have alike is one rank's."""
        return {name: _gathered(leaf) for name, leaf in leaves(self.state).items()}


def _gathered(value: Any) -> str:
    local = value._local_tensor if isinstance(value, DTensor) else value
    if not hasattr(local, "__tensor_flatten__"):
        return digest(value)
    inner = {name: getattr(local, name).detach() for name in local.__tensor_flatten__()[0]}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, {name: tensor.view(torch.uint8) for name, tensor in inner.items()})
    return " ".join(digest(parts[0][name] if name == "qmap" else torch.cat([part[name] for part in parts])) for name in inner)


def job(make: Callable[..., Any], quantised: bool = False) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(seed)
        model = torch.nn.Linear(128, 512, bias=False)
        if quantised:
            quantize_(model, int8_weight_only_quantized_training())
        if dist.get_world_size() > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = make(model.parameters(), lr=1e-2)

        def step(number: int) -> None:
            model(torch.randn(4, 128)).square().sum().backward()
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            optimizer.zero_grad()

        return Sharded({"model": model, "optimizer": optimizer}, step)

    return made


CASES = {
    "adamw-8bit": job(AdamW8bit),
    "adamw-4bit": job(AdamW4bit),
    "adamw-fp8": job(AdamWFp8),
    "int8-weights": job(torch.optim.SGD, quantised=True),
}
