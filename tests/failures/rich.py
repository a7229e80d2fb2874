"""A checkpoint with one of everything that the format has, saved by two ranks, and everything that one can do with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from click.testing import CliRunner
from torch.distributed import HashStore

import ckpt
from ckpt.cli.main import cli
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.save import save_state
from ckpt.engine.verify import verify
from ckpt.net.group import Group
from ckpt.net.store import group_store

SHARED = {
    "rows": torch.arange(60, dtype=torch.int32).reshape(12, 5),
    "flat": torch.linspace(0, 1, 35).reshape(5, 7),
    "vocab": torch.arange(21, dtype=torch.float64).reshape(7, 3),
}
"""Tensors that are cut between the two ranks: by rows, as a flat range, and padded to 8 rows."""

LAYOUT = ckpt.Layout(
    {"dp": 2},
    rules=[
        ("rows", ckpt.Shard(0, "dp")),
        ("flat", ckpt.Flat("dp"), ckpt.GlobalShape((5, 7))),
        ("vocab", ckpt.Shard(0, "dp"), ckpt.Padded(0, 7)),
        ("*", ckpt.Replicate()),
    ],
)


class Scheduler:
    """An object with a state of its own, a tensor in it."""

    def __init__(self) -> None:
        self.values: Any = {"epoch": 0, "average": torch.zeros(3), "extra": [1, (2.5, None)]}

    def state_dict(self) -> Any:
        return self.values

    def load_state_dict(self, values: Any) -> None:
        self.values = values


def _common(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    optimizer = torch.optim.AdamW([{"params": [*model[0].parameters()], "lr": torch.tensor(0.5)}, {"params": [*model[1].parameters()]}])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    tied = torch.full((3, 2), float(seed), dtype=torch.bfloat16)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": Scheduler(),
        "tied": {"a": tied, "b": tied},
        "values": {"step": seed, "set": {1, "x"}, 7: b"seven", "nan": float("nan"), "list": [1, [torch.full((2,), seed)]]},
    }


def _of_rank(rank: int) -> dict[str, Any]:
    flat = SHARED["flat"].reshape(-1)
    vocab = torch.cat([SHARED["vocab"], torch.zeros(1, 3, dtype=torch.float64)])
    mine = {"rows": SHARED["rows"].chunk(2)[rank], "flat": (flat[:18], flat[18:])[rank], "vocab": vocab.chunk(2)[rank]}
    return {**_common(1), **mine, "rng": ckpt.PerRank({"state": torch.arange(5) + rank, "position": rank})}


def save(url: str) -> None:
    """Save it, on two ranks that are threads."""
    store, errors = HashStore(), list[BaseException]()
    states = [_of_rank(r) for r in range(2)]  # seeding is not for threads

    def run(rank: int) -> None:
        options = SaveOptions(
            layout=LAYOUT, timeout=60, check_replicas=True, threads=1, spans=False, merge_flat_shards=False
        )  # boxes, not rows, for ``flat``
        try:
            save_state(url, states[rank], Group(rank, (0, 1), group_store(store, "rich", rank)), options)
        except BaseException as err:
            errors.append(err)
            raise

    threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def target() -> dict[str, Any]:
    """What one process loads it into."""
    blank = {name: torch.full_like(tensor, 99) for name, tensor in SHARED.items()}
    return {**_common(2), **blank, "rng": ckpt.PerRank(None, reshard=lambda values, rank, world: values[1])}


def tensors_of(loaded: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a loaded target, by name."""
    found = {name: loaded[name] for name in SHARED}
    found |= {f"model.{k}": v for k, v in loaded["model"].state_dict().items()}
    found |= {f"tied.{k}": v for k, v in loaded["tied"].items()}
    moments = loaded["optimizer"].state_dict()["state"]
    found |= {f"optimizer.{i}.{k}": v for i, state in moments.items() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def _load(url: str) -> None:
    ckpt.load(url, target(), job=ckpt.Job(threads=1))


def _load_a_part(url: str) -> None:
    ckpt.load(url, target(), strict=False, read=ckpt.ReadOptions(verify="partial"), cast=True, job=ckpt.Job(threads=1))


def _read(url: str) -> None:
    view = ckpt.open(url)
    for tensor in view.tensors():
        tensor.read()
    view.state()
    view.per_rank("rng", 1)


def _command(*args: str) -> Callable[[str], None]:
    def run(url: str) -> None:
        result = CliRunner().invoke(cli, [*args, url])
        assert result.exit_code != 1, f"ckpt {' '.join(args)}: {result.output}"

    return run


USES: dict[str, Callable[[str], object]] = {
    "load": _load,
    "load a part": _load_a_part,
    "open and read": _read,
    "verify": lambda url: verify(url, threads=1),
    "ckpt verify": _command("verify", "--threads", "1"),
    "ckpt ls": _command("ls"),
    "ckpt inspect": _command("inspect"),
    "ckpt inspect --files": _command("inspect", "--files", "--json"),
    "ckpt inspect --state": _command("inspect", "--state"),
}
"""Everything that reads a checkpoint. The commands end with an exit code: 1 would be a defect."""
