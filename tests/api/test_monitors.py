"""Each monitor with the library that it is for: what the library has in the end is what happened."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import monitors
from ckpt.errors import UsageError
from ckpt.runs.events import Event

ROOT = Path(__file__).parents[2]


def run(root: Path, *listeners: Any) -> list[Event]:
    """Two saves, a restore and an alert; the events, as a listener of its own has heard them."""
    events: list[Event] = []
    with ckpt.Checkpointer(str(root), on_event=[*listeners, events.append]) as c:
        for n in (10, 20):
            c.save(n, {"x": torch.full((1000,), float(n))})
            c.wait()
        c.restore({"x": torch.zeros(1000)})
    told = Event(kind="alert", at=1.7e9, rank=0, ranks=1, root=str(root), step=20, topic="slow", reason="it took long")
    for listener in listeners:
        listener(told)
    return events


def durable(events: list[Event]) -> list[Event]:
    return [e for e in events if e.kind == "save.durable"]


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def test_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "events.jsonl"
    events = run(tmp_path / "run", monitors.JsonLines(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[:-1] == [e.to_json() for e in events] and lines[-1]["topic"] == "slow"
    every = monitors.JsonLines(file, every_rank=True)
    every(events[0])
    assert json.loads((tmp_path / "logs" / "events-00000.jsonl").read_text()) == events[0].to_json()


def test_a_log_in_the_run_is_no_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, monitors.JsonLines(tmp_path / "events.jsonl"))
    assert [s.number for s in ckpt.list_steps(str(tmp_path))] == [10, 20]


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("given", ["directory", "writer"])
def test_tensorboard(tmp_path: Path, given: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "tb")) if given == "writer" else tmp_path / "tb"
    events = durable(run(tmp_path / "run", monitors.TensorBoard(writer)))
    seen = EventAccumulator(str(tmp_path / "tb"))
    seen.Reload()
    for tag, field in (("seconds", "seconds"), ("blocked_seconds", "blocked"), ("bytes", "tensor_bytes")):
        values = [(s.step, s.value, s.wall_time) for s in seen.Scalars(f"ckpt/save_{tag}")]
        assert values == [(e.step, pytest.approx(getattr(e, field)), pytest.approx(e.at)) for e in events]
    assert len(seen.Scalars("ckpt/restore_seconds")) == 1
    assert b"slow: it took long" in seen.Tensors("ckpt/alerts/text_summary")[0].tensor_proto.string_val[0]


@needs("prometheus_client")
def test_prometheus(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    events = durable(run(tmp_path / "run", monitors.Prometheus(registry, run="a")))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"run": "a", **labels})

    assert value("ckpt_saves_total", outcome="durable") == 2 and value("ckpt_saves_total", outcome="failed") is None
    assert value("ckpt_save_seconds_sum") == pytest.approx(sum(e.seconds or 0 for e in events))
    assert value("ckpt_save_blocked_seconds_count") == 2 and value("ckpt_saved_bytes_total") == 8000
    assert value("ckpt_last_save_step") == 20 and value("ckpt_last_save_timestamp_seconds") == events[-1].at
    assert value("ckpt_saves_in_flight") == 0 and value("ckpt_restores_total", outcome="restored") == 1
    assert value("ckpt_alerts_total", topic="slow") == 1
    with pytest.raises(ValueError, match="Duplicated"):
        monitors.Prometheus(registry)


@needs("prometheus_client")
def test_the_dashboard_asks_for_what_is_exported(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    monitor = monitors.Prometheus(registry)
    for kind in ("save.begun", "save.durable", "save.failed", "save.published", "save.removed", "restore", "alert"):
        monitor(Event(kind=kind, at=1.0, rank=0, ranks=1, root="r", step=1, seconds=1.0, topic="slow"))  # type: ignore[arg-type]
    names = set(re.findall(r"^(ckpt_\w+)\{", generate_latest(registry).decode(), re.MULTILINE))
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    for expression in asked:
        used = re.findall(r"\bckpt_\w+", expression)
        assert used and set(used) <= names, expression
    assert len(asked) >= 8 and all(panel["title"] and panel["gridPos"] for panel in dashboard["panels"])


@needs("opentelemetry.sdk") if importlib.util.find_spec("opentelemetry") else needs("opentelemetry")
def test_opentelemetry(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    monitor = monitors.OpenTelemetry(meter_provider=MeterProvider([reader]), tracer_provider=tracers)
    events = run(tmp_path / "run", monitor)
    monitor(Event(kind="save.failed", at=5.0, rank=0, ranks=1, root="r", step=3, error="NoSpaceError", reason="full"))
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name: m.data.data_points for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    (duration,), (nbytes,) = found["ckpt.save.duration"], found["ckpt.save.bytes"]
    assert duration.count == 2 and duration.sum == pytest.approx(sum(e.seconds or 0 for e in durable(events))) and nbytes.value == 8000
    assert {p.attributes["ckpt.kind"]: p.value for p in found["ckpt.events"]}["save.durable"] == 2
    made = spans.get_finished_spans()
    assert [s.name for s in made] == ["ckpt.save", "ckpt.save", "ckpt.restore", "ckpt.save"]
    first = durable(events)[0]
    assert made[0].attributes is not None and made[0].attributes["ckpt.id"] == first.id
    assert (made[0].end_time - made[0].start_time) / 1e9 == pytest.approx(first.seconds, abs=1e-5)  # type: ignore[operator]
    assert [s.status.status_code.name for s in made] == ["UNSET", "UNSET", "UNSET", "ERROR"]


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    tracking = (tmp_path / "mlruns").as_uri()
    client = mlflow.MlflowClient(tracking_uri=tracking)
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    with pytest.raises(ValueError, match="no run of MLflow is active"):
        monitors.MLflow()
    events = durable(run(tmp_path / "run", monitors.MLflow(run_id, tracking_uri=tracking)))
    history = client.get_metric_history(run_id, "ckpt/save_seconds")
    assert [(m.step, m.value) for m in history] == [(e.step, pytest.approx(e.seconds)) for e in events]
    assert client.get_run(run_id).data.tags["ckpt.latest"] == events[-1].url
    (file,) = (tmp_path / "mlruns").rglob("step-00000020.json")
    assert json.loads(file.read_text()) == expected(events[-1])
    assert sum(p.stat().st_size for p in (tmp_path / "mlruns").rglob("*") if p.is_file()) < 8000  # no bytes of tensors


def expected(event: Event) -> dict[str, Any]:
    record = json.loads(Path(str(event.url), "checkpoint.json").read_text())
    return {"url": event.url, "id": record["id"], "digest": record["digest"], "step": event.step, "tensor_bytes": 4000}


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    import wandb

    with pytest.raises(ValueError, match="no run of W&B"):
        monitors.WandB()
    job = wandb.init(mode="offline", dir=str(tmp_path), project="p", settings=wandb.Settings(console="off", x_disable_stats=True))
    logged: list[Any] = []
    real = job.log_artifact
    monkeypatch.setattr(job, "log_artifact", lambda artifact, **more: logged.append(real(artifact, **more)))
    events = durable(run(tmp_path / "run", monitors.WandB(job)))
    job.log({"loss": 1.0})
    steps, summary = job.step, dict(job.summary)
    job.finish()
    assert summary["ckpt/save_seconds"] == pytest.approx(events[-1].seconds) and summary["loss"] == 1.0
    assert steps == 1  # only training counts
    assert [a.metadata for a in logged] == [expected(e) for e in events]
    refs = [{entry.ref for entry in artifact.manifest.entries.values()} for artifact in logged]
    assert refs == [{f"file://{p}" for p in Path(str(e.url)).rglob("*") if p.is_file()} for e in events]


# ------------------------------------------------------------------------------------------------------------ packages

LIBRARIES = {
    "TensorBoard": ("tensorboard", "tensorboard", "'logs'"),
    "Prometheus": ("prometheus_client", "prometheus", ""),
    "OpenTelemetry": ("opentelemetry", "otel", ""),
    "MLflow": ("mlflow", "mlflow", ""),
    "WandB": ("wandb", "wandb", ""),
}


def test_nothing_is_imported_before_it_is_used_and_what_is_missing_is_named() -> None:
    """In a process where none of the libraries can be imported, which is what a hook that refuses them makes of this one."""
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {[library for library, *_ in LIBRARIES.values()]!r}:
            raise ModuleNotFoundError('no ' + name, name=name)
sys.meta_path.insert(0, Refuse())
import ckpt.monitors
assert 'torch' not in sys.modules
for name in ckpt.monitors.__all__:
    getattr(ckpt.monitors, name)
{
        "".join(
            f'''
try:
    ckpt.monitors.{name}({arguments})
except ImportError as err:
    print(err)
'''
            for name, (_, _, arguments) in LIBRARIES.items()
        )
    }"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    for line, (library, extra, _) in zip(done.stdout.splitlines(), LIBRARIES.values(), strict=True):
        assert library in line and f"pip install 'ckpt-toolkit[{extra}]'" in line
    text = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in text for _, extra, _ in LIBRARIES.values())


@needs("tensorboard")
def test_what_no_writer_is() -> None:
    with pytest.raises(UsageError, match="SummaryWriter or a directory"):
        monitors.TensorBoard(3)  # type: ignore[arg-type]
