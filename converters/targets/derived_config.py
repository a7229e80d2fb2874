"""A ``config.json`` for exported weights, from what a Megatron job left of its arguments: every number known, or no file. No torch."""

# transformers computes with what config.json says, and a wrong number changes what a model computes without any error. So nothing is
# assumed. Three things have to come together:
#
#     names       those of LlamaForCausalLM and no others: embedding, layers with gate, up and down projections, RMS norms
#     arguments   each number that Llama's configuration needs stands in the source's ``args``, and all that it cannot express is off
#     shapes      what the arguments say of sizes is what the tensors have
#
# A token's number (BOS, EOS) is in no argument: those stay null, where transformers would put its own.

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt import tree
from ckpt.converters.select.selection import OutputSet

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PROJECTIONS = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
_WEIGHTS = frozenset(f"{module}.{name}_proj.weight" for name, module in _PROJECTIONS.items())
_NORMS = frozenset({"input_layernorm.weight", "post_attention_layernorm.weight"})
_ATTENTION_BIASES = frozenset(f"self_attn.{name}_proj.bias" for name in "qkvo")
_MLP_BIASES = frozenset(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down"))

_NEEDED: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings"), (int,)),
    **dict.fromkeys(("norm_epsilon", "rotary_base", "rotary_percent"), (int, float)),
}
_MUST_BE: Mapping[str, object] = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0}
_MUST_BE_OFF = (
    *("use_rope_scaling", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "window_size", "no_rope_freq"),
    *("apply_layernorm_1p", "qk_layernorm", "qk_l2_norm", "multi_latent_attention", "attention_output_gate", "softmax_scale"),
    *("num_experts", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "activation_func_clamp_value"),
)
"""What Llama's configuration cannot express. A version of Megatron-LM without such an argument has no such feature."""


class DerivedConfig(NamedTuple):
    """The content of ``config.json``, and why; None if it cannot be made. ``reason`` is None where there are no arguments at all."""

    content: bytes | None
    reason: str | None


def derived_config(chosen: OutputSet) -> DerivedConfig:
    """The configuration that the source's arguments and the tensors that are exported make."""
    node = chosen.catalog.state.get("args") if isinstance(chosen.catalog.state, dict) else None
    pairs = None if node is None or tree.tag_of(node) is not None else tree.pairs_of(node)
    if not pairs:
        return DerivedConfig(None, None)
    arguments = {key: value for key, value in pairs if isinstance(key, str)}
    shapes = {name: wanted.without_padding().shape for name, wanted in chosen.tensors.items()}
    inner = [{m[2] for n in shapes if (m := _LAYER.fullmatch(n)) is not None and m[1] == str(i)} for i in range(_layers(shapes))]
    biases = inner[0] - _WEIGHTS - _NORMS if inner else frozenset[str]()
    known = {_EMBEDDING, "model.norm.weight", _HEAD} | {n for n in shapes if _LAYER.fullmatch(n)}
    if not inner or _EMBEDDING not in shapes or shapes.keys() - known or any(own != {*_WEIGHTS, *_NORMS, *biases} for own in inner):
        return DerivedConfig(None, "the tensors are not those of LlamaForCausalLM")
    if biases not in (set(), _ATTENTION_BIASES, _MLP_BIASES, _ATTENTION_BIASES | _MLP_BIASES):
        return DerivedConfig(None, f"LlamaForCausalLM has no {min(biases)} alone")
    problem = _problem(arguments)
    if problem is not None:
        return DerivedConfig(None, problem)
    config = _config(arguments, shapes, biases)
    if not _fit(config, shapes):
        return DerivedConfig(None, "the source's arguments do not fit the shapes of the tensors")
    dtypes = {wanted.dtype.name for wanted in chosen.tensors.values()}
    if len(dtypes) == 1:
        config["torch_dtype"] = min(dtypes)
    return DerivedConfig(json.dumps(config, indent=2, sort_keys=True).encode() + b"\n", "made of the source's arguments")


def _layers(shapes: Mapping[str, object]) -> int:
    return len({m[1] for name in shapes if (m := _LAYER.fullmatch(name)) is not None})


def _problem(arguments: Mapping[str, Any]) -> str | None:
    """What the arguments do not say, or say that Llama's configuration has no word for."""
    lacking = [name for name, kinds in _NEEDED.items() if not isinstance(arguments.get(name), kinds) or isinstance(arguments[name], bool)]
    lacking += [name for name in _MUST_BE if arguments.get(name) is None and name not in lacking]
    if lacking:
        return f"the source's arguments do not say {', '.join(lacking)}"
    odd = [name for name, value in _MUST_BE.items() if arguments[name] != value] + [name for name in _MUST_BE_OFF if arguments.get(name)]
    return f"LlamaForCausalLM cannot express {odd[0]}={arguments[odd[0]]!r}" if odd else None


def _config(arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], biases: frozenset[str] | set[str]) -> dict[str, Any]:
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else None
    theta = float(arguments["rotary_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": bool(biases & _ATTENTION_BIASES),
        "mlp_bias": bool(biases & _MLP_BIASES),
        "hidden_act": "silu",
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "max_position_embeddings": arguments["max_position_embeddings"],
        "num_attention_heads": heads,
        "num_hidden_layers": arguments["num_layers"],
        "num_key_value_heads": groups or heads,
        "head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "rms_norm_eps": arguments["norm_epsilon"],
        "rope_theta": theta,  # before transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": _HEAD not in shapes,
        "vocab_size": shapes[_EMBEDDING][0],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _fit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, key_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expected = {
        "self_attn.q_proj.weight": (rows, hidden),
        "self_attn.k_proj.weight": (key_rows, hidden),
        "self_attn.v_proj.weight": (key_rows, hidden),
        "self_attn.o_proj.weight": (hidden, rows),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    fits = all(shapes.get(f"model.layers.{i}.{name}") == shape for i in layers for name, shape in expected.items())
    vocabulary = (config["vocab_size"], hidden)
    return fits and len(layers) == _layers(shapes) and shapes[_EMBEDDING] == shapes.get(_HEAD, vocabulary) == vocabulary
