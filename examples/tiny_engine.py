"""A small generation engine with tensor parallelism: it loads weights as vLLM and SGLang do, in plain torch.

``torchrun --nproc-per-node 2 examples/tiny_engine.py exported/llama`` after ``examples/export_hf.py``: any Llama in Hugging Face's format.
Query, key and value are one fused parameter, and so are gate and up; heads of keys and values are copied where there are fewer of them than
ranks; the vocabulary is padded and cut. All requests are recomputed for each token: there is no cache of keys and values.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ckpt
from ckpt.integrations.engines import record

PADDED_TO = 64
"""The vocabulary is padded to a multiple of this, so that each rank has as many rows."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the model, as in ``config.json`` of Hugging Face."""

    vocabulary: int
    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = False
    theta: float = 10000.0
    eps: float = 1e-6

    @classmethod
    def of(cls, config: dict[str, Any]) -> EngineConfig:
        """From the values of a ``config.json``.

        Raises:
            ValueError: the model has something that this engine does not compute.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        beyond = [key for key in ("attention_bias", "mlp_bias") if config.get(key)]
        beyond += [f"rope_type {kind}" for kind in {rope.get("rope_type", "default")} - {"default"}]
        beyond += ["head_dim"] if config.get("head_dim", 0) not in (0, None, config["hidden_size"] // config["num_attention_heads"]) else []
        if config.get("model_type") != "llama" or config.get("hidden_act", "silu") != "silu" or beyond:
            raise ValueError(f"not a plain Llama: {config.get('model_type')}, {config.get('hidden_act')}, {', '.join(beyond)}")
        return cls(
            vocabulary=config["vocab_size"],
            dim=config["hidden_size"],
            hidden=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            tied=bool(config.get("tie_word_embeddings")),
            theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
            eps=config["rms_norm_eps"],
        )


class Ranks:
    """The ranks that share each layer: this one's number, how many there are, and the sum over them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None
        self.group = group
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))

    def sum(self, part: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(part, group=self.group)
        return part

    def join(self, part: Tensor) -> Tensor:
        """The parts of all ranks, side by side in the last dimension."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


def parameter(*shape: int, load: Any) -> nn.Parameter:
    """A parameter without values yet, and the function that takes what a checkpoint has for it."""
    made = nn.Parameter(torch.zeros(shape), requires_grad=False)
    made.weight_loader = load  # type: ignore[attr-defined]
    return made


def whole(param: Tensor, loaded: Tensor) -> None:
    param.data.copy_(loaded)


def rows(ranks: Ranks, param: Tensor, loaded: Tensor) -> None:
    """Column-parallel: a rank has some of the outputs. The last rank's rows may be fewer, where the vocabulary is padded."""
    first = ranks.rank * param.shape[0]
    count = max(0, min(param.shape[0], loaded.shape[0] - first))
    if count:
        param.data[:count].copy_(loaded.narrow(0, first, count))
    param.data[count:].fill_(0)


def columns(ranks: Ranks, param: Tensor, loaded: Tensor) -> None:
    """Row-parallel: a rank has some of the inputs."""
    param.data.copy_(loaded.narrow(1, ranks.rank * param.shape[1], param.shape[1]))


class Attention(nn.Module):
    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.theta, self.head = ranks, config.theta, config.dim // config.heads
        self.copies = max(1, ranks.size // config.kv_heads)  # ranks that have the same heads of keys and values
        self.heads, self.kv_heads = config.heads // ranks.size, max(1, config.kv_heads // ranks.size)
        self.qkv_proj = parameter((self.heads + 2 * self.kv_heads) * self.head, config.dim, load=self.load_qkv)
        self.o_proj = parameter(config.dim, self.heads * self.head, load=partial(columns, ranks))

    def load_qkv(self, param: Tensor, loaded: Tensor, part: str) -> None:
        q, kv = self.heads * self.head, self.kv_heads * self.head
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[part]
        number = self.ranks.rank if part == "q" else self.ranks.rank // self.copies
        param.data.narrow(0, start, size).copy_(loaded.narrow(0, number * size, size))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        sizes = [self.heads * self.head, self.kv_heads * self.head, self.kv_heads * self.head]
        q, k, v = ((part.view(batch, time, -1, self.head).transpose(1, 2)) for part in F.linear(x, self.qkv_proj).split(sizes, dim=-1))
        q, k = self.turned(q), self.turned(k)
        each = self.heads // self.kv_heads
        k, v = k.repeat_interleave(each, dim=1), v.repeat_interleave(each, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.ranks.sum(F.linear(mixed.transpose(1, 2).reshape(batch, time, -1), self.o_proj))

    def turned(self, x: Tensor) -> Tensor:
        """Rotary embedding of positions, in the order of dimensions that Hugging Face's Llama has."""
        half = self.head // 2
        angle = torch.arange(x.shape[2])[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.mine = ranks, config.hidden // ranks.size
        self.gate_up_proj = parameter(2 * self.mine, config.dim, load=self.load_gate_up)
        self.down_proj = parameter(config.dim, self.mine, load=partial(columns, ranks))

    def load_gate_up(self, param: Tensor, loaded: Tensor, part: int) -> None:
        param.data.narrow(0, part * self.mine, self.mine).copy_(loaded.narrow(0, self.ranks.rank * self.mine, self.mine))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return self.ranks.sum(F.linear(F.silu(gate) * up, self.down_proj))


class Norm(nn.Module):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.weight, self.eps = parameter(config.dim, load=whole), config.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(config), Attention(config, ranks)
        self.post_attention_layernorm, self.mlp = Norm(config), MLP(config, ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyEngine(nn.Module):
    """A Llama that generates. All ranks of ``group`` share each layer, and make the same calls; without one it is whole in this process.

    Raises:
        ValueError: the ranks cannot share the heads or the hidden dimension evenly.
    """

    FUSED = (
        ("qkv_proj", "q_proj.weight", "q"),
        ("qkv_proj", "k_proj.weight", "k"),
        ("qkv_proj", "v_proj.weight", "v"),
        ("gate_up_proj", "gate_proj.weight", 0),
        ("gate_up_proj", "up_proj.weight", 1),
    )
    """Parameter here, tensor in the checkpoint, and which part of the parameter that is."""

    def __init__(self, config: EngineConfig, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.ranks = config, Ranks(group)
        size = self.ranks.size
        if config.heads % size or config.hidden % size or (config.kv_heads % size and size % config.kv_heads):
            raise ValueError(f"{size} ranks cannot share {config.heads} heads, {config.kv_heads} of keys, and {config.hidden} hidden")
        mine = -(-config.vocabulary // PADDED_TO) * PADDED_TO // size
        self.embed_tokens = parameter(mine, config.dim, load=partial(rows, self.ranks))
        self.layers = nn.ModuleList(Layer(config, self.ranks) for _ in range(config.layers))
        self.norm = Norm(config)
        self.lm_head = self.embed_tokens if config.tied else parameter(mine, config.dim, load=partial(rows, self.ranks))
        self.to(dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors by their names in Hugging Face's format, in any order, whole; each rank keeps its part. Names of what was filled."""
        params, filled = dict(self.named_parameters(remove_duplicate=False)), set()
        for name, loaded in weights:
            if name == "lm_head.weight" and self.config.tied:
                continue
            name = name.removeprefix("model.")
            fused, theirs, part = next((row for row in self.FUSED if name.endswith(row[1])), ("", "", None))
            own = name.removesuffix(theirs) + fused if fused else name
            own = own if own in params else own.removesuffix(".weight")
            params[own].weight_loader(params[own], loaded, *(() if part is None else (part,)))  # type: ignore[attr-defined]
            filled.add(own)
        return filled

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, time, vocabulary]`` of tokens ``[batch, time]``."""
        mine = tokens - self.ranks.rank * len(self.embed_tokens)
        here = (mine >= 0) & (mine < len(self.embed_tokens))
        x = self.ranks.sum(self.embed_tokens[mine.where(here, 0)] * here.unsqueeze(-1))
        for layer in self.layers:
            x = layer(x)
        return self.ranks.join(F.linear(self.norm(x), self.lm_head))[..., : self.config.vocabulary]

    @torch.inference_mode()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """``count`` more tokens for each row of ``tokens`` ``[batch, time]``: ``[batch, time + count]``.

        The likeliest ones at temperature 0; else they are drawn, and all ranks need generators with the same seed.
        """
        for _ in range(count):
            logits = self(tokens)[:, -1].float()
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                new = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens


def engine_of(url: str, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> TinyEngine:
    """An engine with the weights of a directory in Hugging Face's format."""
    engine = TinyEngine(EngineConfig.of(json.loads((Path(url) / "config.json").read_text())), group, dtype)
    recorded = record(engine.load_weights, ckpt.open(url), engine)  # where the tensors go, without reading any
    ckpt.load(url, recorded.state, cast=True)  # each rank reads what it keeps, into its parameters
    recorded.finish()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url", help="directory of a Llama in Hugging Face's format")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3], help="the prompt")
    parser.add_argument("--count", type=int, default=8, help="how many tokens to generate")
    given = parser.parse_args()
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group("gloo")
    engine = engine_of(given.url, dist.group.WORLD if several else None)
    answer = engine.generate(torch.tensor([given.tokens]), given.count)[0].tolist()
    if engine.ranks.rank == 0:
        print(f"tp={engine.ranks.size}: {given.tokens} goes on with {answer[len(given.tokens) :]}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
