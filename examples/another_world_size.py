"""Saves a sharded training state on four ranks and loads it on three, with one random-number state for each rank.

``python examples/another_world_size.py runs/sizes`` starts the ranks itself and compares every tensor, whole, before and after.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt


def generator_for(states: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    """A random-number state for a rank of a job that has another number of ranks than the one that saved: ``states``, one of each old rank.

    A rank that existed before resumes its own. A new rank must not repeat another's numbers, so it gets a new seed.
    """
    if rank < len(states):
        return states[rank]
    return torch.Generator().manual_seed(1_000_003 * world + rank).get_state()


def training_state(seed: int) -> dict[str, Any]:
    """A model cut over all ranks, its optimizer after one step, and what differs between ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()
    rng = ckpt.PerRank(torch.Generator().manual_seed(100 * seed + dist.get_rank()).get_state(), reshard=generator_for)
    # Where the job is in its data: counted in samples of all ranks together, it means the same on any number of them.
    return {"model": model, "optimizer": optimizer, "rng": rng, "samples_seen": 1000 * seed}


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Every tensor, made whole from the parts of all ranks."""
    found = {}
    moments = {f"{i}.{k}": v for i, s in enumerate(state["optimizer"].state.values()) for k, v in s.items()}
    for name, tensor in {**state["model"].state_dict(), **moments}.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
    return found


def save(url: str) -> dict[str, str]:
    """On some ranks."""
    state = training_state(seed=1)
    report = ckpt.save(url, state)
    if dist.get_rank() == 0:
        print(f"saved {report.tensor_bytes:,} bytes of tensors on {dist.get_world_size()} ranks", flush=True)
    return digests(state)


def load(url: str) -> dict[str, str]:
    """On other ranks."""
    state = training_state(seed=2)  # other weights, so that it shows if one is not loaded
    ckpt.load(url, state)
    if dist.get_rank() == 0:
        print(f"loaded on {dist.get_world_size()} ranks, at sample {state['samples_seen']}", flush=True)
    drawn = torch.rand((), generator=_with(state["rng"].value)).item()
    print(f"rank {dist.get_rank()} draws {drawn:.6f}", flush=True)
    return digests(state)


def _with(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _rank(rank: int, world: int, port: int, what: str, url: str, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = {"save": save, "load": load}[what](url)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory of the run")
    url = f"{parser.parse_args().run}/step-00000001"
    found = []
    for world, what in ((4, "save"), (3, "load")):
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, args=(world, _free_port(), what, url, answers), nprocs=world)
        found.append(answers.get())
    assert found[0] == found[1]
    print(f"all {len(found[0])} tensors are the same, bit for bit")


if __name__ == "__main__":
    main()
