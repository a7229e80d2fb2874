"""Extracts a LoRA adapter from the difference between a tuned model and its base, in the files of PEFT.

For each weight W of a linear layer, D = W_tuned - W_base in float32, and with its singular value decomposition D = U S V^T:

    B = U_r sqrt(S_r)   [out, r]        A = sqrt(S_r) V_r^T   [r, in]        scaling 1 (alpha = r)

B A is the nearest matrix of rank r to D, and the error is the norm of the singular values that are left out. So a difference that has rank
r, as one that came from an adapter, is recovered up to rounding in float32; any other loses what the report says. Tensors that have no
product (norms, biases, embeddings) are stored whole where they differ, as modules that were trained as a whole.

Memory: one weight of both models and its decomposition, and the adapter.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt import settings
from ckpt.catalog import Catalog
from ckpt.converters.pipeline.buffered import ViewBox, read_views
from ckpt.converters.pipeline.target import ConvertOptions, target
from ckpt.converters.select.selection import OutputSet, OutputTensor, is_floating
from ckpt.engine.load.reader import Reader
from ckpt.errors import MismatchError, NamesError, ShapeError, UsageError
from ckpt.formats.journal import WriteJournal
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box
from ckpt.state.tensors import torch_dtype
from ckpt.telemetry.callbacks import ProgressCallback
from ckpt.text import url_text

from .lora import CONFIG, PREFIX, WEIGHTS

_WHOLE = re.compile(r"(^|\.)(embed\w*|wte|wpe|tok_embeddings|lm_head|word_embeddings|position_embeddings)\.weight$")
"""Weights of embeddings and heads, which PEFT has other products for: stored whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractReport:
    """What an extraction did. ``errors``: for each weight with a product, the Frobenius norm of what the product lacks, over that of the
    difference; ``error`` the same over all of them. ``whole``: tensors that differ and are stored as they are."""

    base: str
    tuned: str
    url: str
    rank: int
    errors: Mapping[str, float]
    error: float
    whole: tuple[str, ...]
    bytes: int


def extract(
    base: str | os.PathLike[str],
    tuned: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    rank: int,
    root: str | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> ExtractReport:
    """Write the adapter of rank ``rank`` that comes nearest to the difference between two checkpoints of one model, as PEFT reads it.

    Both have any format and layout, and the same names and shapes of the model's tensors. Factors are stored in float32. Weights that are
    equal in value get no product.

    Args:
        root: key of a state that contains the model, if there are several.
    """
    base, tuned, url = url_text(base), url_text(tuned), url_text(url)
    if rank < 1:
        raise UsageError(f"a rank of {rank}", hint="give a positive number, such as 16")
    options = ConvertOptions(optimizer=False, root=root)
    chosen = [target("hf").choose(open_catalog(one), options.selection) for one in (base, tuned)]
    _check_fit(chosen[0], chosen[1], (base, tuned))
    readers = [_reader(one.catalog, threads) for one in chosen]
    tensors: dict[str, torch.Tensor] = {}
    ranks, errors, whole = dict[str, int](), dict[str, float](), list[str]()
    lost = total = 0.0
    for done, name in enumerate(sorted(chosen[0].tensors)):
        if progress is not None:
            progress(done, len(chosen[0].tensors))
        one, other = (_read(reader, o.tensors[name]) for reader, o in zip(readers, chosen, strict=True))
        if torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            continue
        if not all(is_floating(o.catalog, o.tensors[name].view) for o in chosen):
            raise MismatchError(f"{name} differs, and its dtype {one.dtype} has no difference", where=tuned)
        wide = torch.float64 if torch.float64 in (one.dtype, other.dtype) else torch.float32
        difference = (other.to(wide) - one.to(wide)).float()
        if not bool(torch.isfinite(difference).all()):
            raise MismatchError(f"{name} has elements that are NaN or infinite, or overflow float32", where=f"{base} and {tuned}")
        if not bool(difference.any()):  # the same values, in another dtype or with another sign of zero
            continue
        if difference.ndim != 2 or not name.endswith(".weight") or _WHOLE.search(name):
            whole.append(name)
            tensors[PREFIX + name] = other
            continue
        module, kept = name.removesuffix(".weight"), min(rank, *difference.shape)
        u, s, vt = torch.linalg.svd(difference, full_matrices=False)
        roots = s[:kept].sqrt()
        b, a = (u[:, :kept] * roots).contiguous(), (roots[:, None] * vt[:kept]).contiguous()
        tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
        ranks[module] = kept
        size, error = difference.double().square().sum().item(), (difference - b @ a).double().square().sum().item()
        errors[name], lost, total = math.sqrt(error / size), lost + error, total + size
    if not tensors:
        raise MismatchError("the two checkpoints have the same tensors, so there is nothing to extract", where=tuned)
    nbytes = _write(url, tensors, _config(ranks, rank, whole))
    return ExtractReport(
        base=base,
        tuned=tuned,
        url=url,
        rank=rank,
        errors=errors,
        error=math.sqrt(lost / total) if total else 0.0,
        whole=tuple(whole),
        bytes=nbytes,
    )


def _check_fit(one: OutputSet, other: OutputSet, urls: tuple[str, str]) -> None:
    for here, there, where in ((one, other, urls[1]), (other, one, urls[0])):
        lacking = sorted(here.tensors.keys() - there.tensors.keys())
        if lacking:
            raise NamesError(f"it has no {lacking[0]}" + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""), where=where)
    for name, wanted in one.tensors.items():
        if wanted.shape != other.tensors[name].shape:
            shapes = f"{list(other.tensors[name].shape)}, and {list(wanted.shape)} in the base"
            raise ShapeError(f"{name} has the shape {shapes}", where=urls[1], hint="only checkpoints of one model have a difference")


def _reader(catalog: Catalog, threads: int | None) -> Reader:
    return Reader(catalog=catalog, verify="full", threads=settings.threads(threads))


def _read(reader: Reader, wanted: OutputTensor) -> torch.Tensor:
    memory = torch.empty(wanted.shape, dtype=torch_dtype(wanted.dtype))
    read_views(reader, [ViewBox(wanted.view, Box.whole(wanted.shape), memory)])
    return memory


def _config(ranks: Mapping[str, int], rank: int, whole: list[str]) -> bytes:
    """What PEFT knows an adapter by. Alpha is the rank everywhere, so that products count as they are."""
    smaller = {module: r for module, r in ranks.items() if r != rank}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2).encode() + b"\n"


def _write(url: str, tensors: Mapping[str, torch.Tensor], config: bytes) -> int:
    """The weights, then the configuration, without which it is no adapter."""
    from safetensors.torch import save

    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    journal = WriteJournal(open_backend(url))
    journal.backend.prepare()
    try:
        journal.write(WEIGHTS[0], data)
        journal.write(CONFIG, config)
    except BaseException:
        journal.discard()
        raise
    return len(data) + len(config)
