"""Ready-made listeners for ``Checkpointer(on_event=…)``: what saves and loads take, in the tool where training is watched already.

A library is imported when its monitor is made, or when the first event comes. Each event is handled in a thread that training does not
wait for (docs/monitoring.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

if TYPE_CHECKING:
    from ckpt.events.alerts import Alerts as Alerts
    from ckpt.events.event import Event as Event

    from .jsonl import JsonLines as JsonLines
    from .mlflow import MLflow as MLflow
    from .otel import OpenTelemetry as OpenTelemetry
    from .prometheus import Prometheus as Prometheus
    from .tensorboard import TensorBoard as TensorBoard
    from .wandb import WandB as WandB

_WHERE = {
    "Alerts": "ckpt.events.alerts",
    "Event": "ckpt.events.event",
    "JsonLines": "ckpt.monitors.jsonl",
    "MLflow": "ckpt.monitors.mlflow",
    "OpenTelemetry": "ckpt.monitors.otel",
    "Prometheus": "ckpt.monitors.prometheus",
    "TensorBoard": "ckpt.monitors.tensorboard",
    "WandB": "ckpt.monitors.wandb",
}

__all__ = list(_WHERE)


__getattr__ = late_names(__name__, _WHERE)
