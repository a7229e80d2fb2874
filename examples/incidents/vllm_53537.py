"""vllm-project/vllm#53537: a flipped byte of a safetensors file is served as weights."""

from __future__ import annotations

from pathlib import Path

import torch
from outcome import Outcomes, refused, show
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import ckpt


def play(folder: Path) -> Outcomes:
    weights = {"w": torch.ones(1000)}
    save_file(weights, folder / "model.safetensors")
    ckpt.save(folder / "ckpt", weights)
    for file in (folder / "model.safetensors", *(folder / "ckpt" / "data").iterdir()):
        data = bytearray(file.read_bytes())
        data[-1000] ^= 0xFF
        file.write_bytes(data)
    try:
        wrong = not torch.equal(load_file(folder / "model.safetensors")["w"], weights["w"])
    except SafetensorError as err:
        return f"mended: {err}", ""
    return "loaded, wrong values" if wrong else "mended", refused(lambda: ckpt.load(folder / "ckpt", {"w": torch.zeros(1000)}))


if __name__ == "__main__":
    show(play, "safetensors")
