"""A user's first minutes with an installed ckpt, in an empty folder: each way in and out, and each dependency once.

``python -W error smoke.py README.md``. What README's first example names is made here first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import ckpt
from ckpt.policies import EverySteps, Latest

Linear = torch.nn.Linear
COMMAND = str(Path(sys.executable).parent / "ckpt")


def objects() -> dict[str, Any]:
    """What README's first example saves."""
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"wq": Linear(128, 128)})])
    model = torch.nn.ModuleDict({"layers": layers})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


def command(*words: str) -> str:
    """Output of the installed command, which has to succeed without a word on standard error."""
    done = subprocess.run([COMMAND, *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ckpt {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def main(readme: Path) -> None:
    block = re.search(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    state = objects()
    saved = {name: value.clone() for name, value in state["model"].state_dict().items()}
    names: dict[str, Any] = {**state}
    exec(compile(block[1], "README.md", "exec"), names)
    step = names["handle"].result().url
    for parameter in state["model"].parameters():
        parameter.data.zero_()
    ckpt.load(step, state)
    assert equal(state["model"].state_dict(), saved)

    ckpt.save("compressed", state, codec="zstd")
    ckpt.save("memory://bucket/step-1", state)  # the daemon
    assert torch.equal(ckpt.open("memory://bucket/step-1")["model.layers.0.wq.weight"][:], saved["layers.0.wq.weight"])
    command("memory", "stop", "--all")  # another environment would meet this one's daemon
    with ckpt.Checkpointer("runs/b", save=EverySteps(2), keep=Latest(1)) as c:
        assert c.restore(state) is None
        for n in range(1, 7):
            c.step(n, state)
    assert ckpt.latest("runs/b").endswith("step-00000006")

    listed = command("ls", "runs/a")
    assert "step-00000100" in listed and "step-00000200" in listed, listed
    for url in (step, "compressed"):
        command("inspect", url)
        command("verify", url)
    command("cp", step, "copy")
    command("convert", "--to", "torch", step, "plain.pt")
    plain = torch.load("plain.pt", weights_only=True)
    assert equal(plain["model"], saved)
    command("convert", "--to", "hf", "--no-config", "--no-optimizer", "--verify", step, "weights.safetensors")
    weights = safetensors.torch.load_file("weights.safetensors")
    assert equal({name.removeprefix("model."): value for name, value in weights.items()}, saved), sorted(weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
