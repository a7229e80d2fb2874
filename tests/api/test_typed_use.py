"""The public names as a typed program uses them. mypy (``make lint``) and pyright (``make types``) read this file: ``assert_type`` fails
where a type is another one, or ``Any``, and so does a ``type: ignore`` where nothing is wrong."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

import ckpt
from ckpt.errors import CkptError, NamesError, NotFoundError, ShapeError
from ckpt.live import Publication, PublishReport, ReshardReport, Sink, Source, SourceStatus, TakeReport, Version
from ckpt.monitors import Event
from ckpt.policies import AtSteps, EveryMinutes, EverySteps, KeepPolicy, Latest, Moment, SavePolicy, Tagged
from ckpt.training import Average, Batches, Generators, Inflight, LoaderState, ResumableLoader, Ticket

ROOT = Path(__file__).resolve().parents[2]
PYRIGHT = ROOT / ".types" / "bin" / "pyright"


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_saving_and_loading(tmp_path: Path) -> None:
    url = tmp_path / "step-1"
    model = torch.nn.Linear(3, 2)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 1}
    report = ckpt.save(url, state, only=["model.*", "step"], codec="zstd", job=ckpt.Job(timeout=60), progress=lambda done, total: None)
    assert_type(report, ckpt.SaveReport)
    assert_type((report.url, report.tensor_bytes, report.seconds, report.memory), tuple[str, int, float, int | None])
    loaded = ckpt.load(
        str(url), state, only="model.*", rename={"net.*": "model.*"}, cast=True, read=ckpt.ReadOptions(verify="full"), strict=False
    )
    assert_type(loaded, ckpt.LoadReport)
    assert_type((loaded.missing, loaded.cast), tuple[tuple[str, ...], tuple[str, ...]])
    handle = ckpt.save_async(url, {"w": torch.ones(4, 3)}, capture="eager", when_busy="refuse", job=ckpt.Job(threads=1))
    assert_type(handle, ckpt.SaveHandle)
    assert_type(handle.wait(60), bool)
    assert_type(handle.result(), ckpt.SaveReport)
    assert_type(handle.progress().phase, Literal["capture", "write", "done", "failed"])
    captured: Future[None] = handle.captured
    durable: Future[ckpt.SaveReport] = handle.durable
    assert captured.result() is None and durable.result().tensor_bytes == 48
    view = ckpt.open(url)
    assert_type(view, ckpt.View)
    stored = view["w"]
    assert_type(stored[0:2, 1], torch.Tensor)
    assert_type((stored.read(), stored.shape, stored.dtype, stored.name), tuple[torch.Tensor, tuple[int, ...], torch.dtype, str])
    assert [name for name, tensor in view.items() if tensor.shape == (4, 3)] == ["w"] and stored[0:2, 1].shape == (2,)
    layout = ckpt.Layout({"dp": 1, "tp": 1}, [("w", ckpt.Shard(0, "tp")), ("*", ckpt.Replicate())])
    assert_type(layout, ckpt.Layout)
    with pytest.raises(CkptError):
        ckpt.Layout({"tp": 1}, [("w", "tp")])  # type: ignore[list-item]
    own = ckpt.PerRank(random.random(), reshard=lambda values, rank, world: values[rank % len(values)])
    assert_type(ckpt.save(url, {"w": torch.ones(4), "own": own}, layout=layout, dry_run=True).dry_run, bool)


def test_what_is_wrong_is_seen_before_it_runs(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    with pytest.raises(AttributeError):
        ckpt.sav(tmp_path, state)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        ckpt.live.Sinc  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError, match="onyl"):
        ckpt.load(tmp_path, state, onyl="w")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="codecs"):
        ckpt.save_async(tmp_path, state, codecs="zstd")  # type: ignore[call-arg]
    with pytest.raises(CkptError):
        ckpt.load(tmp_path, state, read=ckpt.ReadOptions(verify="none"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kepe"):
        ckpt.Checkpointer(tmp_path, kepe=Latest(1))  # type: ignore[call-arg]
    ckpt.save(tmp_path / "run" / "step-1", state)
    with ckpt.Checkpointer(tmp_path / "run") as c, pytest.raises(TypeError, match="onyl"):
        c.restore(state, onyl="w")  # type: ignore[call-arg]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        ckpt.load(tmp_path / "nothing", {})
    err = caught.value
    assert_type((err.message, err.where, err.hint, err.exit_code), tuple[str, str | None, str | None, int])
    if isinstance(err, (NamesError, ShapeError)):
        assert_type(err, NamesError | ShapeError)
    assert isinstance(err, NotFoundError) and isinstance(err, FileNotFoundError)


class Evens(SavePolicy):
    """A policy of one's own."""

    def reason(self, now: Moment) -> str | None:
        return "even" if now.step % 2 == 0 else None


def test_the_loop(tmp_path: Path) -> None:
    events: list[Event] = []
    loader = ResumableLoader(DataLoader(Numbers(), batch_sampler=Batches(8, size=4)))
    assert_type(loader.epoch, int)
    state: dict[str, object] = {"w": torch.ones(3), "rng": Generators({"own": random.Random(1)}), "loader": loader}
    due: SavePolicy = EveryMinutes(10) | EverySteps(50) | AtSteps([3])
    stays: KeepPolicy = Latest(2) | Tagged()
    with ckpt.Checkpointer(tmp_path, save=due | Evens(), keep=stays, on_event=events.append, job=ckpt.Job(timeout=60)) as c:
        assert_type(c, ckpt.Checkpointer)
        assert_type(c.restore(state, only="w"), int | None)
        for n in range(1, 4):
            assert_type(c.step(n, state, metrics={"loss": 0.5}), bool)
            if c.preempted:
                break
        assert_type(c.save(4, lambda: state), ckpt.SaveHandle)
        c.wait()
        assert_type((c.latest, c.best("loss", mode="min")), tuple[int | None, int | None])
    assert_type(c.restored_from, ckpt.RestoredFrom | None)
    steps = [(step.number, step.url, step.metrics.get("loss")) for step in ckpt.list_steps(tmp_path) if step.committed]
    assert_type(steps, list[tuple[int | None, str, float | None]])
    assert_type(ckpt.latest(tmp_path), str | None)
    assert [number for number, _, _ in steps] == [3, 4] and [e.step for e in events if e.kind == "save.durable"] == [2, 3, 4]


def test_data(tmp_path: Path) -> None:
    work = Inflight(["a", "b"])
    ticket = work.take()
    assert_type(ticket, Ticket[str] | None)
    assert ticket is not None
    assert_type((ticket.number, ticket.item), tuple[int, str])
    plain = DataLoader(Numbers(), batch_size=2)
    average = Average(torch.nn.Linear(2, 2), decay=0.9)
    ckpt.save(tmp_path / "c", {"work": work, "average": average})
    assert ticket.item == "a" and isinstance(LoaderState, type) and len(plain) == 4


def test_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIVE_SECRET", "secret")
    state = {"w": torch.ones(3)}
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=60)) as source, Sink(source.address, {"w": torch.zeros(3)}) as sink:
        assert_type((source, sink), tuple[Source, Sink])
        publication = source.publish(1, capture="eager")
        assert_type(publication, Publication)
        assert_type(publication.result(60), Version)
        assert_type(publication.report, PublishReport | None)
        assert_type(sink.take(newer_than=sink.version, timeout=60), Version)
        assert_type((sink.report, sink.tensors()), tuple[TakeReport | None, dict[str, torch.Tensor]])
        assert_type(source.report(), SourceStatus)
    fresh = {"w": torch.zeros(3)}
    assert_type(ckpt.live.reshard(state, fresh), ReshardReport)
    assert torch.equal(fresh["w"], state["w"])


def test_whole_checkpoints(tmp_path: Path) -> None:
    url = tmp_path / "step-1"
    ckpt.save(url, {"w": torch.ones(2, 2)})
    checked = ckpt.verify(url)
    assert_type(checked, ckpt.VerifyReport)
    assert_type(checked.ok, bool)
    assert_type(ckpt.copy(url, tmp_path / "copy"), ckpt.CopyReport)
    assert_type(ckpt.convert(url, tmp_path / "torch", to="torch", dtype="bfloat16"), ckpt.ConvertReport)
    assert_type(ckpt.merge(tmp_path / "merged", [url, tmp_path / "copy"]), ckpt.MergeReport)
    assert_type(ckpt.export(tmp_path / "hf", {"w": torch.ones(2)}), ckpt.ExportReport)
    assert checked.ok


def pyright(*arguments: str) -> dict[str, Any]:
    command = [str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output: dict[str, Any] = json.loads(done.stdout)
    return output


@pytest.mark.slow
@pytest.mark.skipif(not PYRIGHT.exists(), reason="make types installs pyright")
def test_pyright_sees_the_types_of_all_public_names() -> None:
    """Those of others' base classes are unknown where the other software is not installed."""
    assert [found["message"] for found in pyright()["generalDiagnostics"]] == []
    modules = [ckpt, *(getattr(ckpt, face) for face in ckpt.FACES)]
    things = [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
    public = {f"{thing.__module__}.{thing.__qualname__}" for thing in things if inspect.isclass(thing) or inspect.isfunction(thing)}
    symbols = pyright("--ignoreexternal", "--verifytypes", "ckpt")["typeCompleteness"]["symbols"]
    assert public <= {symbol["name"] for symbol in symbols}
    inferred = [s["name"] for s in symbols if any("missing type annotation" in d["message"] for d in s["diagnostics"])]
    assert [name for name in inferred if name in public or name.rpartition(".")[0] in public] == []
    unknown = {s["name"] for s in symbols if s["isExported"] and not s["isTypeKnown"] and not s["isTypeAmbiguous"]}
    assert [name for name in unknown if name in public or name.rpartition(".")[0] in public] == []
