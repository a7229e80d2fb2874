"""vLLM and SGLang built by stubs, filled from checkpoints of several formats: they have what their own loader gives, bit for bit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import ckpt
from ckpt.errors import CorruptError, CoverageError, UsageError
from ckpt.integrations.engines import EngineCheckpoint
from ckpt.live import Source
from tests.distributed.ranks import Ranks
from tests.integrations import engine_stubs
from tests.integrations.engine_zoo import Sizes, Tp, ZooModel
from tests.integrations.test_engines import bits, by_itself, stored

SIZES = Sizes(more=("computed", "twice"), dtype=torch.bfloat16)
TRAINED = {"only": ["model.*", "lm_head.*", "more.*"], "rename": {"policy.*": "*"}}
"""The options for a checkpoint of a training job."""


def vllm_loads(model: Any, folder: Path, options: dict[str, Any]) -> None:
    """As ``vllm serve FOLDER --load-format ckpt --model-loader-extra-config OPTIONS`` does."""
    adapter = importlib.import_module("ckpt.integrations.vllm")
    adapter.register()
    adapter.register()  # vLLM calls plug-ins more than once
    loader = engine_stubs.LOADERS["ckpt"](SimpleNamespace(load_format="ckpt", model_loader_extra_config=options))
    config = SimpleNamespace(model=str(folder), dtype=torch.bfloat16)
    loader.download_model(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)  # as vLLM does meanwhile
    try:
        loader.load_weights(model, config)
    finally:
        torch.set_default_dtype(before)
    assert {name for name, _ in loader.get_all_weights(config, model)} == SIZES.checkpoint().keys()


def sglang_loads(model: Any, folder: Path, options: dict[str, Any]) -> None:
    """As ``--model-loader-extra-config '{"ckpt": OPTIONS}'`` does, by the hook of the plug-in."""
    adapter = importlib.import_module("ckpt.integrations.sglang")
    adapter.register()
    adapter.register()
    hook = engine_stubs.HookRegistry.hooks["sglang.srt.model_loader.loader.get_model_loader"]
    original = lambda load_config, model_config: (load_config, model_config)  # noqa: E731
    untouched = engine_stubs.LoadConfig()
    assert hook(original, untouched, 1) == (untouched, 1)
    loader = hook(original, load_config=engine_stubs.LoadConfig(model_loader_extra_config={"ckpt": options, "num_threads": 2}))
    assert loader.load_config.model_loader_extra_config == {"num_threads": 2}
    assert loader.load_model(model_config=model_config(folder, model), device_config=None).processed


def model_config(folder: Path, model: Any, *, draft: bool = False) -> Any:
    """SGLang's."""
    return SimpleNamespace(model_path=str(folder), built=lambda: model, is_draft_model=draft)


LOADS = {"vllm": vllm_loads, "sglang": sglang_loads}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in engine_stubs.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in LOADS:
        sys.modules.pop(f"ckpt.integrations.{name}", None)


def saved(kind: str, tensors: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """The options for a checkpoint that has these tensors; nothing but the configuration is in the model's directory."""
    url = f"inprocess://{folder.name}/step" if kind == "inprocess" else str(folder.parent / kind)
    if kind == "hf":
        return {}
    if kind == "translated":
        ckpt.save(url, {"policy": dict(tensors)})
        rules = folder / "rules.toml"
        terms = "".join(f'[[term]]\nleft = "policy.{name}"\nright = "{name}"\n' for name in tensors)
        rules.write_text(f'left = "one"\nright = "hub"\n{terms}')
        return {"url": url, "names": str(rules), "convention": "hub"}
    if kind == "dcp":
        dcp.save({"policy": dict(tensors)}, checkpoint_id=url, no_dist=True)
    else:
        ckpt.save(url, {"policy": dict(tensors), "optimizer": {"m": torch.zeros(3)}, "step": 3})
    return {"url": url, **TRAINED}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", ["native", "inprocess", "translated", "dcp", "hf"])
@pytest.mark.parametrize("engine", LOADS)
def test_an_engine_starts_from_a_checkpoint(engine: str, kind: str, tmp_path: Path) -> None:
    tensors = stored(SIZES, tmp_path / "model")
    model = ZooModel(SIZES, Tp(1, 2))
    LOADS[engine](model, tmp_path / "model", saved(kind, tensors, tmp_path / "model"))
    assert bits(model) == by_itself(SIZES, Tp(1, 2), tensors)


def load_on_ranks(url: str) -> dict[str, bytes]:
    sys.modules.update(engine_stubs.modules())
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(world)), backend="gloo")
    sys.modules["vllm.distributed.parallel_state"].get_tp_group = lambda: SimpleNamespace(cpu_group=group)  # type: ignore[attr-defined]
    model = ZooModel(SIZES, Tp(rank, world))
    vllm_loads(model, Path("nowhere"), {"url": url, **TRAINED})
    return bits(model)


def test_ranks_of_a_tensor_parallel_group_load_together(tmp_path: Path) -> None:
    tensors = stored(SIZES, tmp_path / "model")
    url = str(saved("native", tensors, tmp_path / "model")["url"])
    assert Ranks(2).run(2, load_on_ranks, url) == [by_itself(SIZES, Tp(rank, 2), tensors) for rank in range(2)]


def test_damage_never_reaches_an_engine(tmp_path: Path) -> None:
    options = saved("native", stored(SIZES, tmp_path / "model"), tmp_path / "model")
    (file,) = Path(options["url"]).rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        vllm_loads(ZooModel(SIZES, Tp(0, 1)), tmp_path, options)
    with pytest.raises(CorruptError):
        dict(EngineCheckpoint(options.pop("url"), {}))


def test_options_are_checked(tmp_path: Path) -> None:
    stored(SIZES, tmp_path / "model")
    for options, message in (({"onyl": "*"}, "unknown options: 'onyl'"), ({"names": "llama"}, "names and convention go together")):
        with pytest.raises(UsageError, match=message):
            vllm_loads(ZooModel(SIZES, Tp(0, 1)), tmp_path / "model", options)


class Quantising(nn.Module):
    """One linear layer has no memory before its tensor comes, as with vLLM's online quantisation."""

    quant_config: Any = object()

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(1))
        self.linear = nn.Parameter(torch.empty(4, 4, device="meta"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(weights)
        self.linear = nn.Parameter((own["linear"] * 2).round())
        if "norm" in own:
            self.norm.data.copy_(own["norm"])
        return own.keys() - {"other"}


def test_a_model_that_is_quantised_while_it_is_loaded_takes_whole_tensors(tmp_path: Path) -> None:
    tensors = {"linear": torch.randn(4, 4), "norm": torch.randn(4)}
    ckpt.save(tmp_path / "a", dict(tensors))
    model = Quantising()
    EngineCheckpoint(str(tmp_path / "a"), {"optional": ["scale"]}).fill(model)
    assert torch.equal(model.linear, (tensors["linear"] * 2).round()) and torch.equal(model.norm, tensors["norm"])
    with pytest.raises(CoverageError, match="load_weights does not fill norm"):
        EngineCheckpoint(str(tmp_path / "a"), {"only": "linear", "optional": ["scale"]}).fill(Quantising())
    sglang_loads(model := Quantising(), tmp_path / "a", {})
    assert torch.equal(model.norm, tensors["norm"])


# ------------------------------------------------------------------------------------------------------------- SGLang follows


class Draft(nn.Module):
    """A draft model has its own part of a checkpoint, and takes embeddings from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(SIZES.hidden))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("model.norm.weight", "model.mtp.layers.0.norm"):
                self.norm.data.copy_(tensor)


def sglang_loader(options: Any, **config: Any) -> Any:
    adapter = importlib.import_module("ckpt.integrations.sglang")
    return adapter.CkptLoader(engine_stubs.LoadConfig(model_loader_extra_config={"ckpt": options} if options else {}, **config))


def test_a_draft_model_of_sglang_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    size = Draft().norm.shape
    for name in ("whole", "draft"):
        ckpt.save(tmp_path / name, {f"model.mtp.layers.{n}.norm": torch.full(size, n + 1.0) for n in range(2)})
    config = lambda: model_config(tmp_path / "draft", Draft(), draft=True)  # noqa: E731
    own, shared = {"optional": "embed"}, {"optional": "embed", "url": str(tmp_path / "whole")}
    for options in ({"url": "memory", "draft": own}, {"draft": shared}):
        for layer in range(2):
            draft = sglang_loader(options, draft_model_idx=layer).load_model(model_config=config(), device_config=None)
            assert torch.equal(draft.norm, torch.full(size, layer + 1.0))
    with pytest.raises(UsageError, match="the draft model has other weights than the model"):
        sglang_loader({"url": str(tmp_path / "whole")}).load_model(model_config=config(), device_config=None)
    with pytest.raises(CoverageError, match="does not fill 1 parameter\n  embed"):
        sglang_loader(None, draft_model_idx=0).load_model(model_config=config(), device_config=None)


def test_sglang_updates_from_a_disk(tmp_path: Path) -> None:
    """``update_weights_from_disk`` of an engine that was started with ``load_format=CkptLoader``; it may filter the weights by name."""
    tensors = stored(SIZES, tmp_path / "model")
    ckpt.save(tmp_path / "a", dict(tensors))
    for pick in (None, lambda name: "norm" not in name):
        model, loader = ZooModel(SIZES, Tp(1, 2)), sglang_loader(None)
        weights = loader._get_weights_iterator(SimpleNamespace(model_or_path=str(tmp_path / "a"), prefix=""))
        chosen = weights if pick is None else ((name, weight) for name, weight in weights if pick(name))
        loader.load_weights_and_postprocess(model, chosen, None)
        expected = by_itself(SIZES, Tp(1, 2), {name: t for name, t in tensors.items() if pick is None or pick(name)})
        assert bits(model) == expected


def test_sglang_follows_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIVE_SECRET", "for this test")
    adapter = importlib.import_module("ckpt.integrations.sglang")
    assert adapter.TAKE == "ckpt.integrations.sglang.take_weights"
    tensors = stored(SIZES, tmp_path / "model")
    state = {name: tensor.clone() for name, tensor in tensors.items()}
    model, posts = ZooModel(SIZES, Tp(1, 2)), list[int]()
    model.post_load_weights = lambda: posts.append(1)  # type: ignore[assignment]
    with Source("tcp://127.0.0.1:0/actor", state, job=ckpt.Job(timeout=20)) as source:
        for step in (1, 2):
            state["model.norm.weight"].add_(step)
            source.publish(step, capture="eager").result(20)
            request = adapter.update_request(source.address, step=step, timeout=20, progress=True)
            adapter.take_weights(model, request)
            assert bits(model) == by_itself(SIZES, Tp(1, 2), state)
        (held,) = adapter._sinks.values()
        adapter.take_weights(model, adapter.update_request(source.address, timeout=19))
        assert adapter._sinks[model][1] is not held[1]  # other options: a new connection
        assert len(posts) == 3
        with pytest.raises(UsageError, match="give convention="):
            adapter.take_weights(model, adapter.update_request(source.address, names="llama"))
        adapter.take_weights(model, adapter.update_request(source.address, timeout=19))  # after a wrong request
        with pytest.raises(UsageError, match="not a request for ckpt"):
            adapter.take_weights(model, list(tensors.items()))
        # drafts are handed the same request, which may come as a generator
        same = lambda **models: (row for row in adapter.update_request(source.address, timeout=19, models=models))  # noqa: E731
        draft = Draft()
        adapter.take_weights(draft, same(**{"*raft": None}))
        assert bits(draft) == bits(Draft())
        with pytest.raises(CoverageError, match="does not fill 1 parameter\n  embed"):
            adapter.take_weights(draft, same())
        adapter.take_weights(draft, same(**{"*raft": {"optional": "embed"}}))
        adapter.take_weights(model, same(**{"*raft": {"optional": "embed"}}))
        assert torch.equal(draft.norm, state["model.norm.weight"])
        assert bits(model) == by_itself(SIZES, Tp(1, 2), state)
        for sink in adapter._sinks.values():
            sink[1].close()
    with pytest.raises(UsageError, match="unknown options: 'steps'"):
        adapter.update_request("tcp://a:1/b", steps=7)
