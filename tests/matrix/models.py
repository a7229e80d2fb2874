"""Tiny models of any size in the names of transformers' files, and the same in other frameworks' names, by plain numpy.

Sources of what goes where: transformers' modeling files; Megatron-LM core/transformer/attention.py (groups of queries, key, value),
core/transformer/mlp.py (gate, then up), core/transformer/moe; transformers models/llama/convert_llama_weights_to_hf.py (``permute``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

Arrays = dict[str, np.ndarray]
SPARSE = ("mixtral", "qwen-moe", "qwen2-moe", "qwen3-moe", "deepseek-v3")
TRANSLATIONS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), ("llama", "megatron")),
    "meta": ("llama-plain", "plain"),
    "mixtral": ("mixtral", "megatron"),
    **dict.fromkeys(("qwen2-moe", "qwen3-moe"), ("qwen-moe", "megatron")),
    "deepseek-v3": ("deepseek-v3", "megatron"),
}
"""Kind of model → translation, and the convention that is not transformers'."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a model is: ``dense`` are the layers without experts."""

    kind: str
    layers: int
    hidden: int
    groups: int
    queries: int
    head: int
    ffn: int
    experts: int
    vocabulary: int
    padding: int
    tied: bool
    dense: frozenset[int]

    @property
    def heads(self) -> int:
        return self.groups * self.queries

    @property
    def config(self) -> dict[str, Any]:
        """What transformers keeps as config.json."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head,
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": self.tied,
            **({"n_routed_experts" if self.kind == "deepseek-v3" else "num_experts": self.experts} if self.kind in SPARSE else {}),
        }


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kind = draw(st.sampled_from(sorted(TRANSLATIONS)))
    layers = draw(st.integers(1, 3))
    may_be_dense = kind not in SPARSE[:1] and kind in SPARSE and layers > 1
    return Sizes(
        kind=kind,
        layers=layers,
        hidden=draw(st.integers(1, 6)),
        groups=draw(st.integers(1, 3)),
        queries=draw(st.integers(1, 3)),
        head=2 * draw(st.integers(1, 3)),
        ffn=draw(st.integers(1, 5)),
        experts=draw(st.sampled_from([1, 2, 3, 11])),
        vocabulary=draw(st.integers(1, 9)),
        padding=draw(st.sampled_from([0, 0, 1, 5])) if kind != "meta" else 0,
        tied=draw(st.booleans()),
        dense=frozenset(draw(st.sets(st.integers(0, layers - 2)))) if may_be_dense else frozenset(),
    )


# -------------------------------------------------------------------------------------------------------- transformers


def shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    """Every tensor in transformers' files."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocabulary, s.hidden), "model.norm.weight": (s.hidden,)}
    if not s.tied:
        found["lm_head.weight"] = (s.vocabulary, s.hidden)
    for n in range(s.layers):
        inside = _latent(s) if s.kind == "deepseek-v3" else _attention(s)
        inside |= {"input_layernorm.weight": (s.hidden,), "post_attention_layernorm.weight": (s.hidden,)}
        inside |= _sparse(s) if s.kind in SPARSE and n not in s.dense else gated("mlp", s.ffn, s.hidden)
        found |= {f"model.layers.{n}.{name}": shape for name, shape in inside.items()}
    return found


def _attention(s: Sizes) -> dict[str, tuple[int, ...]]:
    rows = {"q": s.heads * s.head, "k": s.groups * s.head, "v": s.groups * s.head}
    found: dict[str, tuple[int, ...]] = {f"self_attn.{p}_proj.weight": (n, s.hidden) for p, n in rows.items()}
    found["self_attn.o_proj.weight"] = (s.hidden, rows["q"])
    if s.kind.startswith("qwen2"):
        found |= {f"self_attn.{p}_proj.bias": (n,) for p, n in rows.items()}
    if s.kind.startswith("qwen3"):
        found |= {f"self_attn.{p}_norm.weight": (s.head,) for p in "qk"}
    return found


def _latent(s: Sizes) -> dict[str, tuple[int, ...]]:
    query = {"q_a_proj": (3, s.hidden), "q_a_layernorm": (3,), "q_b_proj": (s.heads * s.head, 3)}
    if s.queries == 1:  # a model without a compressed query
        query = {"q_proj": (s.heads * s.head, s.hidden)}
    others = {"kv_a_proj_with_mqa": (2 + s.head, s.hidden), "kv_a_layernorm": (2,), "kv_b_proj": (s.heads * s.head, 2)}
    return {f"self_attn.{n}.weight": shape for n, shape in (query | others | {"o_proj": (s.hidden, s.heads * s.head)}).items()}


def gated(
    at: str, ffn: int, hidden: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{at}.{n}.weight" for n in names)
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}


def _sparse(s: Sizes) -> dict[str, tuple[int, ...]]:
    at = "block_sparse_moe" if s.kind == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if s.kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, tuple[int, ...]] = {f"{at}.gate.weight": (s.experts, s.hidden)}
    for e in range(s.experts):
        found |= gated(f"{at}.experts.{e}", s.ffn, s.hidden, names)
    if s.kind == "qwen2-moe":
        found |= gated("mlp.shared_expert", s.ffn + 1, s.hidden) | {"mlp.shared_expert_gate.weight": (1, s.hidden)}
    if s.kind == "deepseek-v3":
        found |= gated("mlp.shared_experts", s.ffn + 1, s.hidden) | {"mlp.gate.e_score_correction_bias": (s.experts,)}
    return found


# ------------------------------------------------------------------------------------------------------ other frameworks

PLAIN = {
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}
LATENT = {
    "q_proj": "linear_q_proj.weight",
    "q_a_proj": "linear_q_down_proj.weight",
    "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
    "q_b_proj": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
    "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
    "kv_b_proj": "linear_kv_up_proj.weight",
    "o_proj": "linear_proj.weight",
}


def elsewhere(s: Sizes, held: Arrays) -> Arrays:
    """The same model in the other convention of its kind."""
    return _plain(s, held) if s.kind == "meta" else _megatron(s, held)


def _plain(s: Sizes, held: Arrays) -> Arrays:
    found = {"tok_embeddings.weight": held["model.embed_tokens.weight"], "norm.weight": held["model.norm.weight"]}
    if not s.tied:
        found["output.weight"] = held["lm_head.weight"]
    for n in range(s.layers):
        here = {k.removeprefix(f"model.layers.{n}."): a for k, a in held.items() if k.startswith(f"model.layers.{n}.")}
        found |= {f"layers.{n}.{PLAIN[k]}": a for k, a in here.items() if k in PLAIN}
        for p, heads in (("q", s.heads), ("k", s.groups)):
            halves = here[f"self_attn.{p}_proj.weight"].reshape(heads, 2, s.head // 2, s.hidden)
            found[f"layers.{n}.attention.w{p}.weight"] = halves.transpose(0, 2, 1, 3).reshape(-1, s.hidden)
    return found


def _megatron(s: Sizes, held: Arrays) -> Arrays:
    def padded(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.zeros((s.padding, s.hidden), array.dtype)])

    found = {"embedding.word_embeddings.weight": padded(held["model.embed_tokens.weight"])}
    found["decoder.final_layernorm.weight"] = held["model.norm.weight"]
    if not s.tied:
        found["output_layer.weight"] = padded(held["lm_head.weight"])
    for n in range(s.layers):
        head = f"model.layers.{n}."
        here = {k.removeprefix(head): a for k, a in held.items() if k.startswith(head)}
        made = _megatron_latent(here) if s.kind == "deepseek-v3" else _megatron_attention(s, here)
        sparse = s.kind in SPARSE and n not in s.dense
        made["pre_mlp_layernorm.weight" if sparse else "mlp.linear_fc1.layer_norm_weight"] = here["post_attention_layernorm.weight"]
        made |= _megatron_sparse(s, here) if sparse else joined(here, "mlp", "mlp")
        found |= {f"decoder.layers.{n}.{k}": a for k, a in made.items()}
    return found


def _megatron_attention(s: Sizes, here: Arrays) -> Arrays:
    found = {
        "self_attention.linear_qkv.layer_norm_weight": here["input_layernorm.weight"],
        "self_attention.linear_proj.weight": here["self_attn.o_proj.weight"],
    }
    for what in ("weight", "bias"):
        if f"self_attn.q_proj.{what}" in here:
            q, k, v = (here[f"self_attn.{p}_proj.{what}"] for p in "qkv")
            rows: list[np.ndarray] = []
            for g in range(s.groups):
                rows += [q[g * s.queries * s.head : (g + 1) * s.queries * s.head]]
                rows += [x[g * s.head : (g + 1) * s.head] for x in (k, v)]
            found[f"self_attention.linear_qkv.{what}"] = np.concatenate(rows)
    found |= {
        f"self_attention.{p}_layernorm.weight": here[f"self_attn.{p}_norm.weight"] for p in "qk" if f"self_attn.{p}_norm.weight" in here
    }
    return found


def _megatron_latent(here: Arrays) -> Arrays:
    found = {"input_layernorm.weight": here["input_layernorm.weight"]}
    return found | {f"self_attention.{new}": here[f"self_attn.{k}.weight"] for k, new in LATENT.items() if f"self_attn.{k}.weight" in here}


def joined(here: Arrays, at: str, to: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Arrays:
    gate, up, down = (here[f"{at}.{n}.weight"] for n in names)
    return {f"{to}.linear_fc1.weight": np.concatenate([gate, up]), f"{to}.linear_fc2.weight": down}


def _megatron_sparse(s: Sizes, here: Arrays) -> Arrays:
    at = "block_sparse_moe" if s.kind == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if s.kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {"mlp.router.weight": here[f"{at}.gate.weight"]}
    for e in range(s.experts):
        found |= joined(here, f"{at}.experts.{e}", f"mlp.experts.local_experts.{e}", names)
    if s.kind == "qwen2-moe":
        found |= joined(here, "mlp.shared_expert", "mlp.shared_experts")
        found["mlp.shared_experts.gate_weight"] = here["mlp.shared_expert_gate.weight"]
    if s.kind == "deepseek-v3":
        found |= joined(here, "mlp.shared_experts", "mlp.shared_experts")
        found["mlp.router.expert_bias"] = here["mlp.gate.e_score_correction_bias"]
    return found


def in_modules(s: Sizes, held: Arrays) -> Arrays:
    """As transformers 5 holds experts in memory: gate and up of all in one tensor."""
    found = {n: a for n, a in held.items() if ".experts." not in n}
    for n in range(s.layers):
        at = f"model.layers.{n}.mlp.experts"
        if f"{at}.0.gate_proj.weight" in held:
            each = [[held[f"{at}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(s.experts)]
            found[f"{at}.gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
            found[f"{at}.down_proj"] = np.stack([down for _, _, down in each])
    return found
