"""Reads a chain of deltas as docs/format.md §16 says: with json, safetensors and torch, and no code of the package."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def read_chain(folder: Path) -> dict[str, torch.Tensor]:
    """The model at ``folder``: a delta, or a full export."""
    if not (folder / "ckpt-delta.json").exists():
        return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}
    manifest = json.loads((folder / "ckpt-delta.json").read_text())
    model = read_chain(folder / manifest["base"]["url"])
    for file in manifest["files"]:
        arrays = load_file(folder / file["path"])
        places: dict[int, list[int]] = {}
        for number, start, stop, codes, values, _, _ in arrays["ckpt.sections"].tolist():
            name = manifest["tensors"][number][0]
            at = places.setdefault(number, [0, 0])
            if values:
                run = model[name].view(-1)[start:stop]
                new = arrays[f"{name}.values"][at[1] : at[1] + values]
                if codes:
                    gaps = arrays[f"{name}.gaps"]
                    most = 2 ** (8 * gaps.element_size()) - 1
                    gaps = gaps[at[0] : at[0] + codes].to(torch.int64)
                    reached = (gaps + (gaps != most)).cumsum(0)
                    run[reached[gaps != most] - 1] = new
                else:
                    run[:] = new
            places[number] = [at[0] + codes, at[1] + values]
    return model
