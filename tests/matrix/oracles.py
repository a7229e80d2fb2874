"""What checkpoints hold, by the frameworks themselves or by plain slicing of what ``torch.load`` gives. Nothing here is read with ckpt.

Each oracle gives every tensor of a checkpoint, under the name that docs/formats.md promises.
"""

from __future__ import annotations

import json
import math
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.formats.megatron_files import STATE, Arrays, dense_norms, joined_parts, load, whole_model
from tests.formats.memory import deepspeed_memory, megatron_memory
from tests.formats.reading import FIXTURES
from tests.formats.test_deepspeed import PREFIX, by_hand, loaded
from tests.formats.test_megatron_buffers import transcript

Tensors = dict[str, torch.Tensor]
KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def flattened(value: Any, path: str = "") -> Tensors:
    """The tensors of a nested state by the keys that lead to them."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {n: t for key, v in items for n, t in flattened(v, f"{path}.{key}" if path else str(key)).items()}


# --------------------------------------------------------------------------------------------------- torch and safetensors


def of_safetensors(path: Path) -> Tensors:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {n: t for file in files for n, t in load_file(file).items()}


def of_archive(path: Path) -> Tensors:
    return flattened(torch.load(path if path.is_file() else next(path.glob("*.pt")), weights_only=True))


def nested_of_dcp(path: Path) -> Any:
    """Everything, put together by torch's own loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _load_state_dict_from_keys(checkpoint_id=path)


def of_dcp(path: Path) -> Tensors:
    return flattened(nested_of_dcp(path))


def of_flat_parameter(path: Path) -> Tensors:
    """FSDP1's local state: one parameter of which each rank has a half (its records, as torch finds them)."""
    parts = [torch._C.PyTorchFileReader(str(file)).get_record("data/0") for file in sorted(path.glob("local_rank*.pt"))]
    return {"model._flat_param": torch.from_numpy(np.frombuffer(b"".join(parts), "<f4")[:1905].copy())}


# -------------------------------------------------------------------------------------------------------------- DeepSpeed


def of_zero(path: Path) -> Tensors:
    """ZeRO-1, 2 and 3 of one stage without experts: flat partitions walked by hand; weights as the module had them, or the masters."""
    tag = path / "global_step3"
    states = by_hand(tag)
    masters = {n.removeprefix(PREFIX).removesuffix(".master"): t for n, t in states.items() if n.endswith(".master")}
    module = loaded(next(tag.glob("*_model_states.pt")))["module"]
    weights = {n: (t if t.numel() else masters.get(n)) for n, t in module.items()}
    if weights["frozen"] is None:
        ranks = [loaded(f)["frozen_param_fragments"]["frozen"] for f in sorted(tag.glob("*_model_states.pt"))]
        weights["frozen"] = torch.cat(ranks)[:5]
    optimizer = loaded(next(tag.glob("*_optim_states.pt")))["optimizer_state_dict"]
    base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    (step,) = {float(s["step"]) for s in base["state"].values()}
    found = {f"model.{n}": t for n, t in weights.items() if t is not None}
    assert len(found) == len(module)
    return found | states | {f"{PREFIX}{n}.step": torch.tensor(step) for n in masters}


def of_universal(path: Path) -> Tensors:
    """The files of ``ds_to_universal``, one per parameter and key; those of ZeRO-3 are flat, and keep the step beside them."""
    module = loaded(next(path.glob("*_model_states.pt")))["module"]
    groups = loaded(path / "zero/optimizer_state.pt")
    shapes = {n: s for group in loaded(next(path.glob("*_model_states.pt")))["param_shapes"] for n, s in group.items()}
    found: Tensors = {}
    for folder in sorted(p for p in (path / "zero").iterdir() if p.is_dir()):
        name = folder.name
        held = {file.stem: torch.load(file, weights_only=False) for file in folder.glob("*.pt")}
        held = {k: v["param"] if isinstance(v, dict) else v for k, v in held.items()}
        if name not in shapes:
            continue
        for key, tensor in held.items():
            named = "master" if key == "fp32" else key
            found[f"{PREFIX}{name}.{named}"] = torch.as_tensor(tensor).float() if key == "step" else tensor.reshape(shapes[name])
        if "step" not in held:
            state = groups.get("state") or groups["optimizer_state_dict"]["state"]
            found[f"{PREFIX}{name}.step"] = torch.tensor(float(next(iter(state.values()))["step"]))
    whole = of_zero(path.parent)
    for name, tensor in module.items():
        master = found.get(f"{PREFIX}{name}.master")
        found[f"model.{name}"] = tensor if tensor.numel() else whole[f"model.{name}"] if master is None else master
    return found


def of_ranks_memory(name: str, root: Path) -> Tensors:
    """Trained parameters of ``pipeline`` and ``experts`` as the ranks held them; all else out of the files."""
    with tarfile.open(FIXTURES / "deepspeed/memory.tar.xz") as archive:
        archive.extractall(root, filter="data")
    found = typed(deepspeed_memory(root / name))
    path = FIXTURES / "deepspeed" / name / "global_step3"
    for file in (*path.glob("layer_*_model_states.pt"), *path.glob("mp_rank_*_model_states.pt")):
        held = loaded(file).get("module")
        for n, tensor in (held or {}).items():
            found.setdefault(f"model.{n}", tensor)
    if name == "pipeline":  # a tied layer is also that of the first layer that has it
        found["model.0.weight"] = found["model.tied_modules.embed.weight"]
    states = {n.rpartition(".")[0] for n in found if n.startswith(PREFIX)}
    return found | {f"{n}.step": torch.tensor(3.0) for n in states}


# --------------------------------------------------------------------------------------------------------------- Megatron


def typed(arrays: Arrays, half: torch.dtype = torch.bfloat16) -> Tensors:
    """Bits as tensors: weights of these jobs are bfloat16 if they are ``half``, all states float32."""
    kinds = {2: half, 4: torch.float32}
    signed = {2: np.int16, 4: np.int32}
    return {n: torch.from_numpy(np.ascontiguousarray(a).view(signed[a.itemsize])).view(kinds[a.itemsize]) for n, a in arrays.items()}


def unpadded(found: Tensors, rows: int | None) -> Tensors:
    """Without the rows that pad the vocabulary."""
    return {n: t[:rows] if ".word_embeddings." in n or ".output_layer." in n else t for n, t in found.items()}


def of_megatron(folder: Path, *, dp: int, bucket: int = 2000, tied: bool = False, rows: int | None = 42, **sizes: int) -> Tensors:
    """A checkpoint of the format ``torch``: weights put together by the rules of Megatron-LM's documentation, and states out of flat
    buffers, whose layout is a transcript of what Megatron-Core does. ``sizes``: tp, pp, vpp and ep."""
    iteration = folder / "iter_0000003"
    weights = whole_model(iteration, **sizes)
    found = dict(weights)
    for key, named in KEYS.items():
        of = {path: _local_states(path, key, dp=dp, bucket=bucket, tied=tied, **sizes) for path in iteration.glob("mp_rank_*")}
        whole = joined_parts({path: chunks for path, chunks in of.items() if chunks}, **sizes)
        found |= {f"{STATE}{n.removeprefix('model.')}.{named}": a for n, a in whole.items()}
    if tied:
        found = {n: a for n, a in found.items() if ".output_layer." not in n}
    found = found if any("router" in n for n in found) else dense_norms(found)
    return unpadded(typed(found), rows)


def _local_states(
    folder: Path, key: str, *, dp: int, bucket: int, tied: bool, pp: int = 1, vpp: int = 1, ep: int = 1, tp: int = 1
) -> list[dict[str, torch.Tensor]]:
    """The states of one rank's parameters, by chunk, with the names and shapes that they have there."""
    model = load(folder / "model_optim_rng.pt")
    distributed = load(folder / "distrib_optim.pt")
    stage = int(folder.name.split("_")[3]) if pp > 1 else 0
    chunks = [model["model" if vpp == 1 else f"model{c}"] for c in range(vpp)]
    chained = isinstance(distributed, list)
    found: list[dict[str, torch.Tensor]] = [{} for _ in chunks]
    for kind, held in enumerate(distributed if chained else [distributed]):
        if held is None:
            continue
        ranks = dp if kind == 0 else dp // ep
        for c, chunk in enumerate(chunks):
            params = {
                n: t for n, t in chunk.items() if isinstance(t, torch.Tensor) and (not chained or (".local_experts." in n) == bool(kind))
            }
            (flat,) = held[c].values()
            found[c] |= _of_buffer(params, flat[key], flat["numel_unpadded"], None if stage or c else bucket, ranks, tied and pp > 1)
    return found


def _of_buffer(params: Tensors, flat: torch.Tensor, used: int, bucket: int | None, ranks: int, tied: bool) -> Tensors:
    shared = [tied and n.startswith(("embedding.word", "output_layer")) for n in params]
    places, buckets = transcript([t.numel() for t in params.values()], shared, bucket, ranks)
    gaps = [0]
    for _, end, last in buckets:
        gaps.append(gaps[-1] + end - last)
    assert buckets[-1][2] - gaps[-2] == used == len(flat)
    at = {n: (start - gaps[b], stop - gaps[b]) for n, (start, stop, b) in zip(params, places, strict=True)}
    return {n: flat[slice(*at[n])].reshape(t.shape) for n, t in params.items()}


def of_buckets(path: Path) -> Tensors:
    """A ``dp_reshardable`` checkpoint whose writer said where each parameter lies in its buffer (``common_state_buffers.json``)."""
    whole = of_dcp_directory(path)
    (told,) = json.loads((FIXTURES / "megatron/common_state_buffers.json").read_text())
    found: Tensors = {}
    for name, tensor in whole.items():
        if name.startswith("decoder.layers."):
            rest = name.removeprefix("decoder.layers.")
            found |= {f"model.decoder.layers.{i}.{rest}": tensor[i] for i in range(len(tensor))}
        elif not name.startswith("optimizer."):
            found[f"model.{name}"] = tensor
    for name, shape, start, _, bucket in told["params"]:
        (of,) = {n.rpartition(".")[0] for n in whole if f".bucket_idx_{bucket}." in n}
        at = start - told["buckets"][bucket]["offset"]
        named = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        named = named.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        for key, said in KEYS.items():
            found[f"{STATE}{named}.{said}"] = whole[f"{of}.{key}"][at : at + math.prod(shape)].reshape(shape)
    return found


def of_dcp_directory(path: Path) -> Tensors:
    """The tensors that DCP's metadata name, loaded by DCP."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    kinds = dcp.metadata.TensorStorageMetadata
    whole = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items() if isinstance(m, kinds)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(whole, checkpoint_id=path, no_dist=True)
    return whole


def of_megatron_memory(folder: Path, half: torch.dtype = torch.bfloat16) -> Tensors:
    return unpadded(typed(megatron_memory(folder), half), 42)
