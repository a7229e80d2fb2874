"""A trainer publishes, engines follow: through ``EngineSink``, and as vLLM, SGLang, verl and torchft call their adapters.

torchft is the real one where it is installed; else, and for the others, there are stubs with their signatures.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ckpt
from ckpt.errors import CkptError, ConflictError, CoverageError, DeadlineError, RankFailedError, StateError, TornError, UsageError
from ckpt.integrations.engines import EngineSink
from ckpt.live import Source
from ckpt.live.sink import take_step
from tests.distributed.ranks import Ranks
from tests.integrations import engine_stubs
from tests.integrations.engine_zoo import Sizes, Tp, ZooModel
from tests.integrations.test_engines import bits, by_itself, stored

SIZES = Sizes(more=("computed", "twice"), dtype=torch.bfloat16)
SECRET = "for these tests"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIVE_SECRET", SECRET)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries, or stubs in their places."""
    for name, module in engine_stubs.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in ("vllm", "verl", "torchft"):
        sys.modules.pop(f"ckpt.integrations.{name}", None)


class Trainer:
    """Publishes a model's tensors, of another seed at each step."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self.prefix = prefix
        self.tensors = stored(SIZES, folder)
        self.state: dict[str, Any] = {prefix + name: tensor.clone() for name, tensor in self.tensors.items()}
        self.source = Source("tcp://127.0.0.1:0/actor", self.state, job=ckpt.Job(timeout=20))

    def publish(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tensors = {name: torch.randn(t.shape, generator=generator) * 30 for name, t in self.tensors.items()}
        for name, tensor in tensors.items():
            self.state[self.prefix + name].copy_(tensor)
        self.source.publish(step, capture="eager").result(20)
        return tensors


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "model")
    with made.source:
        yield made


# ------------------------------------------------------------------------------------------------------------- EngineSink


def test_an_engine_follows_a_trainer(trainer: Trainer) -> None:
    model = ZooModel(SIZES, Tp(1, 2))
    with EngineSink(trainer.source.address, model.load_weights, model, trainer.folder) as sink:
        assert sink.version is None and sink.recorded.fallbacks.keys() == {"more.computed"}
        for step in (1, 2):
            tensors = trainer.publish(step)
            assert sink.take().step == step
            assert sink.version is not None and sink.version.step == step
            assert bits(model) == by_itself(SIZES, Tp(1, 2), tensors)
        before = bits(model)
        with pytest.raises(DeadlineError):
            sink.take(newer_than=sink.version, timeout=0.3)
        assert bits(model) == before
        with pytest.raises(UsageError, match="newer_than= is a version, not 2"):
            sink.take(2)  # type: ignore[arg-type]


def test_engines_that_ask_for_a_step_get_it_or_a_later_one(trainer: Trainer) -> None:
    model = ZooModel(SIZES, Tp(1, 2))
    with EngineSink(trainer.source.address, model.load_weights, model) as sink:
        tensors = trainer.publish(2)
        with pytest.raises(DeadlineError):
            take_step(sink, 3, timeout=0.5)
        assert sink.version is not None and sink.version.step == 2  # a whole one, until there is what was asked for
        assert bits(model) == by_itself(SIZES, Tp(1, 2), tensors)
        tensors = trainer.publish(4)
        assert take_step(sink, 3, timeout=20).step == 4
        assert take_step(sink, None).step == 4
        assert bits(model) == by_itself(SIZES, Tp(1, 2), tensors)


def test_names_of_the_trainer(tmp_path: Path) -> None:
    made = Trainer(tmp_path / "model", "policy.")
    made.state["optimizer"] = torch.ones(3)
    model = ZooModel(SIZES, Tp(0, 1))
    options = {"rename": {"policy.*": "*"}, "only": ["model.*", "lm_head.*", "more.*"]}
    with made.source, EngineSink(made.source.address, model.load_weights, model, made.folder, **options) as sink:
        tensors = made.publish(1)
        sink.take()
        assert bits(model) == by_itself(SIZES, Tp(0, 1), tensors)


def test_names_come_from_the_source(trainer: Trainer) -> None:
    model, amounts = ZooModel(SIZES, Tp(1, 2)), list[tuple[int, int]]()
    with EngineSink(trainer.source.address, model.load_weights, model) as sink:
        with pytest.raises(UsageError, match="not known before the first update"):
            _ = sink.recorded
        with pytest.raises(DeadlineError):
            sink.take(timeout=0.2)
        for step in (1, 2):
            tensors = trainer.publish(step)
            assert sink.take(progress=lambda done, total: amounts.append((done, total))).step == step
            assert sink.recorded.fallbacks.keys() == {"more.computed"}
            assert bits(model) == by_itself(SIZES, Tp(1, 2), tensors)
    assert amounts and amounts[-1][0] == amounts[-1][1] > 0


def test_names_of_the_source_are_translated(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    made = Trainer(tmp_path / "model", "policy.")
    terms = "".join(f'[[term]]\nleft = "policy.{name}"\nright = "{name}"\n' for name in made.tensors)
    rules.write_text(f'left = "one"\nright = "hub"\n{terms}')
    model = ZooModel(SIZES, Tp(0, 1))
    with made.source, EngineSink(made.source.address, model.load_weights, model, names=rules, convention="hub") as sink:
        tensors = made.publish(1)
        sink.take()
        assert bits(model) == by_itself(SIZES, Tp(0, 1), tensors)


def test_an_engine_that_could_not_finish_says_so(trainer: Trainer) -> None:
    model, fail = ZooModel(SIZES, Tp(0, 1)), [True]

    def after() -> None:
        if fail[0]:
            raise CoverageError("not now")

    with EngineSink(trainer.source.address, model.load_weights, model, trainer.folder, after=after) as sink:
        tensors = trainer.publish(1)
        with pytest.raises(CoverageError, match="not now"):
            sink.take()
        with pytest.raises(TornError, match="parts of a version only"):
            _ = sink.version
        fail[0] = False
        assert sink.take().step == 1 and sink.version is not None
        assert bits(model) == by_itself(SIZES, Tp(0, 1), tensors)


def two_ranks(address: str, folder: Path | None) -> tuple[int, dict[str, bytes]]:
    """One of them fails at first: while it records, where the names come from the source, else when it has the weights."""
    import torch.distributed as dist

    tp = Tp(dist.get_rank(), dist.get_world_size())
    model, fail = ZooModel(SIZES, tp), [dist.get_rank() == 1]

    def after() -> None:
        if fail[0]:
            raise CoverageError("not now")

    def load_weights(weights: Any) -> None:
        if folder is None:
            after()
        model.load_weights(weights)

    with EngineSink(address, load_weights, model, folder, secret=SECRET, job=ckpt.Job(timeout=20), after=after) as sink:
        with pytest.raises(CoverageError if fail[0] else RankFailedError, match="not now"):
            sink.take()
        if folder is None:
            assert sink.version is None
        else:
            with pytest.raises(TornError):  # on both ranks: an engine with half of a version must not answer
                _ = sink.version
        fail[0] = False
        return sink.take().step, bits(model)


@pytest.mark.parametrize("given", [True, False])
def test_ranks_of_an_engine_follow_together(trainer: Trainer, given: bool) -> None:
    tensors = trainer.publish(1)
    taken = Ranks(2).run(2, two_ranks, trainer.source.address, trainer.folder if given else None)
    assert taken == [(1, by_itself(SIZES, Tp(rank, 2), tensors)) for rank in range(2)]


# ------------------------------------------------------------------------------------------------------------- vLLM, SGLang


def test_vllm_calls(trainer: Trainer, libraries: None) -> None:
    adapter = importlib.import_module("ckpt.integrations.vllm")
    adapter.register()
    assert engine_stubs.WeightTransferEngineFactory.registered["ckpt"] == ("ckpt.integrations.vllm", "CkptWeightTransferEngine")
    model = ZooModel(SIZES, Tp(0, 2))
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(trainer.folder)))
    engine = adapter.CkptWeightTransferEngine(SimpleNamespace(backend="ckpt"), config, torch.device("cpu"), model)
    with pytest.raises(UsageError, match="before init_weight_transfer_engine"):
        engine.update_weights({})
    engine.init_transfer_engine(engine.init_info_cls(address=trainer.source.address, timeout=20, only=["*"]))
    for step in (1, 2):
        tensors = trainer.publish(step)
        engine.start_weight_update()
        engine.update_weights({"step": step, "progress": True})
        engine.finish_weight_update()
        assert bits(model) == by_itself(SIZES, Tp(0, 2), tensors)
    engine.shutdown()
    with pytest.raises(UsageError, match="ckpt.live.Source"):
        engine.trainer_send_weights(iter(()), {})


@pytest.mark.parametrize("library", engine_stubs.SIGNATURES)
def test_adapters_and_stubs_have_the_signatures_of_the_libraries(library: str, libraries: None) -> None:
    adapter = importlib.import_module(f"ckpt.integrations.{library}")
    own = [kind for kind in vars(adapter).values() if isinstance(kind, type) and kind.__module__ == adapter.__name__]
    for file, functions in engine_stubs.SIGNATURES[library]["functions"].items():
        module = sys.modules[file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")]
        for path, parameters in functions.items():
            owner, _, name = path.rpartition(".")
            stub = getattr(module, owner) if owner else module
            heirs = [kind for kind in own if name in vars(kind) and stub in kind.__mro__] if owner and name != "__init__" else []
            for each in (stub, *heirs):
                function = getattr(each, name)
                given = inspect.signature(function).parameters
                positional = [n for n, p in given.items() if p.kind is not p.VAR_KEYWORD]
                if each in heirs and len(positional) < len(given):  # its ** takes what the library gives by keyword alone
                    positional += [n for n, p in inspect.signature(getattr(stub, name)).parameters.items() if p.kind is p.KEYWORD_ONLY]
                bound = ["self"] if each in heirs and "self" not in parameters and isinstance(vars(each)[name], FunctionType) else []
                assert positional == [*bound, *parameters] or name == "init_process_group", (each, name)


# ------------------------------------------------------------------------------------------------------------- verl


def test_verl_calls(tmp_path: Path, libraries: None) -> None:
    verl = importlib.import_module("ckpt.integrations.verl")
    assert engine_stubs.CheckpointEngineRegistry.registered["ckpt"] is verl.CkptCheckpointEngine
    master, other, rollout = verl.CkptCheckpointEngine(64, is_master=True), verl.CkptCheckpointEngine(64), verl.CkptCheckpointEngine(64)
    gathered: list[str] = []

    async def received(step: int) -> dict[str, Tensor]:
        return {name: tensor.clone() async for name, tensor in rollout.receive_weights(step)}

    for step in (1, 2):
        tensors = {name: t + step for name, t in stored(SIZES, tmp_path / "model").items()}

        def weights(tensors: dict[str, Tensor] = tensors) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors.items():
                gathered.append(name)
                yield name, tensor

        metadata = [engine.prepare() for engine in (master, other, rollout)]
        actors, rollouts = verl.CkptCheckpointEngine.build_topology(2, 1, metadata)
        for engine, kwargs, n in ((master, actors, 0), (other, actors, 1), (rollout, rollouts, 0)):
            engine.init_process_group(**{key: values[n] for key, values in kwargs.items()})
        for engine in (master, other):
            asyncio.run(engine.send_weights(weights(), step))
        got = asyncio.run(received(step))
        assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in tensors)
        assert len(gathered) == 2 * len(tensors) * step  # the other rank gathers too
        for engine in (master, other, rollout):
            engine.finalize()
    with pytest.raises(UsageError, match="before init_process_group"):
        asyncio.run(anext(aiter(other.receive_weights())))
    master.close()
    rollout.close()


# ------------------------------------------------------------------------------------------------------------- torchft


def state_of(step: int) -> dict[str, Any]:
    return {
        "user": {
            "default": {
                "w": torch.full((3, 4), float(step)),
                "list": [torch.arange(step), "text"],
                "moments": {0: {"step": torch.tensor(1.0)}},
            }
        },
        "torchft": {"step": step, "batches_committed": 2 * step},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_torchft_calls(libraries: None) -> None:
    torchft = importlib.import_module("ckpt.integrations.torchft")
    soon, wait = timedelta(seconds=0.3), timedelta(seconds=20)
    one, other = (torchft.CkptTransport(wait, host="127.0.0.1") for _ in range(2))
    assert isinstance(one, sys.modules["torchft.checkpointing.transport"].CheckpointTransport)
    with pytest.raises(DeadlineError):
        other.recv_checkpoint(src_rank=0, metadata=one.metadata(), step=1, timeout=soon)
    for step in (1, 2, 2):  # a step that was not committed is sent again
        state = state_of(step)
        one.send_checkpoint(dst_ranks=[1], step=step, state_dict=state, timeout=wait)
        state["user"]["default"]["w"].zero_()  # training goes on
        one.disallow_checkpoint()
        got = other.recv_checkpoint(src_rank=0, metadata=one.metadata(), step=step, timeout=wait)
        assert same(got, state_of(step))
    with pytest.raises(ConflictError, match="step 1 was asked for, and the source serves step 2"):
        other.recv_checkpoint(src_rank=0, metadata=one.metadata(), step=1, timeout=wait)
    with pytest.raises(DeadlineError):
        other.recv_checkpoint(src_rank=0, metadata=one.metadata(), step=3, timeout=soon)
    with pytest.raises(StateError, match="object"):
        one.send_checkpoint(dst_ranks=[1], step=4, state_dict={"user": object()}, timeout=wait)
    one.shutdown()
    with pytest.raises(CkptError):
        other.recv_checkpoint(src_rank=0, metadata=one.metadata(), step=2, timeout=soon)
    other.shutdown()


def dtensors() -> Tensor:
    """On ranks of a replica: each has its part."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sys.modules.update(engine_stubs.modules())
    torchft = importlib.import_module("ckpt.integrations.torchft")
    wait = timedelta(seconds=20)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    transport = torchft.CkptTransport(wait, host="127.0.0.1", secret=SECRET)
    whole = torch.arange(24.0).reshape(6, 4)
    transport.send_checkpoint([1], 5, {"w": distribute_tensor(whole, mesh, [Shard(0)])}, wait)
    got = transport.recv_checkpoint(0, transport.metadata(), 5, wait)
    transport.shutdown()
    part: Tensor = got["w"]
    return part


def test_each_rank_of_a_replica_heals_by_itself() -> None:
    parts = Ranks(2).run(2, dtensors)
    assert torch.equal(torch.cat(parts), torch.arange(24.0).reshape(6, 4))
