"""A model with the loaders of vLLM and SGLang: what each kind of layer does with the tensors of a checkpoint, without the engines.

The names and the way of cutting are theirs: ``weight_loader`` of ``ColumnParallelLinear``, ``RowParallelLinear``, ``QKVParallelLinear``,
``MergedColumnParallelLinear``, ``FusedMoE``, ``VocabParallelEmbedding``, ``PerTensorScaleParameter`` and ``default_weight_loader``, and the
``load_weights`` of models that map names to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one model. ``ep``: experts are divided among the ranks instead of cut."""

    hidden: int = 8
    head: int = 2
    heads: int = 4
    kv_heads: int = 2
    inner: int = 12
    vocabulary: int = 10
    padded_to: int = 4
    experts: int = 4
    ep: bool = False
    tied: bool = False
    layers: int = 1
    stored: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    more: tuple[str, ...] = field(default=())
    """Further layers: of loaders that do odd things."""

    def checkpoint(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of what a model hub has."""
        h, q, kv = self.hidden, self.heads * self.head, self.kv_heads * self.head
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, h), "model.norm.weight": (h,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, h)
        for n in range(self.layers):
            layer = f"model.layers.{n}"
            shapes |= {f"{layer}.attn.{p}_proj.weight": (size, h) for p, size in (("q", q), ("k", kv), ("v", kv))}
            shapes |= {f"{layer}.attn.{p}_proj.bias": (size,) for p, size in (("q", q), ("k", kv), ("v", kv))}
            shapes |= {f"{layer}.attn.{p}_proj.scale": () for p in "qkv"}
            shapes[f"{layer}.attn.o_proj.weight"] = (h, q)
            shapes[f"{layer}.attn.o_proj.input_scale"] = (1,)
            shapes |= {f"{layer}.mlp.{p}_proj.weight": (self.inner, h) for p in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (h, self.inner)
            for e in range(self.experts):
                shapes |= {f"{layer}.experts.{e}.{w}.weight": (self.inner, h) for w in ("w1", "w3")}
                shapes[f"{layer}.experts.{e}.w2.weight"] = (h, self.inner)
        for name in self.more:
            shapes[f"more.{name}"] = (6, 4)
        return {name: (shape, self.stored) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Tp:
    rank: int
    size: int

    def part(self, tensor: Tensor, dim: int, size: int) -> Tensor:
        return tensor.narrow(dim, self.rank * size, size)


def default_loader(param: Tensor, loaded: Tensor) -> None:
    if param.numel() == 1 and loaded.numel() == 1:
        param.data.fill_(loaded.item())
        return
    assert param.size() == loaded.size(), (param.size(), loaded.size())
    param.data.copy_(loaded)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, loader: Any) -> nn.Parameter:
    made = nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)
    made.weight_loader = loader  # type: ignore[attr-defined]
    return made


class ZooModel(nn.Module):
    """One rank's model. ``load_weights`` has no regard for how it is called: with all tensors, or with some."""

    def __init__(self, sizes: Sizes, tp: Tp) -> None:
        super().__init__()
        self.sizes, self.tp, self.params = sizes, tp, nn.ParameterDict()
        h, dtype = sizes.hidden, sizes.dtype
        padded = -(-sizes.vocabulary // (sizes.padded_to * tp.size)) * sizes.padded_to
        self.add("embed_tokens", (padded, h), self.load_vocabulary)
        if not sizes.tied:
            self.add("lm_head", (padded, h), self.load_vocabulary)
        self.add("norm", (h,), default_loader)
        self.heads, self.kv_heads = sizes.heads // tp.size, max(1, sizes.kv_heads // tp.size)
        q, kv = self.heads * sizes.head, self.kv_heads * sizes.head
        for n in range(sizes.layers):
            self.add(f"{n}.qkv", (q + 2 * kv, h), self.load_qkv)
            self.add(f"{n}.qkv_bias", (q + 2 * kv,), self.load_qkv)
            self.add(f"{n}.qkv_scale", (3,), self.load_scale)
            self.add(f"{n}.o", (h, q), partial(self.load_cut, 1))
            self.add(f"{n}.o_scale", (1,), default_loader)
            self.add(f"{n}.gate_up", (2 * (sizes.inner // tp.size), h), self.load_merged)
            self.add(f"{n}.down", (h, sizes.inner // tp.size), partial(self.load_cut, 1))
            local, inner = (sizes.experts // tp.size, sizes.inner) if sizes.ep else (sizes.experts, sizes.inner // tp.size)
            self.add(f"{n}.w13", (local, 2 * inner, h), self.load_expert)
            self.add(f"{n}.w2", (local, h, inner), self.load_expert)
        for name in sizes.more:
            self.add(f"more_{name}", (4, 6) if name in ("transposed", "conv") else (6, 4), getattr(self, f"load_{name}"))
        self.register_buffer("inverse_frequencies", torch.arange(3.0))
        self.to(dtype)

    def add(self, name: str, shape: tuple[int, ...], loader: Any) -> None:
        self.params[name.replace(".", "_")] = parameter(shape, self.sizes.dtype, loader)

    # ---- loaders

    def load_vocabulary(self, param: Tensor, loaded: Tensor) -> None:
        rows = param.shape[0]
        start = min(self.tp.rank * rows, loaded.shape[0])
        count = min(rows, loaded.shape[0] - start)
        param[:count].data.copy_(loaded.narrow(0, start, count))
        param[count:].data.fill_(0)

    def load_cut(self, dim: int, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(self.tp.part(loaded, dim, param.shape[dim]))

    def load_qkv(self, param: Tensor, loaded: Tensor, shard: str) -> None:
        q, kv = self.heads * self.sizes.head, self.kv_heads * self.sizes.head
        offset, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
        copies = max(1, self.tp.size // self.sizes.kv_heads)
        number = self.tp.rank if shard == "q" else self.tp.rank // copies
        data = param.data.narrow(0, offset, size)
        loaded = loaded.narrow(0, number * size, size)
        assert data.shape == loaded.shape
        data.copy_(loaded)

    def load_scale(self, param: Tensor, loaded: Tensor, shard: str) -> None:
        if loaded.ndim:
            loaded = loaded[0]
        param.data["qkv".index(shard)].copy_(loaded)

    def load_merged(self, param: Tensor, loaded: Tensor, shard: int) -> None:
        size = param.shape[0] // 2
        param.data.narrow(0, shard * size, size).copy_(self.tp.part(loaded, 0, size))

    def load_expert(self, param: Tensor, loaded: Tensor, shard: str, expert: int) -> None:
        if self.sizes.ep:
            expert -= self.tp.rank * param.shape[0]
            if not 0 <= expert < param.shape[0]:
                return
        data = param.data[expert]
        if shard == "w2":
            data.copy_(loaded if self.sizes.ep else self.tp.part(loaded, 1, data.shape[1]))
            return
        size = data.shape[0] // 2
        data = data.narrow(0, 0 if shard == "w1" else size, size)
        data.copy_(loaded if self.sizes.ep else self.tp.part(loaded, 0, size))

    # ---- loaders that do odd things

    def load_transposed(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.t())

    def load_contiguous(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.t().contiguous().t())

    def load_conv(self, param: Tensor, loaded: Tensor) -> None:
        param.data.unsqueeze(1).copy_(loaded.T.unsqueeze(1))

    def load_divided(self, param: Tensor, loaded: Tensor) -> None:
        param.data.view(2, 3, 4).copy_(loaded.reshape(3, 2, 4).transpose(0, 1))  # heads in another order

    def load_chunked(self, param: Tensor, loaded: Tensor) -> None:
        for into, part in zip(param.data.split(2, dim=1), reversed(loaded.chunk(2, dim=1)), strict=True):
            into[...] = part

    def load_every_other(self, param: Tensor, loaded: Tensor) -> None:
        param.data[:3] = loaded[::2]
        param.data[3:] = loaded[1::2]

    def load_broadcast(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded[2:3])

    def load_twice(self, param: Tensor, loaded: Tensor) -> None:
        param.data[:4].copy_(loaded[:4])
        param.data[4:].copy_(loaded[1:3])

    def load_over(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded)
        param.data[2:].copy_(loaded[:4])

    def load_again(self, param: Tensor, loaded: Tensor) -> None:
        param.data[:2].copy_(loaded[:2])
        param.data.copy_(loaded.flip(0) if loaded.shape[0] == 7 else loaded)

    def load_zeroed(self, param: Tensor, loaded: Tensor) -> None:
        param.data.zero_()
        param.data[:, :3].copy_(loaded[:, :3])

    def load_computed(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(-torch.exp(loaded.float()))

    def load_in_place(self, param: Tensor, loaded: Tensor) -> None:
        loaded = loaded.clone()
        loaded[1:3].mul_(2)
        param.data.copy_(loaded)

    def load_joined(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(torch.cat([loaded[3:], loaded[:3]]))

    def load_indexed(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded[torch.tensor([5, 4, 3, 2, 1, 0])])

    def load_put(self, param: Tensor, loaded: Tensor) -> None:
        param.data[torch.tensor([0, 2, 4])] = loaded[:3].to(param.dtype)
        param.data[torch.tensor([1, 3, 5])] = loaded[3:].to(param.dtype)

    def load_buffered(self, param: Tensor, loaded: Tensor) -> None:
        buffer = torch.empty(8, 4, dtype=loaded.dtype)
        buffer[1:7].copy_(loaded)
        param.data.copy_(buffer[1:7] + 0)

    def load_decided(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded if loaded.abs().max() > 0 else loaded + 1)

    def load_numbered(self, param: Tensor, loaded: Tensor) -> None:
        param.data.fill_(loaded[0, 0].item() * 2)

    def load_narrow_cast(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.to(torch.float16))

    def load_wide_cast(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.to(torch.float64).t().t())

    def load_cast(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.to(param.dtype))

    def load_bits(self, param: Tensor, loaded: Tensor) -> None:
        if param.dtype == loaded.dtype:
            kind = {2: torch.int16, 4: torch.int32}[param.itemsize]
            param.data.view(kind)[:3].copy_(loaded.view(kind)[:3])
            param.data.view(kind)[3:].copy_(loaded[3:].view(kind))
        else:
            param.data.copy_(loaded)

    # ---- names

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        params, filled = dict(self.params.items()), set()
        for name, loaded in weights:
            if "lm_head" in name and self.sizes.tied:
                continue
            own, args = self.target(name)
            param = params[own]
            param.weight_loader(param, loaded, *args)  # type: ignore[attr-defined]
            filled.add(own)
        return filled

    def target(self, name: str) -> tuple[str, tuple[Any, ...]]:
        if name.startswith("more."):
            return f"more_{name.removeprefix('more.')}", ()
        parts = name.removeprefix("model.").split(".")
        if parts[0] != "layers":
            return parts[0], ()
        n, kind, what = parts[1], parts[2], parts[3]
        if kind == "experts":
            return f"{n}_{'w2' if parts[4] == 'w2' else 'w13'}", (parts[4], int(what))
        proj = what.removesuffix("_proj")
        if proj in ("q", "k", "v"):
            return f"{n}_qkv{ {'weight': '', 'bias': '_bias', 'scale': '_scale'}[parts[4]] }", (proj,)
        if proj in ("gate", "up"):
            return f"{n}_gate_up", (("gate", "up").index(proj),)
        return f"{n}_{proj}{'_scale' if parts[4] == 'input_scale' else ''}", ()
