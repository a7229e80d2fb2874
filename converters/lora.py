"""Adapters of PEFT (LoRA) merged into their base model: a conversion of the base in which some weights have a low-rank update added.

(Source of names and formulas: github.com/huggingface/peft, ``tuners/lora/layer.py`` and ``utils/save_and_load.py`` of version 0.21.)
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt import settings
from ckpt.engine.load.reader import Reader
from ckpt.errors import ConflictError, FormatError, MismatchError, NamesError, NotFoundError, ShapeError, UsageError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.plan.layout.geometry import Box
from ckpt.plan.tree import pairs_of
from ckpt.plan.views import LogicalTensor, whole
from ckpt.state.tensors import torch_dtype
from ckpt.telemetry.progress import ProgressCallback
from ckpt.text import parse_json, url_text

from .buffered import ViewBox, read_views
from .conversion import Conversion
from .convert import ConvertReport, Part, files_beside, run
from .merge import WeightedSum, place
from .selection import Computed, OutputSet, OutputTensor, SelectOptions, choose_weights, is_floating, operand
from .target import ConvertOptions, MergeKeywords, target
from .transaction import Destination, ExportTransaction

if TYPE_CHECKING:
    from typing_extensions import Unpack


# An adapter is ``adapter_config.json`` and ``adapter_model.safetensors``. With N = "base_model.model." + the name of a module:
#
#     N.lora_A.weight [r, in], N.lora_B.weight [out, r]               weight [out, in]  += s * B @ A      (fan_in_fan_out: its transpose)
#     N.lora_embedding_A [r, rows], N.lora_embedding_B [width, r]     weight [rows, width] += s * (B @ A) transposed
#     N.weight, N.bias                                                a module that was trained as a whole (modules_to_save, bias): instead
#     N.base_layer.weight                                             what the products are added to, if the base has another one (resized)
#
# A checkpoint of a model that PEFT has adapted has the adapter's name behind lora_A and the like, and modules_to_save with it in N.
#
# s is alpha / r, or alpha / sqrt(r) with rslora; r and alpha may be others for some modules (rank_pattern, alpha_pattern). A box of a
# weight needs the rows of B and the columns of A that belong to it, so windows stay small.


CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
_PAIRS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
_UNKNOWN = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens", "layer_replication", "arrow_config", "kasa_config"),
    *("monteclora_config", "trainable_token_indices", "target_parameters"),
)
"""Settings with which an adapter is more than the products above."""
_IN_MEMORY = re.compile(r"\.(lora_(?:embedding_)?[AB]|modules_to_save)\.(?!weight$)([^.]+)(?=\.|$)")
"""Where the name of an adapter is in the names of a model in memory."""
_BLOCK = 1 << 20
"""Elements of a product at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraReport:
    """What a merge of an adapter did, or with ``dry_run`` would do: weights that were ``updated``, tensors that were ``replaced`` by those
    of the adapter, and what was written."""

    base: str
    adapter: str
    updated: int
    replaced: int
    written: ConvertReport


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankUpdate:
    """The first operand, plus ``scaling`` times the product of the third and the second one, B and A. ``transposed``: of its transpose."""

    scaling: float
    transposed: bool
    rank: int
    sources: tuple[str, str]
    allow_nan: bool = False

    def boxes(self, box: Box) -> Sequence[Box]:
        inner, outer = (0, 1) if self.transposed else (1, 0)
        a = Box((0, box.offset[inner]), (self.rank, box.shape[inner]))
        b = Box((box.offset[outer], 0), (box.shape[outer], self.rank))
        return [box, a, b]

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        wide = torch.float64 if torch.float64 in {x.dtype for x in operands} else torch.float32
        base, a, b = operands[0], operands[1].to(wide), operands[2].to(wide)
        left, right = (a.t(), b.t()) if self.transposed else (b, a)
        rows = max(1, _BLOCK // max(1, box.shape[1]))
        for start in range(0, box.shape[0], rows):
            part = slice(start, start + rows)
            total = torch.mm(left[part], right).mul_(self.scaling).add_(base[part].to(wide))
            out[part] = total
            if not self.allow_nan and not bool(torch.isfinite(out[part]).all()):
                first = int(torch.argmax((~torch.isfinite(out[part])).to(torch.uint8)))
                message = f"{place(name, box, start * box.shape[1] + first)} with the adapter is {out[part].reshape(-1)[first].item()}"
                hint = "look for NaN and infinite elements with `ckpt inspect`; allow_nan (--allow-nan) lets the result be so"
                raise MismatchError(message, where=" and ".join(self.sources), hint=hint)


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    adapter_config: str | os.PathLike[str] | None = None,
    allow_nan: bool = False,
    to: str = "hf",
    part: Part | None = None,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[MergeKeywords],
) -> LoraReport:
    """Write the model ``base`` with the LoRA adapter of PEFT in the directory ``adapter`` merged into its weights at ``url``.

    The base has any format and layout, with the names of tensors that PEFT knew it by. Each updated weight is computed in float32 (in
    float64 if one operand is float64) and cast once to its dtype; PEFT itself rounds the product of 16-bit adapters to 16 bits before it
    adds. Everything else is copied, bit for bit. If a merge was killed, the same call resumes it.

    Args:
        adapter_config: PEFT's ``adapter_config.json``, or its directory: with it ``adapter`` may be a checkpoint of the model that PEFT
            adapted, whole or with ``trainable=True``.
        allow_nan: let elements that are NaN or infinite make the result so. By default they are an error.
        to: ``hf``, ``native``, ``torch`` or ``dcp``.
        part, dry_run, progress, options: as for :func:`ckpt.merge`.
    """
    began, base, adapter, url = time.monotonic(), url_text(base), url_text(adapter), url_text(url)
    options.setdefault("optimizer", False)
    asked, format = ConvertOptions(**options), target(to)
    beside = files_beside(format, url, asked)
    catalog, root = open_catalog(base), asked.root
    if adapter_config is not None and root is not None and all(key != root for key, _ in pairs_of(catalog.state) or ()):
        asked = replace(asked, root=None)  # it is about the other checkpoint alone
    chosen = format.choose(catalog, asked)
    config, weights = _opened(adapter, None if adapter_config is None else url_text(adapter_config), root)
    result, updated, replaced = _updated(chosen, weights, config, (base, adapter), allow_nan=allow_nan)
    written = run(
        Conversion(format, result, url, asked, beside=beside), source=base, part=part, progress=progress, dry_run=dry_run, began=began
    )
    return LoraReport(base=base, adapter=adapter, updated=updated, replaced=replaced, written=written)


def _opened(adapter: str, given: str | None, root: str | None) -> tuple[Mapping[str, Any], OutputSet]:
    """The configuration and the tensors of an adapter, these under the names of its file."""
    names, place = open_backend(adapter).list_dir(), adapter if given is None else given.removesuffix(CONFIG) or "."
    file = next((name for name in WEIGHTS if name in names), None)
    if given is None and (CONFIG not in names or file is None):
        message = f"there is no {CONFIG if CONFIG not in names else WEIGHTS[0]}, so this is no adapter of PEFT"
        hint = "give the directory of the adapter; for a checkpoint of a model of PEFT add --adapter-config DIR, "
        raise NotFoundError(message, where=adapter, hint=hint + 'which model.peft_config["default"].save_pretrained(DIR) writes')
    try:
        config = parse_json(open_backend(place).read_whole(CONFIG, settings.SIDE_FILE))
    except ValueError as err:
        raise FormatError(f"{CONFIG} is not JSON: {err}", where=place) from err
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise FormatError(f"an adapter of the kind {kind} cannot be merged", where=place, hint="PEFT's merge_and_unload may")
    odd = [name for name in _UNKNOWN if config.get(name)]
    if odd:
        raise FormatError(f"the adapter has {odd[0]}, which is more than LoRA's products", where=place, hint="PEFT's merge_and_unload may")
    if file is not None:
        return config, choose_weights(open_catalog(join_url(adapter, file)), SelectOptions(optimizer=False))
    return config, choose_weights(open_catalog(adapter), SelectOptions(views=_as_in_file, optimizer=False, root=root))


def _as_in_file(shapes: Mapping[str, Sequence[int]]) -> Mapping[str, LogicalTensor]:
    """The tensors of a model in memory by the names that PEFT's file has for them."""
    adapters = sorted({found[2] for name in shapes for found in _IN_MEMORY.finditer(name)})
    if len(adapters) != 1:
        what = f"the model has the adapters {', '.join(adapters)}" if adapters else "no tensor is LoRA's in a model of PEFT"
        raise NamesError(what, hint="give a checkpoint with one adapter, saved with trainable=True or only=")
    names = {name: _IN_MEMORY.sub(r".\1", name).replace(".modules_to_save.", ".") for name in shapes if ".original_module." not in name}
    return {new: whole(name, shapes[name]) for name, new in names.items()}


def _updated(
    chosen: OutputSet, weights: OutputSet, config: Mapping[str, Any], sources: tuple[str, str], *, allow_nan: bool
) -> tuple[OutputSet, int, int]:
    """The choice with the adapter in it, and how many tensors are updated and replaced."""
    pairs = {name: end for name in weights.tensors for end in _PAIRS if name.endswith(end)}
    seconds = {name.removesuffix(end) + _PAIRS[end] for name, end in pairs.items()}
    bases = {_in_base(name): name for name in weights.tensors if name.endswith(".base_layer.weight")}
    plain = sorted(weights.tensors.keys() - pairs.keys() - seconds - {*bases.values()})
    modules = {name.removesuffix(end).removeprefix(PREFIX): (name, end) for name, end in pairs.items()}
    wanted = [f"{module}.weight" for module in modules] + [_in_base(name) for name in plain if weights.tensors[name].alias is None]
    alone = sorted(bases.keys() - {*wanted})
    if alone:
        raise NamesError(f"the adapter has {bases[alone[0]]} and no product for it", where=sources[1], hint="save the adapter again")
    head = _head(chosen, wanted, sources)
    tensors = dict(chosen.tensors)
    for module, (first, end) in modules.items():
        second = first.removesuffix(end) + _PAIRS[end]
        if second not in weights.tensors:
            raise NamesError(f"the adapter has {first} and not {second}", where=sources[1], hint="save it again")
        name = f"{head}{module}.weight"
        embedding = end == ".lora_embedding_A"
        scaling = _scaling(config, module, rank := weights.tensors[first].shape[0], sources[1])
        turned = embedding or bool(config.get("fan_in_fan_out"))
        formula = LowRankUpdate(scaling=scaling, transposed=turned, rank=rank, sources=sources, allow_nan=allow_nan)
        tensors[name] = _computed(chosen, tensors[name], weights, (bases.get(f"{module}.weight"), first, second), formula, sources)
    copied = WeightedSum(weights=(1.0,), sources=sources[1:], allow_nan=allow_nan)
    plain = [stored for stored in plain if head + _in_base(stored) in tensors]  # not those tied to another that the base has alone
    for stored in plain:
        name, view = head + _in_base(stored), weights.tensors[stored].view
        if view.shape != tensors[name].shape or not is_floating(weights.catalog, view):
            raise ShapeError(f"{stored} of the adapter does not fit {name} {list(tensors[name].shape)}", where=sources[1])
        tensors[name] = replace(tensors[name], computed=Computed(formula=copied, operands=(operand(weights.catalog, 1, view),)))
    changed = {name for name, one in tensors.items() if one is not chosen.tensors[name]}
    tied = [one for one in tensors.values() if (one.alias in changed) != (one.name in changed) and one.alias is not None]
    tensors |= {one.name: replace(one, alias=None) for one in tied}  # PEFT, too, changes one of two tied weights alone
    return replace(chosen, tensors=tensors, others=(weights.catalog,)), len(modules), len(plain)


def _in_base(name: str) -> str:
    """A name of an adapter's file as the base has it, but for what precedes it there."""
    return name.replace(".base_layer.", ".").removeprefix(PREFIX)


def _computed(
    chosen: OutputSet,
    wanted: OutputTensor,
    weights: OutputSet,
    names: tuple[str | None, str, str],
    formula: LowRankUpdate,
    sources: tuple[str, str],
) -> OutputTensor:
    """A weight of the base with its update. ``names`` are what the adapter has for the weight itself, if anything, for A and for B."""
    own, *products = names
    a, b = (weights.tensors[name].shape for name in products)
    shape = wanted.logical or wanted.shape
    product = (b[0], a[1]) if len(a) == len(b) == 2 and b[1] == a[0] else None
    if product is None or tuple(shape) != (product[::-1] if formula.transposed else product):
        what = f"{products[0]} {list(a)} and {products[1]} {list(b)} do not fit {wanted.name} {list(shape)}"
        raise ShapeError(what, where=sources[1], hint="the adapter is of another model, or of a layer that is not linear")
    if own is not None and weights.tensors[own].shape != shape:
        what = f"{own} {list(weights.tensors[own].shape)} of the adapter does not fit {wanted.name} {list(shape)}"
        raise ShapeError(what, where=sources[1], hint="resize the embeddings of the base first")
    views = [wanted.view, *(weights.tensors[name].view for name in products)]
    numbers = [0, 1, 1]
    if own is not None:
        views[0], numbers[0] = weights.tensors[own].view, 1
    catalogs = (chosen.catalog, weights.catalog)
    if not all(is_floating(catalogs[number], view) for number, view in zip(numbers, views, strict=True)):
        message = f"{wanted.name} has the dtype {wanted.dtype.name}: nothing can be added"
        raise ShapeError(message, where=sources[0], hint="dequantize the base first")
    operands = tuple(operand(catalogs[number], number, view) for number, view in zip(numbers, views, strict=True))
    return replace(wanted, computed=Computed(formula=formula, operands=operands))


def _head(chosen: OutputSet, wanted: Sequence[str], sources: tuple[str, str]) -> str:
    """What precedes the adapter's names in those of the base: nothing, or the key that the model has in a state."""
    if not wanted:
        raise NamesError("the adapter has no tensors", where=sources[1], hint="give the directory of a trained adapter")
    heads = {name[: len(name) - len(wanted[0])] for name in chosen.tensors if name == wanted[0] or name.endswith(f".{wanted[0]}")}
    fitting = [head for head in sorted(heads) if all(head + name in chosen.tensors for name in wanted)]
    if len(fitting) == 1:
        return fitting[0]
    lacking = next((n for n in wanted if not any(m == n or m.endswith(f".{n}") for m in chosen.tensors)), wanted[0])
    what = f"several modules of the base have {wanted[0]}" if fitting else f"the base has no {lacking}, which the adapter changes"
    raise NamesError(what, where=sources[0], hint="give the model that the adapter was trained on, or translate names (--names), or --root")


def _scaling(config: Mapping[str, Any], module: str, rank: int, where: str) -> float:
    """What the product of a module is multiplied by."""

    def of_module(patterns: object, default: Any) -> Any:
        known = patterns if isinstance(patterns, dict) else {}
        return next((value for key, value in known.items() if re.match(rf"(.*\.)?({key})$", module)), default)

    configured, alpha = (
        of_module(config.get("rank_pattern"), config.get("r")),
        of_module(config.get("alpha_pattern"), config.get("lora_alpha")),
    )
    if configured != rank:
        raise ShapeError(
            f"{CONFIG} has rank {configured} for {module}, and its tensors have {rank}", where=where, hint="save the adapter again"
        )
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise FormatError(f"{CONFIG} has lora_alpha {alpha!r} for {module}", where=where, hint="save the adapter again")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


# Extracts a LoRA adapter from the difference between a tuned model and its base, in the files of PEFT.
#
# For each weight W of a linear layer, D = W_tuned - W_base in float32, and with its singular value decomposition D = U S V^T:
#
#     B = U_r sqrt(S_r)   [out, r]        A = sqrt(S_r) V_r^T   [r, in]        scaling 1 (alpha = r)
#
# B A is the nearest matrix of rank r to D, and the error is the norm of the singular values that are left out. So a difference that has
# rank r, as one that came from an adapter, is recovered up to rounding in float32; any other loses what the report says. Tensors that
# have no product (norms, biases, embeddings) are stored whole where they differ, as modules that were trained as a whole.
#
# Memory: one weight of both models and its decomposition, and the adapter.

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
    options = SelectOptions(optimizer=False, root=root)
    chosen = [choose_weights(open_catalog(one), options) for one in (base, tuned)]
    _check_fit(chosen[0], chosen[1], (base, tuned))
    readers = [Reader(catalog=one.catalog, verify="full", threads=settings.threads(threads)) for one in chosen]
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
        difference = _difference(name, one, other, f"{base} and {tuned}")
        if not bool(difference.any()):  # the same values, in another dtype or with another sign of zero
            continue
        if difference.ndim != 2 or not name.endswith(".weight") or _WHOLE.search(name):
            whole.append(name)
            tensors[PREFIX + name] = other
            continue
        module, kept = name.removesuffix(".weight"), min(rank, *difference.shape)
        a, b = _factors(difference, kept)
        tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
        ranks[module] = kept
        size, missed = difference.double().square().sum().item(), (difference - b @ a).double().square().sum().item()
        errors[name], lost, total = math.sqrt(missed / size), lost + missed, total + size
    if not tensors:
        raise MismatchError("the two checkpoints have the same tensors, so there is nothing to extract", where=tuned)
    nbytes = _write(url, tensors, _config(ranks, rank, whole))
    error = math.sqrt(lost / total) if total else 0.0
    return ExtractReport(base=base, tuned=tuned, url=url, rank=rank, errors=errors, error=error, whole=tuple(whole), bytes=nbytes)


def _difference(name: str, one: torch.Tensor, other: torch.Tensor, where: str) -> torch.Tensor:
    """What ``other`` has more, in float32."""
    wide = torch.float64 if torch.float64 in (one.dtype, other.dtype) else torch.float32
    difference = (other.to(wide) - one.to(wide)).float()
    if not bool(torch.isfinite(difference).all()):
        raise MismatchError(f"{name} has elements that are NaN or infinite, or overflow float32", where=where)
    return difference


def _factors(difference: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, whose product B A is the nearest matrix of this rank."""
    u, s, vt = torch.linalg.svd(difference, full_matrices=False)
    roots = s[:rank].sqrt()
    return (roots[:, None] * vt[:rank]).contiguous(), (u[:, :rank] * roots).contiguous()


def _check_fit(one: OutputSet, other: OutputSet, urls: tuple[str, str]) -> None:
    for here, there, where in ((one, other, urls[1]), (other, one, urls[0])):
        lacking = sorted(here.tensors.keys() - there.tensors.keys())
        if lacking:
            raise NamesError(f"it has no {lacking[0]}" + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""), where=where)
    for name, wanted in one.tensors.items():
        if wanted.shape != other.tensors[name].shape:
            shapes = f"{list(other.tensors[name].shape)}, and {list(wanted.shape)} in the base"
            raise ShapeError(f"{name} has the shape {shapes}", where=urls[1], hint="only checkpoints of one model have a difference")


def _read(reader: Reader, wanted: OutputTensor) -> torch.Tensor:
    memory = torch.empty(wanted.shape, dtype=torch_dtype(wanted.dtype))
    read_views(reader, [ViewBox(wanted.view, Box.whole(wanted.shape), memory)])
    return memory


def _config(ranks: Mapping[str, int], rank: int, whole: list[str]) -> bytes:
    """What PEFT knows an adapter by. Alpha is the rank everywhere, so that products count as they are."""
    smaller = {module: r for module, r in ranks.items() if r != rank}
    plain = {"peft_type": "LORA", "task_type": None, "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none"}
    modules = {"target_modules": sorted(ranks), "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None}
    patterns = {"rank_pattern": smaller, "alpha_pattern": smaller, "inference_mode": True}
    config = {**plain, "fan_in_fan_out": False, "use_rslora": False, **modules, **patterns}
    return json.dumps(config, indent=2).encode() + b"\n"


def _write(url: str, tensors: Mapping[str, torch.Tensor], config: bytes) -> int:
    """The weights, then the configuration, without which it is no adapter. What an extraction that was killed has left goes before."""
    from safetensors.torch import save

    data, files = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}), (WEIGHTS[0], CONFIG)
    destination = Destination(url=url, backend=(backend := open_backend(url)), name=None, replace=False)
    backend.prepare()
    begun, replaces = destination.begun()
    if begun and (replaces or set(begun) != set(files)):
        raise ConflictError("an export was begun here and did not finish", where=url, hint="extract to another URL, or export here again")
    for path in (*begun, destination.record) if begun else ():
        backend.delete(path)
    if taken := [name for name in backend.list_dir() if name in files]:
        raise ConflictError(f"something is there already: {', '.join(taken)}", where=url, hint="extract to another URL, or remove it")
    transaction = ExportTransaction(destination, {}, files, last=CONFIG)
    transaction.show()
    try:
        transaction.commit({}, {WEIGHTS[0]: data}, lambda _: destination.put(CONFIG, config))
    except BaseException:
        transaction.discard()
        raise
    return len(data) + len(config)
