"""Engines filled from a checkpoint through a recording of their ``load_weights``: they have what the loader itself gives, bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import ckpt
from ckpt.errors import CkptError, CoverageError, LayoutError, MismatchError, NamesError, StateError, UsageError
from ckpt.integrations.engines import Recorded, record
from tests.distributed.ranks import Ranks
from tests.integrations.engine_zoo import Sizes, Tp, ZooModel

STAGED = {
    "buffered": "copied into a tensor that is no parameter",
    "computed": "computes with it (exp)",
    "decided": "asks for its values",
    "in_place": "computes with it (mul_)",
    "indexed": "computes with it (index)",
    "joined": "computes with it (cat)",
    "narrow_cast": "converted to float16",
    "numbered": "asks for its values (arithmetic with item())",
    "over": "is filled again by more.over",
    "put": "computes with it (index_put_)",
}
"""Loaders that cannot be recorded, and why."""
STRAIGHT = (
    *("again", "bits", "broadcast", "cast", "chunked", "contiguous", "conv", "divided", "every_other", "transposed", "twice"),
    *("wide_cast", "zeroed"),
)


def stored(sizes: Sizes, folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors in Hugging Face's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: (torch.randn(shape, generator=generator) * 30).to(dtype) for name, (shape, dtype) in sizes.checkpoint().items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    return tensors


def described(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def bits(module: nn.Module) -> dict[str, bytes]:
    everything = [*module.named_parameters(), *module.named_buffers()]
    return {name: bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for name, t in everything}


def by_itself(sizes: Sizes, tp: Tp, tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """What the model's own loader gives."""
    model = ZooModel(sizes, tp)
    model.load_weights(tensors.items())
    return bits(model)


def filled(url: Path, sizes: Sizes, tp: Tp, **options: Any) -> tuple[dict[str, bytes], Recorded]:
    model = ZooModel(sizes, tp)
    recorded = record(model.load_weights, ckpt.open(url), model, **options)
    ckpt.load(url, recorded.state, cast=True)
    recorded.finish()
    return bits(model), recorded


# ---------------------------------------------------------------------------------------------------------------- the zoo


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["cut", "ep-tied"])
def test_every_kind_of_layer_is_loaded_straight(tmp_path: Path, size: int, dtype: torch.dtype, how: str) -> None:
    """With 4 ranks, two have the same heads of keys and values, and one has nothing of the vocabulary but padding."""
    sizes = Sizes(dtype=dtype, ep=how != "cut", tied=how != "cut")
    tensors = stored(sizes, tmp_path)
    for rank in range(size):
        got, recorded = filled(tmp_path, sizes, Tp(rank, size))
        assert got == by_itself(sizes, Tp(rank, size), tensors)
        assert recorded.fallbacks == recorded.overwritten == recorded.unwritten == {} and recorded.staged_bytes == 0
        experts = {name for name in recorded.unused if ".experts." in name}
        assert len(experts) == (12 - 12 // size if sizes.ep else 0)
        words = {f"{name}.weight" for name in ("model.embed_tokens", "lm_head")} & tensors.keys()
        past = words if rank * 4 * -(-10 // (4 * size)) >= 10 else {"lm_head.weight"} - tensors.keys()
        assert set(recorded.unused) - experts == past & tensors.keys()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_sizes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([1, 2, 4]))
    kv = draw(st.sampled_from([1, 2, 4]))
    sizes = Sizes(
        hidden=draw(st.integers(1, 6)),
        head=draw(st.integers(1, 3)),
        heads=max(kv, size) * draw(st.integers(1, 2)),
        kv_heads=kv,
        inner=size * draw(st.integers(1, 3)),
        vocabulary=draw(st.integers(1, 20)),
        padded_to=draw(st.sampled_from([1, 2, 5])),
        experts=size * draw(st.integers(1, 2)),
        ep=draw(st.booleans()),
        tied=draw(st.booleans()),
        stored=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        more=tuple(draw(st.lists(st.sampled_from([*STAGED, *STRAIGHT]), max_size=3, unique=True))),
    )
    folder = tmp_path_factory.mktemp("model")
    tensors = stored(sizes, folder)
    tp = Tp(draw(st.integers(0, size - 1)), size)
    assert filled(folder, sizes, tp)[0] == by_itself(sizes, tp, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_loaders(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = Sizes(dtype=dtype, more=(*STAGED, *STRAIGHT))
    tensors = stored(sizes, tmp_path)
    got, recorded = filled(tmp_path, sizes, Tp(0, 1))
    assert got == by_itself(sizes, Tp(0, 1), tensors)
    reasons = {name.removeprefix("more."): reason for name, reason in recorded.fallbacks.items()}
    assert [name for name in STAGED if STAGED[name] not in reasons[name]] == [] and reasons.keys() == STAGED.keys()
    assert recorded.overwritten == {"more.again": "more.again"} and recorded.staged_bytes == 10 * 6 * 4 * 4
    assert recorded.unwritten == {f"params.more_{n}": f"params.more_{n}: 24 of 24 elements" for n in ("decided", "numbered")}
    assert f"more.computed: {reasons['computed']}" in str(recorded)


def test_tensors_are_loaded_into_the_engines_own_memory(tmp_path: Path) -> None:
    sizes = Sizes()
    stored(sizes, tmp_path)
    model = ZooModel(sizes, Tp(0, 2))
    recorded = record(model.load_weights, ckpt.open(tmp_path), model)
    own = {p.untyped_storage().data_ptr() for p in model.params.values()}
    memory = [block for part in recorded.state.values() for block in part.blocks]
    assert {m.untyped_storage().data_ptr() for m in memory} == own
    assert ckpt.load(tmp_path, recorded.state).bytes_needed == sum(m.nbytes for m in memory)


def test_recording_moves_nothing_and_holds_for_the_next_checkpoint(tmp_path: Path) -> None:
    sizes = Sizes(more=("computed", "twice"), dtype=torch.bfloat16)
    old, new = (stored(sizes, tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    model = ZooModel(sizes, Tp(1, 2))
    model.load_weights(old.items())
    recorded = record(model.load_weights, ckpt.open(tmp_path / "old"), model)
    assert bits(model) == by_itself(sizes, Tp(1, 2), old)
    for name, tensors in (("new", new), ("old", old)):
        ckpt.load(tmp_path / name, recorded.state, cast=True)
        recorded.finish()
        assert bits(model) == by_itself(sizes, Tp(1, 2), tensors)


def test_any_tensor_may_be_staged(tmp_path: Path) -> None:
    sizes = Sizes()
    tensors = stored(sizes, tmp_path)
    got, recorded = filled(tmp_path, sizes, Tp(0, 2), stage=["*.experts.*", "model.norm.weight"])
    assert got == by_itself(sizes, Tp(0, 2), tensors)
    assert recorded.fallbacks.keys() == {name for name in tensors if ".experts." in name or name == "model.norm.weight"}


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    stored(Sizes(), tmp_path / "one")
    stored(Sizes(inner=16), tmp_path / "other")
    model = ZooModel(Sizes(), Tp(0, 1))
    recorded = record(model.load_weights, ckpt.open(tmp_path / "one"), model)
    before = bits(model)
    with pytest.raises(MismatchError, match=r"shape \[16, 8\] in the checkpoint, \[12, 8\] in the state"):
        ckpt.load(tmp_path / "other", recorded.state)
    assert bits(model) == before


# ------------------------------------------------------------------------------------------------------------- what is missing

W = torch.arange(24.0).reshape(6, 4)


class OneLayer(nn.Module):
    """A parameter, and whatever loads it."""

    def __init__(self, load: Callable[[OneLayer, str, Tensor], None], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in (shapes or {"w": (6, 4)}).items():
            setattr(self, name, nn.Parameter(torch.full(shape, -1.0), requires_grad=False))
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            self.load(self, name, loaded)


def copying(layer: OneLayer, name: str, loaded: Tensor) -> None:
    getattr(layer, name).data.copy_(loaded)


def load_into(layer: OneLayer, tensors: dict[str, Tensor], url: str, **options: Any) -> Recorded:
    recorded = record(layer.load_weights, described(tensors), layer, **options)
    ckpt.save(url, tensors)
    ckpt.load(url, recorded.state, cast=True)
    recorded.finish()
    return recorded


def test_what_nothing_fills_is_named() -> None:
    layer = OneLayer(copying, w=(6, 4), v=(2, 2))
    with pytest.raises(CoverageError, match=r"does not fill 1 parameter\n  v: 4 of 4 elements"):
        record(layer.load_weights, described({"w": W}), layer)
    assert record(layer.load_weights, described({"w": W}), layer, optional="v").unwritten == {"v": "v: 4 of 4 elements"}


def test_arguments_in_another_order_are_named_and_a_url_is_opened(tmp_path: Path) -> None:
    layer = OneLayer(copying, w=(6, 4))
    ckpt.save(tmp_path / "w", {"w": W})
    assert record(layer.load_weights, tmp_path / "w", layer).unused == ()
    wrong: Any = layer
    with pytest.raises(UsageError, match="load_weights is a function, not OneLayer"):
        record(wrong, described({"w": W}), layer)
    wrong = layer.load_weights
    with pytest.raises(UsageError, match="the engine is a module, or a dict of parameters, not method"):
        record(layer.load_weights, described({"w": W}), wrong)
    with pytest.raises(NamesError, match=r"stage= has globs that match no tensor of the checkpoint: 'w\.\*'"):
        record(layer.load_weights, described({"w": W}), layer, stage=["w.*", "w"])


def test_staged_tensors_without_values_do_not_reach_the_engine(tmp_path: Path) -> None:
    layer = OneLayer(copying, w=(6, 4))
    recorded = record(layer.load_weights, described({"w": W}), layer, stage="w")
    before = layer.w.clone()
    with pytest.raises(UsageError, match="staged tensors were not loaded yet: w"):
        recorded.finish()
    assert torch.equal(layer.w, before)
    ckpt.save(tmp_path / "w", {"w": W})
    ckpt.load(tmp_path / "w", recorded.state)
    recorded.finish()
    assert torch.equal(layer.w, W)


def test_a_part_that_nothing_fills_is_named() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w.data[1:, :3].copy_(loaded[1:, :3])

    layer = OneLayer(load)
    with pytest.raises(CoverageError, match=r"w\[0:1,0:4\], …: 9 of 24 elements"):
        record(layer.load_weights, described({"w": W}), layer)


def test_buffers_count_if_they_are_filled_in_part() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w.data.copy_(loaded)
        layer.b[:2].copy_(loaded[0, :2])

    layer = OneLayer(load)
    layer.register_buffer("b", torch.zeros(3))
    layer.register_buffer("c", torch.zeros(3))
    with pytest.raises(CoverageError, match=r"b\[2:3\]: 1 of 3 elements"):
        record(layer.load_weights, described({"w": W}), layer)


def test_what_values_decide_about_has_to_be_filled_in_the_end() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        if name == "w" or loaded.sum() < 0:
            copying(layer, name, loaded)

    tensors = {"w": W, "v": torch.ones(2, 2)}
    layer = OneLayer(load, w=(6, 4), v=(2, 2))
    with pytest.raises(CoverageError, match="v: 4 of 4 elements"):
        load_into(layer, tensors, "inprocess://decided")
    assert load_into(layer, tensors | {"v": -torch.ones(2, 2)}, "inprocess://decided").fallbacks.keys() == {"v"}
    assert torch.equal(layer.w, W) and torch.equal(layer.v, -torch.ones(2, 2))


def test_staged_tensors_may_not_overwrite_others() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        (layer.w.data[:3] if name == "a" else layer.w.data[2:]).copy_(loaded + 1 if loaded.abs().max() > 1 and name == "b" else loaded)

    def sure(layer: OneLayer, name: str, loaded: Tensor) -> None:
        if name == "a":
            layer.w.data[:3].copy_(loaded)
        else:
            layer.w.data[2:].copy_(loaded if loaded.max() > 1 else loaded + 1)

    tensors = {"a": W[:3], "b": W[2:]}
    with pytest.raises(CoverageError, match="wrote staged tensors over parts of a parameter that others fill") as refused:
        load_into(OneLayer(sure), tensors, "inprocess://over")
    assert "stage those too" in str(refused.value)
    layer = OneLayer(load)
    assert load_into(layer, tensors, "inprocess://over").fallbacks.keys() == {"a", "b"}  # both are asked for values
    assert torch.equal(layer.w, torch.cat([W[:2], W[2:] + 1]))


def test_what_is_overwritten_is_named() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w.data.copy_(loaded)

    layer = OneLayer(load)
    recorded = load_into(layer, {"first": W, "last": W + 1}, "inprocess://last")
    assert recorded.overwritten == {"first": "last"} and recorded.unused == ("first",) and recorded.fallbacks == {}
    assert torch.equal(layer.w, W + 1)


def test_the_last_of_writes_that_overlap_counts() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        (layer.w.data[:4] if name == "first" else layer.w.data[2:]).copy_(loaded)

    layer = OneLayer(load)
    recorded = load_into(layer, {"first": W[:4], "last": -W[:4]}, "inprocess://overlap")
    assert recorded.fallbacks == {
        "first": "a part of w that it fills is filled again by last",
        "last": "it fills a part of w that first has filled before",
    }
    assert torch.equal(layer.w, torch.cat([W[:2], -W[:4]]))


def test_a_computed_tensor_comes_before_one_that_overwrites_it() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w.data.copy_(loaded * 2 if name == "first" else loaded)

    layer = OneLayer(load)
    assert load_into(layer, {"first": W, "last": -W}, "inprocess://before").fallbacks.keys() == {"first", "last"}
    assert torch.equal(layer.w, -W)


def test_zeros_written_after_a_tensor_stay() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w.data.copy_(loaded)
        layer.w.data[4:].zero_()

    layer = OneLayer(load)
    recorded = load_into(layer, {"w": W}, "inprocess://zeros")
    assert recorded.fallbacks == {"w": "a part of w that it fills is filled again by load_weights itself"}
    assert torch.equal(layer.w, torch.cat([W[:4], torch.zeros(2, 4)]))


def test_places_of_different_dtypes_get_the_stored_values() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w.data.copy_(loaded)
        layer.short.copy_(loaded)

    layer = OneLayer(load)
    layer.register_buffer("short", torch.zeros(6, 4, dtype=torch.float16))
    tensor = W + 1e-3
    assert load_into(layer, {"w": tensor}, "inprocess://half").fallbacks == {"w": "it goes to parameters of different dtypes"}
    assert torch.equal(layer.w, tensor) and torch.equal(layer.short, tensor.half())


def test_memory_that_a_loader_keeps_between_tensors_is_followed() -> None:
    """q and k are joined when both are there, which only the buffer between them shows."""
    kept: dict[str, Tensor] = {}

    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        buffer = kept.setdefault("buffer", torch.empty(6, 4))
        (buffer[:3] if name == "q" else buffer[3:]).copy_(loaded)
        if name == "k":
            layer.w.data.copy_(kept.pop("buffer").t().contiguous().t())

    layer = OneLayer(load)
    assert load_into(layer, {"q": W[:3], "k": W[3:]}, "inprocess://kept").fallbacks.keys() == {"q", "k"}
    assert torch.equal(layer.w, W)


# ------------------------------------------------------------------------------------------------------------- what is refused


def test_a_parameter_that_is_replaced() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        layer.w = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        layer.w.data.copy_(loaded.t())

    layer = OneLayer(load)
    with pytest.raises(StateError, match="load_weights replaced parameters instead of filling them: w"):
        record(layer.load_weights, described({"w": W}), layer)


def test_a_parameter_without_memory() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    with pytest.raises(StateError, match="meta device"):
        record(lambda weights: None, described({"w": W}), layer)


def test_a_parameter_with_elements_in_one_place() -> None:
    shared = torch.zeros(1, 4).expand(6, 4)
    with pytest.raises(StateError, match="does not have its memory for itself"):
        record(lambda weights: None, described({"w": W}), {"w": shared})


def test_an_empty_checkpoint() -> None:
    with pytest.raises(UsageError, match="no tensors"):
        record(lambda weights: None, {}, {"w": torch.zeros(2)})


def test_errors_of_the_loader_are_its_own() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        raise KeyError(f"no parameter {name}")

    layer = OneLayer(load)
    with pytest.raises(KeyError, match="no parameter w"):
        record(layer.load_weights, described({"w": W}), layer)


def test_a_question_that_the_loader_hushes_up_counts() -> None:
    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        try:
            large = bool(loaded.max() > 3)
        except Exception:  # noqa: BLE001  what a careless loader does
            large = False
        layer.w.data.copy_(loaded * 2 if large else loaded)

    layer = OneLayer(load)
    assert load_into(layer, {"w": W}, "inprocess://hushed").fallbacks == {"w": "load_weights asks for its values (__bool__)"}
    assert torch.equal(layer.w, W * 2)


def test_a_tensor_kept_from_the_recording_is_of_no_use_afterwards() -> None:
    kept: list[Tensor] = []

    def load(layer: OneLayer, name: str, loaded: Tensor) -> None:
        kept.append(loaded)
        copying(layer, name, loaded)

    layer = OneLayer(load)
    record(layer.load_weights, described({"w": W}), layer)
    with pytest.raises(CkptError, match="after the recording"):
        _ = kept[0] + 1


def test_a_state_of_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = OneLayer(copying)
    recorded = record(layer.load_weights, described({"w": W}), layer)
    part = recorded.state["w"]
    part.layout = replace(part.layout, mesh=ckpt.Mesh(("engine",), (1,), (3,)))
    ckpt.save("inprocess://rank", {"w": W})
    with pytest.raises(LayoutError, match="it has 1 parts here, where its layout gives rank 0 0"):
        ckpt.load("inprocess://rank", recorded.state)


# ------------------------------------------------------------------------------------------------------------- odd memories


def test_parameters_with_padded_rows_and_turned_ones() -> None:
    padded, turned = torch.full((6, 8), -1.0)[:, :4], torch.full((4, 6), -1.0).t()
    params = {"a": padded, "b": turned, "same": padded}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            params[name].copy_(loaded)

    recorded = record(load, described({"a": W, "b": W + 1}), params)
    ckpt.save("inprocess://padded", {"a": W, "b": W + 1})
    ckpt.load("inprocess://padded", recorded.state)
    recorded.finish()
    assert torch.equal(padded, W) and torch.equal(turned, W + 1)
    assert (padded.as_strided((6, 8), (8, 1))[:, 4:] == -1).all()


def test_parameters_in_one_buffer() -> None:
    buffer = torch.full((100,), -1.0)
    params = {"a": buffer[10:34].view(6, 4), "b": buffer[34:58].view(4, 6), "part of b": buffer[34:40]}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            params[name].copy_(loaded if name == "a" else loaded.t())

    recorded = record(load, described({"a": W, "b": W + 1}), params)
    ckpt.save("inprocess://buffer", {"a": W, "b": W + 1})
    ckpt.load("inprocess://buffer", recorded.state)
    assert torch.equal(params["a"], W) and torch.equal(params["b"], (W + 1).t())
    assert (buffer[:10] == -1).all() and (buffer[58:] == -1).all()


def test_small_dtypes_keep_their_bits() -> None:
    """Weights of eight bits, viewed as bytes on the way as engines do, and packed ones."""
    eight = (torch.arange(256, dtype=torch.int16) - 128).to(torch.int8).reshape(16, 16)
    tensors = {"e4m3": eight.view(torch.float8_e4m3fn), "int": eight, "e5m2": eight.view(torch.float8_e5m2)}
    params = {"e4m3": torch.zeros(8, 16, dtype=torch.uint8), "int": torch.zeros(16, 16, dtype=torch.int8)}
    params["e5m2"] = torch.zeros(16, 16, dtype=torch.float8_e5m2)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            params[name].copy_(loaded.view(torch.uint8)[8:] if name == "e4m3" else loaded)

    recorded = record(load, described(tensors), params)
    assert recorded.fallbacks == {}
    ckpt.save("inprocess://small", tensors)
    ckpt.load("inprocess://small", recorded.state)
    assert torch.equal(params["e4m3"], eight.view(torch.uint8)[8:])
    assert torch.equal(params["int"], eight) and torch.equal(params["e5m2"].view(torch.int8), eight)


# ------------------------------------------------------------------------------------------------------------- ranks


def tiny_engine() -> Any:
    path = Path(__file__).parents[2] / "examples" / "tiny_engine.py"
    spec = importlib.util.spec_from_file_location("examples_tiny_engine", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_both_ways(url: str, dtype: torch.dtype) -> tuple[bool, list[str], int]:
    """On a rank of an engine: with its loader and through a recording."""
    import torch.distributed as dist

    tiny = tiny_engine()
    config = tiny.EngineConfig(vocabulary=70, dim=16, hidden=24, layers=2, heads=4, kv_heads=2)
    one, other = (tiny.TinyEngine(config, dist.group.WORLD, dtype) for _ in range(2))
    view = ckpt.open(url)
    one.load_weights((name, view[name].read()) for name in view)
    recorded = record(other.load_weights, view, other, after=lambda: dist.barrier())
    report = ckpt.load(url, recorded.state, cast=True)
    recorded.finish()
    return bits(one) == bits(other), list(recorded.fallbacks), report.bytes_needed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_of_an_engine_load_together(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = {"model.embed_tokens.weight": (70, 16), "lm_head.weight": (70, 16), "model.norm.weight": (16,)}
    for n in range(2):
        attention = {f"{p}_proj": (size, 16) for p, size in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
        shapes |= {f"model.layers.{n}.self_attn.{p}.weight": shape for p, shape in attention.items()}
        shapes |= {
            f"model.layers.{n}.mlp.{p}_proj.weight": shape for p, shape in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24)))
        }
        shapes |= {f"model.layers.{n}.{p}_layernorm.weight": (16,) for p in ("input", "post_attention")}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, str(tmp_path / "model.safetensors"))
    for size in (2, 4):
        results = Ranks(4).run(size, load_both_ways, str(tmp_path), dtype)
        assert all(same and not fallbacks for same, fallbacks, _ in results)
