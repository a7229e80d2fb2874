"""Loads only the weights, in bfloat16, from a training checkpoint, as a serving program does.

``python examples/serve.py runs/plain`` after ``python examples/plain_loop.py runs/plain``; or any run of a model with the same names.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import ckpt


def newest(run: str) -> str:
    """The URL of the newest committed step. A step is there as a whole or not at all, so a training job may be writing the next one."""
    steps = [s for s in ckpt.list_steps(run) if s.committed]
    if not steps:
        raise SystemExit(f"there is no checkpoint in {run}")
    return steps[-1].url


def weights(url: str) -> nn.Module:
    """The model in bfloat16, made without memory for random weights that nobody needs."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    model = model.to(torch.bfloat16)
    # only= leaves the optimizer and all else in the checkpoint alone, unread; cast= allows float32 to become bfloat16.
    report = ckpt.load(url, {"model": model}, only="model.*", cast=True)
    print(f"{report.tensors} tensors loaded, {len(report.cast)} of them made bfloat16, {report.bytes_read:,} bytes read")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run")
    url = newest(parser.parse_args().run)

    # What is in there? Nothing but the index is read.
    view = ckpt.open(url)
    print(f"{url} has {len(view)} tensors:")
    for name in view:
        print(f"  {name} {view[name].dtype} {list(view[name].shape)}")

    model = weights(url)
    with torch.inference_mode():
        print(f"the answer is {model(torch.zeros(1, 32, dtype=torch.bfloat16)).item():.4f}")


if __name__ == "__main__":
    main()
