"""Names of parameters of Megatron-Core's GPTModel: one convention for all of its formats, how tensor parallelism cuts each, and the names
that a model has on one rank. Pure.

The convention: every layer and every expert is a tensor of its own with its global number, and a norm has the name it has where it is fused
with the linear layer that follows it. (Sources: Megatron-LM core/models/gpt, core/transformer/{transformer_layer,mlp,attention,
multi_latent_attention}.py and core/transformer/moe/experts.py, versions 0.12 to 0.20.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
EXTRA_STATE = "._extra_state"
VOCABULARY = frozenset({EMBEDDING, OUTPUT, "output_layer.bias"})
"""Parameters that have a row for each word, and padding after the last."""

NOT_TRAINED = (".router.expert_bias", ".router.local_tokens_per_expert")
"""Endings of names of tensors that have no gradient."""

LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_LOCAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
"""A norm by the name that local layer specifications give it → the linear layer that has it with Transformer Engine."""
_LOCAL_NORMS = {linear: norm for norm, linear in _FUSED_NORMS.items()}

_ROWS = frozenset(
    f"{layer}.{kind}"
    for layer in (
        "word_embeddings",
        "output_layer",
        "linear_qkv",
        "linear_q",
        "linear_kv",
        "linear_q_proj",
        "linear_q_up_proj",
        "linear_kv_up_proj",
        "linear_fc1",
    )
    for kind in ("weight", "bias")
)
_COLUMNS = frozenset({"linear_proj.weight", "linear_fc2.weight"})
_COPIED = frozenset(
    {
        "linear_proj.bias",
        "linear_fc2.bias",
        "position_embeddings.weight",
        "router.weight",
        "router.bias",
        "router.expert_bias",
        "router.local_tokens_per_expert",
        "shared_experts.gate_weight",
    }
)
_LATENT_DOWN = frozenset({"linear_q_down_proj.weight", "linear_kv_down_proj.weight"})
_NORM = re.compile(r"(?:\w*layernorm|\w*layer_norm|\w*norm)\.(?:weight|bias)|\w+\.layer_norm_(?:weight|bias)")


def depends_on_specification(name: str) -> bool:
    """Whether it depends on the layer specification how tensor parallelism cuts a parameter: the projections down to latent vectors are
    cut like other rows without Transformer Engine, and copied with it (``MLASelfAttention`` of multi_latent_attention.py)."""
    return ".".join(name.split(".")[-2:]) in _LATENT_DOWN


def tensor_parallel_axis(name: str, *, cut_latent: bool = False) -> int | None:
    """The axis along which tensor parallelism cuts a parameter; None if every rank has all of it. ``cut_latent``: what depends on the layer
    specification is cut."""
    tail = ".".join(name.split(".")[-2:])
    if tail in _ROWS or (cut_latent and tail in _LATENT_DOWN):
        return 0
    if tail in _COLUMNS:
        return 1
    if tail in _COPIED or tail in _LATENT_DOWN or _NORM.fullmatch(tail):
        return None
    raise KeyError(name)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one routed expert."""
    return ".mlp.experts.local_experts." in name


def is_decayed(name: str, dimensions: int) -> bool:
    """Whether weight decay is for it: not for biases, nor for what has one dimension (core/optimizer/__init__.py)."""
    return dimensions > 1 and not name.endswith(".bias")


class Expert(NamedTuple):
    """The name of an expert's parameter within its layer, apart: the number of the expert, and what follows."""

    number: int
    rest: str


def expert_of(inner: str) -> Expert | None:
    """``mlp.experts.local_experts.3.linear_fc1.weight`` and ``mlp.experts.linear_fc1.weight3`` (of grouped linear layers) apart."""
    match = _LOCAL.fullmatch(inner)
    if match is not None:
        return Expert(int(match[1]), match[2])
    grouped = _GROUPED.fullmatch(inner)
    return None if grouped is None else Expert(int(grouped[3]), f"{grouped[1]}.{grouped[2]}")


def expert_name(expert: int, rest: str) -> str:
    """The name of an expert's parameter within its layer."""
    return f"mlp.experts.local_experts.{expert}.{rest}"


def fused_norms(names: Iterable[str]) -> dict[str, str]:
    """What each of these names is called here. Only norms change: those in front of fused linear layers belong to these.

    Local layer specifications call them ``input_layernorm`` and ``pre_mlp_layernorm``, with latent attention ``q_layernorm`` and
    ``kv_layernorm``, and in ``torch_dist`` even the norm before a router is ``mlp.linear_fc1.layer_norm_weight``.
    """
    names = list(names)
    there: dict[str, set[str]] = {}
    for name in names:
        match = LAYER.fullmatch(name)
        if match is not None:
            there.setdefault(match[1] + match[2], set()).add(match[3])
    norms = {}
    for name in names:
        match = LAYER.fullmatch(name)
        norms[name] = name if match is None else f"{match[1]}{match[2]}.{_norm(match[3], there[match[1] + match[2]])}"
    return norms


def _norm(inner: str, layer: Collection[str]) -> str:
    norm, _, kind = inner.rpartition(".")
    if "mlp.router.weight" in layer and norm in ("pre_mlp_layernorm", "mlp.linear_fc1"):
        return local_norm(inner)
    linear = _FUSED_NORMS.get(norm)
    return f"{linear}.layer_norm_{kind}" if linear is not None and f"{linear}.weight" in layer else inner


def local_norm(inner: str) -> str:
    """What a local layer specification calls a norm within its layer; other names stay."""
    linear, fused, kind = inner.partition(".layer_norm_")
    return f"{_LOCAL_NORMS[linear]}.{kind}" if fused and linear in _LOCAL_NORMS else inner


# ------------------------------------------------------------------------------------------------- order in the model

_TOP = (
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "embedding.",
    "decoder.layers.",
    "decoder.final_layernorm.",
    "output_layer.",
)
_QKV_NORM = ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias")
_MLP_NORM = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias")
_LATENT = tuple(f"self_attention.linear_{part}_proj." for part in ("q", "q_down", "q_up", "kv_down", "kv_up"))
_LATENT_ALONE = tuple(f"{head}{kind}" for head in _LATENT for kind in ("weight", "bias"))
_LATENT_NORMS = tuple(f"self_attention.linear_{part}_up_proj.layer_norm_" for part in ("q", "kv"))
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_HEAD_NORMS = tuple(f"self_attention.{part}_layernorm." for part in ("q", "k", "kv"))
_ROUTED = ("mlp.router.", "mlp.experts.", *(f"mlp.shared_experts.{part}" for part in ("gate_weight", "linear_fc1.", "linear_fc2.")))
_DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.")
_PROJECTION = "self_attention.linear_proj."

_INNER: Mapping[str, tuple[str, ...]] = {
    "local": (
        *("input_layernorm.", *_QKV_NORM, _PROJECTION, *_LATENT_ALONE, *_QKV, *_HEAD_NORMS, *_LATENT_NORMS),
        *("pre_mlp_layernorm.", *_MLP_NORM, *_ROUTED, *_DENSE),
    ),
    "fused": (
        *("input_layernorm.", _PROJECTION, *_LATENT, *_QKV_NORM, *_QKV, *_HEAD_NORMS),
        *("pre_mlp_layernorm.", *_ROUTED, *_MLP_NORM, *_DENSE),
    ),
}
"""Parameters of a layer in their order: with norms as modules of their own, and with norms in the linear layers that follow them."""
ORDERS = tuple((spec, grouped) for spec in _INNER for grouped in (False, True))
"""Orders in which a model may have its parameters: the layer specification, and whether all first layers of experts come before all second
ones, as with grouped linear layers."""
_KINDS = {"layer_norm_weight": 0, "layer_norm_bias": 1, "weight": 2, "bias": 3}


def order_key(name: str, order: tuple[str, bool]) -> tuple[int, ...]:
    """Sorts the parameters of a model as ``named_parameters()`` gives them."""
    spec, grouped = order
    top = _first(_TOP, name, name)
    match = LAYER.fullmatch(name)
    if match is None:
        return (top, _kind(name))
    inner = match[3]
    key = (top, int(match[2]), _first(_INNER[spec], inner, name))
    expert = expert_of(inner)
    if expert is None:
        return (*key, _kind(inner))
    layer, kind = int(expert.rest.startswith("linear_fc2.")), _kind(expert.rest)
    return (*key, layer, kind, expert.number) if grouped else (*key, expert.number, layer, kind)


def _kind(name: str) -> int:
    return _KINDS.get(name.rpartition(".")[2], 0)


def _first(heads: Iterable[str], text: str, name: str) -> int:
    for number, head in enumerate(heads):
        if text.startswith(head):
            return number
    raise KeyError(name)


# Names of parameters as a model has them on one rank, from those that ``names`` has for the whole model. Pure: the way back of
# ``legacy_names``.
#
# (Sources: Megatron-LM core/models/gpt/gpt_layer_specs.py, core/transformer/moe/experts.py.)

Experts = Literal["sequential", "grouped", "transposed"]
_LINEAR = re.compile(r"(?:.+\.)?(?:linear_\w+|output_layer)(?=\.weight\d*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalNames:
    """A layer specification. ``fused``: norms lie in the linear layers that follow them, as with Transformer Engine.

    ``experts``: each is a module of its own (SequentialMLP); all of a rank are one, with a weight for each (TEGroupedMLP); or these weights
    are one, transposed and one after another (GroupedMLP), which is no name of one expert.
    """

    fused: bool = True
    experts: Experts = "sequential"

    @property
    def order(self) -> tuple[str, bool]:
        """The order of the parameters: one of ``names.ORDERS``."""
        return "fused" if self.fused else "local", self.experts != "sequential"

    def name(self, name: str, *, first_layer: int, first_expert: int) -> str:
        """The name on a rank whose first layer and expert have these numbers."""
        match = LAYER.fullmatch(name)
        if match is None:
            return name
        inner, expert = match[3], expert_of(match[3])
        if expert is None:
            inner = inner if self.fused else local_norm(inner)
        elif self.experts == "grouped":
            linear, _, kind = expert.rest.partition(".")
            inner = f"mlp.experts.{linear}.{kind}{expert.number - first_expert}"
        else:
            inner = expert_name(expert.number - first_expert, expert.rest)
        return f"{match[1]}{int(match[2]) - first_layer}.{inner}"


def extra_states(names: Collection[str]) -> list[str]:
    """The names of extra states that a chunk has beside these parameters: those of linear layers, whoever made them. They are None without
    FP8. (Transformer Engine has more, by its version; where they are missing Megatron-LM says so, and goes on.)"""
    modules = dict.fromkeys(m[0] for n in names if (m := _LINEAR.match(n)) is not None)
    if any(n.startswith("decoder.final_layernorm.") for n in names):
        modules["output_layer"] = None  # it is there without a weight of its own too
    return [f"{linear}{EXTRA_STATE}" for linear in modules]


def local_names_of(arguments: Mapping[str, Any]) -> LocalNames:
    """What these of Megatron-LM's arguments ask for: ``transformer_impl``, ``moe_grouped_gemm``, ``moe_use_legacy_grouped_gemm``."""
    fused = arguments.get("transformer_impl", "transformer_engine") != "local"
    if not arguments.get("moe_grouped_gemm"):
        return LocalNames(fused=fused)
    return LocalNames(fused=fused, experts="grouped" if fused and not arguments.get("moe_use_legacy_grouped_gemm") else "transposed")


# One rank's parameters: which elements of which tensors of the whole model they are. Pure.
#
# Tensor parallelism cuts rows or columns; of gated first layers (SwiGLU) each rank has a part of the gate, then one of the same size of the
# up projection. (Source: ``apply_swiglu_sharded_factory`` of Megatron-LM core/transformer/mlp.py.)

# What a rank has of a weight [rows, columns] with tensor parallelism of 2:
#
#     rows cut (QKV, embedding)        columns cut (projections back)      gated first layer (SwiGLU)
#
#     rank 0  | rows 0 .. n/2  |       rank 0 | rank 1                     rank 0  | gate, first half  |
#     rank 1  | rows n/2 .. n  |       half of each row                            | up, first half    |
#                                                                          rank 1  | gate, second half |
#                                                                                  | up, second half   |
#
# The whole of a gated layer is all of the gate, then all of the up projection. So a rank's flat parameter is two boxes of it, not one.


class ParamBlock(NamedTuple):
    """A box of the tensor ``name`` of the whole model, at ``offset``, and its elements in a rank's flat parameter: the first at ``start``,
    then row by row, or with ``strides`` elements between neighbours."""

    name: str
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParam:
    """A parameter as one rank has it: ``numel`` elements, which are ``blocks`` of tensors. ``shared``: the first and last pipeline stage
    have it both; ``expert``: it is reduced over the ranks that have the same experts."""

    dtype: str
    numel: int
    blocks: tuple[ParamBlock, ...]
    shared: bool = False
    expert: bool = False


class ParamPart(NamedTuple):
    """A rank's part of one tensor: the ``shape`` of the whole, and the boxes."""

    shape: tuple[int, ...]
    blocks: tuple[ParamBlock, ...]


def cut_of(name: str, local: tuple[int, ...], rank: int, ranks: int, *, gated: bool, cut_latent: bool = False) -> ParamPart:
    """What part of tensor ``name`` a parameter of shape ``local`` is on tensor-parallel ``rank`` of ``ranks``; for ``cut_latent`` see
    ``tensor_parallel_axis``."""
    zeros = (0,) * len(local)
    axis = tensor_parallel_axis(name, cut_latent=cut_latent) if ranks > 1 else None
    if axis is None or axis >= len(local):
        return ParamPart(local, (ParamBlock(name, 0, local, zeros),))
    shape = (*local[:axis], local[axis] * ranks, *local[axis + 1 :])
    if not gated or not name.endswith((".linear_fc1.weight", ".linear_fc1.bias")):
        return ParamPart(shape, (ParamBlock(name, 0, local, (*zeros[:axis], rank * local[axis], *zeros[axis + 1 :])),))
    half = (local[0] // 2, *local[1:])
    gate = ParamBlock(name, 0, half, (rank * half[0], *zeros[1:]))
    up = ParamBlock(name, math.prod(half), half, (shape[0] // 2 + rank * half[0], *zeros[1:]))
    return ParamPart(shape, (gate, up))


def local_shape(name: str, shape: tuple[int, ...], ranks: int, *, cut_latent: bool = False) -> tuple[int, ...] | None:
    """The shape of a rank's part of a whole tensor; None if it cannot be divided."""
    axis = tensor_parallel_axis(name, cut_latent=cut_latent) if ranks > 1 else None
    if axis is None:
        return shape
    return None if shape[axis] % ranks else (*shape[:axis], shape[axis] // ranks, *shape[axis + 1 :])


def is_latent_cut(name: str, local: Mapping[str, tuple[int, ...]], ranks: int, arguments: Mapping[str, Any]) -> bool | None:
    """Whether the rows of a projection down to latent vectors are cut, as the shapes say that one of ``ranks`` has; None if they do not.

    The projection up takes what the norm after it gives: all latent elements. Those of keys and values come with the rotated part of keys,
    whose size only the arguments say.
    """
    kind = "kv" if name.endswith("linear_kv_down_proj.weight") else "q"
    up = local.get(name.replace("_down_proj", "_up_proj"))
    rotated = 0 if kind == "q" else arguments.get("qk_pos_emb_head_dim")
    rows = local[name][0]
    if up is None or not isinstance(rotated, int):
        other = name.replace("linear_kv_down_proj", "linear_q_down_proj")
        return is_latent_cut(other, local, ranks, arguments) if kind == "kv" and other in local else None
    total_rows = up[1] + rotated
    return rows != total_rows if total_rows in (rows, rows * ranks) else None


def gated_layers(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The first layers, by name, that are a gate and an up projection: they have twice as many rows as the second has columns."""
    layers = set()
    for name, shape in shapes.items():
        if name.endswith(".linear_fc2.weight"):
            first = name.removesuffix("linear_fc2.weight") + "linear_fc1.weight"
            if shapes.get(first, (0,))[0] == 2 * shape[-1]:
                layers |= {first, first.removesuffix("weight") + "bias"}
    return frozenset(layers)


def transposed_experts(
    name: str, numbers: Sequence[int], local: tuple[int, ...], hidden: int, rank: int, ranks: int, *, gated: bool
) -> list[ParamPart]:
    """The experts in ``weight1`` or ``weight2`` of GroupedMLP: transposed, one after another in memory, whatever shape the parameter says.
    In ``name`` the number of an expert goes for ``{}``.

    (Source: ``GroupedMLP.forward`` of Megatron-LM core/transformer/moe/experts.py.)
    """
    inner = math.prod(local) // (hidden * len(numbers))
    cuts = []
    for place, number in enumerate(numbers):
        at, own = place * hidden * inner, name.format(number)
        if own.endswith("linear_fc2.weight"):  # in memory [inner, hidden]
            cuts.append(ParamPart((hidden, inner * ranks), (ParamBlock(own, at, (hidden, inner), (0, rank * inner), (1, hidden)),)))
            continue
        parts = 2 if gated else 1  # in memory [hidden, inner], gate before up
        rows = inner // parts
        blocks = (ParamBlock(own, at + i * rows, (rows, hidden), (i * rows * ranks + rank * rows, 0), (1, inner)) for i in range(parts))
        cuts.append(ParamPart((inner * ranks, hidden), tuple(blocks)))
    return cuts
