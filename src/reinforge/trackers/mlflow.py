"""MLflow, through the package mlflow-skinny: a server, or a folder or database on this machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from pydantic import Field

from reinforge.config.schema import TrackerConfig
from reinforge.interfaces import Builder, Tracker
from reinforge.registry import register_tracker
from reinforge.trackers.packages import require_package
from reinforge.types.tracking import MetricPoint, TrackedRun

KEY = "reinforge.run"  # tag with the key of the run
STATUSES = {"completed": "FINISHED", "failed": "FAILED"}
MAX_PARAM_CHARACTERS, MAX_PARAMS = 500, 100


class MLflowConfig(TrackerConfig, name="mlflow"):
    """Metrics in MLflow; needs the package mlflow-skinny (or mlflow)."""

    tracking_uri: str | None = Field(
        default=None, description="Server, folder or database; null: that of the variable MLFLOW_TRACKING_URI."
    )
    experiment: str = Field(default="reinforge", description="Name of the experiment; created if it does not exist.")
    send_config: bool = Field(default=True, description="Also send the resolved configuration, as parameters.")

    @property
    def url(self) -> str:
        """The server that metrics are sent to; empty: none."""
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        return uri if uri.startswith(("http://", "https://")) else ""


class MLflowTracker(Tracker):
    """Writes into one MLflow run, which a resumed run finds by its tag."""

    def __init__(self, config: MLflowConfig):
        self.config = config
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> dict[str, int]:
        """Finds or makes the MLflow run, and returns the last step of each metric that it has."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self.config.tracking_uri)
        experiment = client.get_experiment_by_name(self.config.experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self.config.experiment)
        found = client.search_runs([experiment_id], filter_string=f"tags.`{KEY}` = '{run.key}'", max_results=1)
        if not found:
            made = client.create_run(experiment_id, run_name=run.name, tags={KEY: run.key})
            self._run_id = made.info.run_id
            self._send_settings(run.settings)
            return {}
        self._run_id = found[0].info.run_id
        client.update_run(self._run_id, status="RUNNING")
        histories = {name: client.get_metric_history(self._run_id, name) for name in found[0].data.metrics}
        return {name: max(metric.step for metric in history) for name, history in histories.items() if history}

    def log(self, point: MetricPoint) -> None:
        from mlflow.entities import Metric

        at_ms = int(point.at_s * 1000)
        metrics = [Metric(name, value, at_ms, point.step) for name, value in point.metrics.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: str) -> None:
        """Sets the status of the MLflow run; one that was stopped is KILLED until it is resumed."""
        self._client.set_terminated(self._run_id, STATUSES.get(status, "KILLED"))

    def _send_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        if not self.config.send_config:
            return
        params = [Param(name, str(value)[:MAX_PARAM_CHARACTERS]) for name, value in flatten(settings)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])


def flatten(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@register_tracker(config_type=MLflowConfig)
async def mlflow(config: MLflowConfig, builder: Builder) -> AsyncIterator[MLflowTracker]:
    require_package("mlflow", "mlflow")
    yield MLflowTracker(config)
