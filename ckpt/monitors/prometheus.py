"""Events as metrics of Prometheus. ``examples/grafana.json`` is a dashboard of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.events.event import Event
from ckpt.needs import needed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)


class Prometheus:
    """Counters, gauges and histograms named ``ckpt_…``, each with the label ``run``. How they are served or pushed is the job's affair
    (``prometheus_client.start_http_server``).

    Args:
        registry: where they are registered; by default prometheus_client's own.
        run: the label; by default the root of the run.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: the registry has them already: one monitor serves several Checkpointers, told apart by their roots.
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
