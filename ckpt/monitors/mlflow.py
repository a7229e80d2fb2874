"""Events in a run of MLflow: metrics, and for each checkpoint a small file that says where it is. No bytes of it are uploaded."""

from __future__ import annotations

from ckpt.events.event import Event
from ckpt.needs import needed

from .numbers import numbers, reference


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
