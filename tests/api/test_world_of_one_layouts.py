"""Layouts where the only rank has every part: renumbered, stacked, padded and interleaved tensors must be what they are without."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt import Flat, GlobalShape, Interleaved, Layout, OnMesh, Padded, Replicate, Shard, Stage, Uneven, experts, pipeline
from ckpt.errors import CkptError, CoverageError, LayoutError, NamesError, ShapeError
from tests.api.checked import described, empty_directory, pattern, same, save, save_exactly

WHOLE: dict[str, tuple[Any, ...]] = {
    "replicated": (Replicate(),),
    "nothing said": (),
    "rows": (Shard(0, "tp"),),
    "columns": (Shard(1, "tp"),),
    "the last dimension": (Shard(-1, "tp"),),
    "given sizes": (Shard(0, "tp", sizes=(6,)),),
    "uneven": (Shard(0, "tp"), Uneven(0, 6)),
    "twice": (Shard(0, "tp"), Shard(0, "dp")),
    "both": (Shard(0, "tp"), Shard(1, "dp")),
    "interleaved": (Interleaved(0, "tp", 2),),
    "interleaved groups": (Interleaved(0, "tp", (3, 1, 2)),),
    "a stage": (Stage("pp", 0),),
    "first and last stage": (Stage("pp", (0, -1)),),
    "another mesh": (Shard(0, "ep"), OnMesh("expert")),
}


def around(*placements: Any, **more: Any) -> Layout:
    return Layout({"pp": 1, "dp": 1, "tp": 1}, rules=[("*", *placements)], meshes={"expert": {"ep": 1, "edp": 1}}, **more)


@pytest.mark.parametrize("kind", WHOLE)
def test_one_rank_has_all_of_it(url: str, kind: str) -> None:
    layout = around(*WHOLE[kind])
    tensor = pattern(torch.float32, 6, 4)
    save_exactly(url, {"w": tensor}, {"w": tensor}, layout=layout)
    for options in ({"layout": layout}, {}, {"layout": around(Shard(1, "dp"))}):
        target = torch.zeros(6, 4)
        report = ckpt.load(url, {"w": target}, **options)
        assert described(target) == described(tensor)
        assert report.bytes_read == 96
    columns = torch.zeros(4, 6).t()
    ckpt.load(url, {"w": columns}, layout=layout)
    assert described(columns) == described(tensor)


def test_flat_tensors(url: str) -> None:
    """Memory without a shape is a tensor with one."""
    layout = around(Flat("dp"), GlobalShape((6, 4)))
    tensor = pattern(torch.float32, 6, 4)
    save_exactly(url, {"w": tensor.reshape(-1)}, {"w": tensor}, layout=layout)
    target, flat, strided = torch.zeros(6, 4), torch.zeros(24), torch.zeros(48)[::2]
    ckpt.load(url, {"w": target})
    ckpt.load(url, {"w": flat}, layout=layout)
    ckpt.load(url, {"w": strided}, layout=layout)
    assert described(target) == described(flat.reshape(6, 4)) == described(strided.reshape(6, 4)) == described(tensor)


# ------------------------------------------------------------------------------------------------------------ padding


def padded(size: int, dim: int = 0) -> Layout:
    return around(Shard(dim, "tp"), Padded(dim, size))


def test_padding_is_stored_and_resumes_exactly(url: str) -> None:
    tensor = pattern(torch.float32, 8, 3)
    save_exactly(url, {"w": tensor}, {"w": tensor}, layout=padded(5))
    target = torch.zeros(8, 3)
    ckpt.load(url, {"w": target}, layout=padded(5))
    assert described(target) == described(tensor)
    view = ckpt.open(url)["w"]
    assert view.shape == (5, 3) and described(view.read()) == described(tensor[:5])
    assert described(view[-1]) == described(tensor[4])


_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.float8_e4m3fn, getattr(torch, "float4_e2m1fn_x2", torch.bool)]


@settings(max_examples=60)
@given(real=st.integers(0, 6), before=st.integers(0, 3), after=st.integers(0, 3), dim=st.integers(0, 1), dtype=st.sampled_from(_DTYPES))
def test_another_padding_takes_what_is_real_and_zeros(real: int, before: int, after: int, dim: int, dtype: torch.dtype) -> None:
    def shape(size: int) -> tuple[int, int]:
        return (size, 3) if dim == 0 else (3, size)

    tensor = pattern(dtype, *shape(real + before), seed=1)
    target = pattern(dtype, *shape(real + after), seed=2)
    with empty_directory() as root:
        ckpt.save(root, {"w": tensor}, layout=padded(real, dim))
        ckpt.load(root, {"w": target}, layout=padded(real, dim))
        bare = pattern(dtype, *shape(real), seed=3)
        ckpt.load(root, {"w": bare})
    assert described(bare) == described(tensor.narrow(dim, 0, real))
    if before == after:
        assert described(target) == described(tensor)
        return
    assert described(target.narrow(dim, 0, real)) == described(bare)
    assert not any(described(target.narrow(dim, real, after))[2])


def test_a_checkpoint_without_padding_into_a_padded_model(url: str) -> None:
    tensor = pattern(torch.float32, 5, 3)
    ckpt.save(url, {"w": tensor})
    target = torch.ones(8, 3)
    ckpt.load(url, {"w": target}, layout=padded(5))
    assert described(target[:5]) == described(tensor) and not target[5:].any()


def test_other_real_sizes_do_not_fit(url: str) -> None:
    ckpt.save(url, {"w": torch.ones(8, 3)}, layout=padded(5))
    with pytest.raises(ShapeError, match=r"shape \[5, 3\] in the checkpoint, \[6, 3\] in the state without padding"):
        ckpt.load(url, {"w": torch.ones(8, 3)}, layout=padded(6))
    with pytest.raises(ShapeError, match=r"\[5, 3\] in the checkpoint, \[9, 3\]"):
        ckpt.load(url, {"w": torch.ones(9, 3)})


def test_the_state_of_an_optimizer_is_padded_like_its_parameter(url: str) -> None:
    def made(rows: int, steps: int) -> dict[str, Any]:
        net = nn.Embedding(rows, 3)
        torch.nn.init.constant_(net.weight, 1.0)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(steps):
            net(torch.arange(5)).square().sum().backward()
            optimizer.step()
        return {"net": net, "optimizer": optimizer}

    saved = made(8, 2)
    before = saved["optimizer"].state[saved["net"].weight]
    ckpt.save(url, saved, layout=padded(5))
    for rows, layout in ((12, padded(5)), (5, None), (8, padded(5))):
        other = made(rows, 0)
        ckpt.load(url, other, layout=layout)
        now = other["optimizer"].state[other["net"].weight]
        assert same(now["step"], before["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert now[key].shape == (rows, 3)
            assert described(now[key][:5]) == described(before[key][:5]) and not now[key][8:].any()


# ------------------------------------------------------------------------------------------------- experts and pipelines


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(3, 4, bias=False)
        self.w2 = nn.Linear(4, 3)


def each(count: int, seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"experts": nn.ModuleList(Expert() for _ in range(count)), "router": nn.Linear(3, count)})


def stack(dim: int | None, count: int = 4) -> Layout:
    return Layout({"ep": 1}, rules=[("*", Replicate())], numbered=[experts("experts.{n}", count=count, ranks=1, stack=dim)])


PARTS = ("w1.weight", "w2.weight", "w2.bias")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("chunk", [64 << 20, 40, 16])
def test_stacked_experts_are_one_tensor(url: str, dim: int, chunk: int, chunks_of: Any) -> None:
    chunks_of(chunk)
    model = each(4, 0)
    expected = {f"m.experts.{p}": torch.stack([e.get_parameter(p) for e in model["experts"]], dim) for p in PARTS}
    expected |= {f"m.router.{p}": t for p, t in model["router"].state_dict().items()}
    save_exactly(url, {"m": model}, expected, layout=stack(dim))
    other = each(4, 1)
    ckpt.load(url, {"m": other}, layout=stack(dim))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    plain = {p: torch.zeros_like(expected[f"m.experts.{p}"]) for p in PARTS}
    ckpt.load(url, {"m": {"experts": plain}}, only="m.experts.*")
    assert all(described(plain[p]) == described(expected[f"m.experts.{p}"]) for p in PARTS)


def test_experts_that_are_stacked_in_the_model(url: str) -> None:
    weights = pattern(torch.float32, 4, 2, 3)
    ckpt.save(url, {"experts": {"w": weights}}, layout=Layout({"ep": 1}, rules=[("*", Shard(0, "ep"))]))
    state = {"experts": [{"w": torch.zeros(2, 3)} for _ in range(4)]}
    ckpt.load(url, state, layout=stack(0))
    assert [described(e["w"]) for e in state["experts"]] == [described(w) for w in weights]


def test_stacked_experts_and_their_optimizer(url: str) -> None:
    def made(seed: int, steps: int) -> dict[str, Any]:
        model = each(4, seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
        for _ in range(steps):
            x = torch.ones(2, 3)
            for n, expert in enumerate(model["experts"][:3]):  # the last has no state
                x = x + expert.w2(expert.w1(x)) * n
            model["router"](x).sum().backward()
            optimizer.step()
        return {"m": model, "o": optimizer}

    saved = made(0, 2)
    for parameter in saved["m"]["experts"][3].parameters():
        saved["o"].state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    found = save(url, saved, layout=stack(0))
    assert found["o.state.m.experts.w1.weight.exp_avg"][1] == (4, 4, 3)
    assert found["o.state.m.experts.w1.weight.step"] == described(torch.tensor([2.0, 2.0, 2.0, 0.0]))
    for steps in (0, 1):
        other = made(1, steps)
        ckpt.load(url, other, layout=stack(0), strict=steps == 0)
        assert other["o"].param_groups[0]["lr"] == 0.1
        for (name, mine), theirs in zip(other["m"].named_parameters(), saved["m"].parameters(), strict=True):
            now, then = other["o"].state[mine], saved["o"].state[theirs]
            assert same(dict(sorted(now.items())), dict(sorted(then.items()))), name


def test_a_part_of_a_stack_cannot_be_missing(url: str) -> None:
    """Three of four experts have a tensor: the stored one would have a hole."""
    state = {"experts": [{"w": torch.ones(2)} for _ in range(3)]}
    with pytest.raises(CoverageError, match=r"rank 0 has 6 of the 8 elements .* \(tensor experts\.w\)"):
        ckpt.save(url, state, layout=stack(0))
    with pytest.raises(CkptError):
        ckpt.open(url)


@pytest.mark.parametrize("virtual", [1, 2])
def test_pipelines_count_their_layers_globally(url: str, virtual: int) -> None:
    pattern_text = "{chunk}.layers.{n}" if virtual > 1 else "layers.{n}"
    layout = around(Replicate(), numbered=[pipeline(pattern_text, layers=4, stages=1, virtual=virtual)])
    weights = [pattern(torch.float32, 3, seed=i) for i in range(4)]
    state: dict[str, Any] = (
        {"layers": list(weights), "head": weights[0] + 1}
        if virtual == 1
        else {"chunks": [{"layers": weights[:2]}, {"layers": weights[2:], "head": weights[0] + 1}]}
    )
    prefix = "" if virtual == 1 else "chunks."
    head = "head" if virtual == 1 else "chunks.1.head"
    save_exactly(url, state, {f"{prefix}layers.{i}": w for i, w in enumerate(weights)} | {head: weights[0] + 1}, layout=layout)
    plain: dict[str, Any] = {"layers": [torch.zeros(3) for _ in range(4)]}
    rename = {f"{prefix}layers.*": "layers.*"}
    ckpt.load(url, plain, rename=rename, only="layers.*")
    assert same(plain["layers"], weights)


# ------------------------------------------------------------------------------------------------------------ refused


REFUSED: dict[str, tuple[Layout, str]] = {
    "no rule": (Layout({"tp": 1}, rules=[("other.*", Replicate())]), "no rule of the layout matches"),
    "no such dimension of the mesh": (Layout({"tp": 1}, rules=[("*", Shard(0, "dp"))]), "dp"),
    "no such dimension of the tensor": (around(Shard(2, "tp")), "dimensions"),
    "no such mesh": (around(Shard(0, "tp"), OnMesh("none")), "no mesh 'none'"),
    "flat without a shape": (around(Flat("dp")), "GlobalShape"),
    "more real than there is": (around(Padded(0, 7)), "fewer than the 7 real"),
    "sizes of another sum": (around(Shard(0, "tp", sizes=(5,))), "shape"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layouts_that_do_not_fit(url: str, kind: str) -> None:
    layout, words = REFUSED[kind]
    with pytest.raises((LayoutError, CoverageError)) as caught:
        ckpt.save(url, {"w": torch.ones(6, 4)}, layout=layout)
    assert words in str(caught.value)
    assert re.search(r"tensor w\b", str(caught.value))
    with pytest.raises(CkptError):
        ckpt.open(url)


def test_layouts_do_not_touch_values(url: str) -> None:
    layout = around(Shard(0, "tp"))
    ckpt.save(url, {"w": torch.ones(2), "step": 3, "own": ckpt.PerRank(torch.ones(3))}, layout=layout)
    state = {"w": torch.zeros(2), "step": 0, "own": ckpt.PerRank(None)}
    ckpt.load(url, state, layout=layout)
    assert state["step"] == 3 and same(state["own"].value, torch.ones(3))  # type: ignore[attr-defined]


def test_missing_names_are_those_of_the_checkpoint(url: str) -> None:
    ckpt.save(url, {"experts": {"w": torch.ones(4, 2)}})
    state = {"experts": [{"w": torch.zeros(2), "v": torch.zeros(2)} for _ in range(4)]}
    with pytest.raises(NamesError, match=r"\n    experts\.v "):
        ckpt.load(url, state, layout=stack(0))
