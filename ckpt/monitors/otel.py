"""Events as metrics and spans of OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.events.event import Event
from ckpt.needs import needed

from .numbers import numbers

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


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
