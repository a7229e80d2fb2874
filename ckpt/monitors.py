"""Ready-made listeners for ``Checkpointer(on_event=…)``: what saves and loads take, in the tool where training is watched already.

A library is imported when its monitor is made, or when the first event comes. Each event is handled in a thread that training does not
wait for (docs/observing.md).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt.formats.native.commit import read_record
from ckpt.io_backends.registry import is_file_system, open_backend
from ckpt.runs.events import Alerts, Event

from .errors import CkptError, UsageError
from .needs import needed
from .text import parse_json

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry
    from torch.utils.tensorboard.writer import SummaryWriter
    from wandb import Run

__all__ = ["Alerts", "Event", "JsonLines", "MLflow", "OpenTelemetry", "Prometheus", "TensorBoard", "WandB"]


# The numbers in an event, under the names that all monitors give them; and what says which checkpoint it was.


def numbers(event: Event) -> dict[str, float]:
    """Name → value; empty for events that have none worth a curve."""
    values: dict[str, float | None] = {}
    if event.kind == "save.durable":
        values = {"save_seconds": event.seconds, "save_blocked_seconds": event.blocked, "save_bytes": event.tensor_bytes}
        values["save_stragglers"] = len(event.stragglers)
    elif event.kind == "restore" and event.error is None:
        values = {"restore_seconds": event.seconds, "restore_bytes": event.tensor_bytes}
    elif event.kind == "save.published":
        values = {"publish_seconds": event.seconds}
    return {name: float(value) for name, value in values.items() if value is not None}


def reference(event: Event) -> dict[str, object]:
    """What another tool has to remember to find this checkpoint again, and to know that it is the same: the digest of the commit record
    covers all of it, and is left out if it cannot be read any more."""
    digest: str | None = None
    with suppress(CkptError, ValueError, LookupError, TypeError):
        data = None if event.url is None else read_record(open_backend(event.url))
        digest = None if data is None else str(parse_json(data)["digest"])
    fields = {"url": event.url, "id": event.id, "digest": digest, "step": event.step, "tensor_bytes": event.tensor_bytes}
    return {name: value for name, value in fields.items() if value is not None}


def uri(url: str) -> str:
    """``url`` with a scheme, as references to artifacts have it."""
    return f"file://{os.path.abspath(url)}" if is_file_system(url) and "://" not in url else url


class JsonLines:
    """Appends each event to a local file, a line each, written at once.

    Args:
        path: the file; it and its directory are made if they are not there. The root of a run is a good place: ``runs/a/events.jsonl``.
        every_rank: whether each rank writes, into a separate file: ``events.jsonl`` becomes ``events-00003.jsonl``.
    """

    def __init__(self, path: str | os.PathLike[str], *, every_rank: bool = False) -> None:
        self.path: str = os.fspath(path)
        self.every_rank = every_rank

    def __call__(self, event: Event) -> None:
        path = self.path
        if self.every_rank:
            stem, dot, ending = path.rpartition(".")
            path = f"{stem if dot else ending}-{event.rank:05d}{dot}{ending if dot else ''}"
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:  # one write of one line: processes that append do not mix theirs
            file.write(json.dumps(event.to_json()) + "\n")


# Events in a run of MLflow: metrics, and for each checkpoint a small file that says where it is. No bytes of it are uploaded.


class MLflow:
    """Metrics ``ckpt/…`` by training step; artifacts ``ckpt/step-00000500.json`` with URL, id and digest of a checkpoint; and tags
    ``ckpt.latest``, the URL of the newest, and ``ckpt.alert``, the last alert.

    Args:
        run_id: the run; by default the one that is active when this is made.
        tracking_uri: its server; by default MLflow's own setting.

    Raises:
        ImportError: MLflow is not installed (mlflow-skinny is enough).
        ValueError: no run is active, and none is named.
    """

    def __init__(self, run_id: str | None = None, *, tracking_uri: str | None = None) -> None:
        with needed("mlflow", "mlflow"):
            import mlflow
        active = mlflow.active_run() if run_id is None else None
        if active is not None:
            run_id = active.info.run_id
        if run_id is None:
            raise ValueError("no run of MLflow is active: make the monitor after mlflow.start_run(), or give run_id=")
        self._run_id: str = run_id
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)

    def __call__(self, event: Event) -> None:
        for name, value in numbers(event).items():
            self._client.log_metric(self._run_id, f"ckpt/{name}", value, timestamp=int(event.at * 1000), step=event.step or 0)
        if event.kind == "save.durable":
            self._client.log_dict(self._run_id, reference(event), f"ckpt/step-{event.step or 0:08d}.json")
            self._client.set_tag(self._run_id, "ckpt.latest", event.url)
        elif event.kind == "alert":
            self._client.set_tag(self._run_id, "ckpt.alert", f"{event.topic}: {event.reason}")


class OpenTelemetry:
    """Histograms ``ckpt.save.duration``, ``ckpt.save.blocked``, ``ckpt.restore.duration``, ``ckpt.publish.duration`` in seconds; counters
    ``ckpt.save.bytes`` and ``ckpt.events``; and spans ``ckpt.save`` and ``ckpt.restore``, those of failures with the status ERROR.

    Args:
        meter_provider, tracer_provider: by default the global ones.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """

    def __init__(self, *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None) -> None:
        with needed("opentelemetry", "otel"):
            from opentelemetry import metrics, trace
        meter = metrics.get_meter("ckpt", meter_provider=meter_provider)
        self._trace = trace
        self._tracer = trace.get_tracer("ckpt", tracer_provider=tracer_provider)
        self._seconds: dict[str, Any] = {
            "save_seconds": meter.create_histogram("ckpt.save.duration", "s", "From the call to the commit."),
            "save_blocked_seconds": meter.create_histogram("ckpt.save.blocked", "s", "For which a save has blocked training."),
            "restore_seconds": meter.create_histogram("ckpt.restore.duration", "s", "What a restore took."),
            "publish_seconds": meter.create_histogram("ckpt.publish.duration", "s", "From the local commit to the published one."),
        }
        self._bytes = meter.create_counter("ckpt.save.bytes", "By", "Bytes of tensors in committed checkpoints.")
        self._events = meter.create_counter("ckpt.events", "1", "Events by kind.")

    def __call__(self, event: Event) -> None:
        run = {"ckpt.root": event.root}
        self._events.add(1, {**run, "ckpt.kind": event.kind, **({"ckpt.topic": event.topic} if event.topic else {})})
        for name, value in numbers(event).items():
            if name in self._seconds:
                self._seconds[name].record(value, run)
            elif name == "save_bytes":
                self._bytes.add(int(value), run)
        if event.kind in ("save.durable", "save.failed", "restore"):
            self._span(event)

    def _span(self, event: Event) -> None:
        began = event.at - (event.seconds or 0.0)
        span = self._tracer.start_span("ckpt.restore" if event.kind == "restore" else "ckpt.save", start_time=int(began * 1e9))
        for name, value in event.to_json().items():
            if name not in ("kind", "at"):
                span.set_attribute(f"ckpt.{name}", value)
        if event.error is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, f"{event.error}: {event.reason}"))
        span.end(int(event.at * 1e9))


# Events as metrics of Prometheus. ``examples/grafana.json`` is a dashboard of them.

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)


class Prometheus:
    """Counters, gauges and histograms named ``ckpt_…``, each with the label ``run``. How they are served or pushed is the job's affair
    (``prometheus_client.start_http_server``).

    Args:
        registry: where they are registered; by default prometheus_client's own.
        run: the label; by default the root of the run.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: the registry has them already: one monitor serves several Checkpointers, distinguished by their roots.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, run: str | None = None) -> None:
        with needed("prometheus_client", "prometheus"):
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        registry = REGISTRY if registry is None else registry
        self._run = run

        self._saves = Counter("ckpt_saves", "Saves that have ended.", ["run", "outcome"], registry=registry)
        self._seconds = Histogram("ckpt_save_seconds", "From the call to the commit.", ["run"], registry=registry, buckets=_BUCKETS)
        self._blocked = Histogram(
            "ckpt_save_blocked_seconds", "For which a save has blocked training.", ["run"], registry=registry, buckets=_BUCKETS
        )
        self._bytes = Counter("ckpt_saved_bytes", "Bytes of tensors in committed checkpoints.", ["run"], registry=registry)
        self._size = Gauge("ckpt_last_save_bytes", "Bytes of tensors in the last checkpoint.", ["run"], registry=registry)
        self._step = Gauge("ckpt_last_save_step", "Step of the last checkpoint.", ["run"], registry=registry)
        self._time = Gauge("ckpt_last_save_timestamp_seconds", "When the last checkpoint was committed.", ["run"], registry=registry)
        self._stragglers = Gauge("ckpt_last_save_stragglers", "Ranks that held the last save up.", ["run"], registry=registry)
        self._in_flight = Gauge("ckpt_saves_in_flight", "Saves that are going on.", ["run"], registry=registry)
        self._published = Counter("ckpt_published", "Checkpoints published to the root.", ["run"], registry=registry)
        self._late = Gauge("ckpt_last_publish_seconds", "From the local commit to the published one.", ["run"], registry=registry)
        self._removed = Counter("ckpt_removed", "Checkpoints that were removed.", ["run"], registry=registry)
        self._restores = Counter("ckpt_restores", "Restores.", ["run", "outcome"], registry=registry)
        self._restore = Gauge("ckpt_last_restore_seconds", "What the last restore took.", ["run"], registry=registry)
        self._alerts = Counter("ckpt_alerts", "Alerts.", ["run", "topic"], registry=registry)

    def __call__(self, event: Event) -> None:
        run = self._run if self._run is not None else event.root
        if event.kind == "save.begun":
            self._in_flight.labels(run).set(1)  # one at a time
        elif event.kind == "save.durable":
            self._in_flight.labels(run).set(0)
            self._saves.labels(run, "durable").inc()
            self._seconds.labels(run).observe(event.seconds or 0.0)
            self._blocked.labels(run).observe(event.blocked or 0.0)
            self._bytes.labels(run).inc(event.tensor_bytes or 0)
            self._size.labels(run).set(event.tensor_bytes or 0)
            self._step.labels(run).set(event.step or 0)
            self._time.labels(run).set(event.at)
            self._stragglers.labels(run).set(len(event.stragglers))
        elif event.kind == "save.failed":
            self._in_flight.labels(run).set(0)
            self._saves.labels(run, "failed").inc()
        elif event.kind == "save.published":
            self._published.labels(run).inc()
            self._late.labels(run).set(event.seconds or 0.0)
        elif event.kind == "save.removed":
            self._removed.labels(run).inc()
        elif event.kind == "restore":
            self._restores.labels(run, "failed" if event.error else "restored").inc()
            self._restore.labels(run).set(event.seconds or 0.0)
        elif event.kind == "alert":
            self._alerts.labels(run, event.topic).inc()


class TensorBoard:
    """``ckpt/save_seconds``, ``ckpt/save_blocked_seconds``, ``ckpt/save_bytes``, ``ckpt/save_stragglers``, ``ckpt/restore_seconds`` and
    so on, by training step; failures and alerts as text.

    Args:
        writer: the job's SummaryWriter, or a directory for a new one.

    Raises:
        ImportError: tensorboard is not installed.
        UsageError: ``writer`` is neither.
    """

    def __init__(self, writer: SummaryWriter | str | os.PathLike[str]) -> None:
        with needed("tensorboard", "tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        if not isinstance(writer, SummaryWriter | str | os.PathLike):
            raise UsageError(f"TensorBoard takes a SummaryWriter or a directory, not {writer!r}")
        self._writer: Any = writer if isinstance(writer, SummaryWriter) else SummaryWriter(os.fspath(writer))

    def __call__(self, event: Event) -> None:
        for name, value in numbers(event).items():
            self._writer.add_scalar(f"ckpt/{name}", value, event.step, walltime=event.at)
        if event.kind == "alert" or event.error is not None:
            text = f"{event.topic or event.kind}: {event.reason}"
            self._writer.add_text("ckpt/alerts", text, event.step, walltime=event.at)
        self._writer.flush()


# Events in a run of Weights & Biases: metrics, and for each checkpoint an artifact that refers to it. No bytes of it are uploaded.


class WandB:
    """Metrics ``ckpt/…`` over ``ckpt/step``; and artifacts ``checkpoint-<run>`` of type ``checkpoint``, which refer to the URL and have id
    and digest as metadata. An alert becomes one of W&B.

    Metrics join the row that training logs next, so that the run's own steps stay as they are.

    Args:
        run: what ``wandb.init`` gave; by default the run of this process.
        artifacts: whether checkpoints are logged as artifacts.

    Raises:
        ImportError: wandb is not installed.
        ValueError: there is no run.
    """

    def __init__(self, run: Run | None = None, *, artifacts: bool = True) -> None:
        with needed("wandb", "wandb"):
            import wandb
        self._wandb = wandb
        run = run if run is not None else wandb.run
        if run is None:
            raise ValueError("there is no run of W&B: make the monitor after wandb.init(), or give it the run")
        self._run = run
        self._artifacts = artifacts
        self._run.define_metric("ckpt/step", hidden=True)
        self._run.define_metric("ckpt/*", step_metric="ckpt/step")

    def __call__(self, event: Event) -> None:
        metrics = {f"ckpt/{name}": value for name, value in numbers(event).items()}
        if metrics:
            self._run.log({**metrics, "ckpt/step": event.step}, commit=False)
        if event.kind == "save.durable" and self._artifacts and event.url is not None:
            artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata=reference(event))
            artifact.add_reference(uri(event.url), name="checkpoint", checksum=False)
            self._run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])
        elif event.kind == "alert":
            self._run.alert(title=f"ckpt: {event.topic}", text=event.reason or "")
