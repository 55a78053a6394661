"""Finding runs, and reading what they hold."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gradeflow.errors import TrackingError
from gradeflow.tracking import store
from gradeflow.tracking.names import CHAIN, FINGERPRINT, PARENT, REUSED, STAGE

if TYPE_CHECKING:
    import mlflow
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Point:
    """A metric's value at a step; `at` is when, in seconds since the epoch."""

    value: float
    step: int
    at: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What one request tells of a run. `ended` is None while it runs; `latest` has each metric's newest point."""

    id: str
    name: str
    status: str
    started: float
    ended: float | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    latest: Mapping[str, Point]


def find_run(stage: str, fingerprint: str) -> str | None:
    """The newest finished run with this fingerprint in any experiment: what it made can be used again."""
    return _newest({STAGE: stage, FINGERPRINT: fingerprint}, "status = 'FINISHED'", _all_experiments())


def find_unfinished(stage: str, fingerprint: str) -> str | None:
    """The newest run with this fingerprint that was interrupted, to be resumed."""
    return _newest({STAGE: stage, FINGERPRINT: fingerprint}, "status != 'FINISHED'", _all_experiments())


def find_stage(stage: str, chain: str | None = None) -> str | None:
    """The newest finished run of a stage: in the chain, where there is one, else in the project's experiments.

    These are the one in use, the one in the settings, and MLflow's Default, where `mlflow run` records unless it is
    told otherwise. Where the result of an earlier run was used again, that run is meant.
    """
    chain = os.environ.get("GRADEFLOW_CHAIN") or chain
    if chain:
        found = _newest({STAGE: stage, CHAIN: chain}, "status = 'FINISHED'", _all_experiments())
    else:
        found = _newest({STAGE: stage}, "status = 'FINISHED'", _own_experiments())
    return read_tags(found).get(REUSED, found) if found else None


def newest_run(stage: str, named: str = "") -> str | None:
    """The newest run of a stage in the project's experiments, or in all, of those that have `named` in their name."""
    if named:
        return _newest({STAGE: stage}, f"run_name LIKE '%{named}%'", _all_experiments())
    return _newest({STAGE: stage}, "status != 'SCHEDULED'", _own_experiments())


@store.told()
def _own_experiments() -> list[str]:
    named = [store.client().get_experiment_by_name(name) for name in (store.in_use().configured, "Default")]
    return [*{store.in_use().experiment, *(str(found.experiment_id) for found in named if found)}]


@store.told()
def _all_experiments() -> list[str]:
    return [str(experiment.experiment_id) for experiment in store.client().search_experiments()]


@store.told()
def _newest(tags: Mapping[str, str], condition: str, experiments: list[str]) -> str | None:
    asked = [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
    found = store.client().search_runs(
        experiments,
        " and ".join([*asked, f"attributes.{condition}"]),
        max_results=1,
        order_by=["start_time DESC"],
    )
    return str(found[0].info.run_id) if found else None


def read_text(run_id: str, path: str) -> str:
    """The text of a run's file."""
    with TemporaryDirectory() as folder:
        return download_artifact(run_id, path, Path(folder)).read_text(encoding="utf-8")


def download_artifact(run_id: str, path: str, into: Path) -> Path:
    """Copy a run's file or folder below `into`; returns where it lies there."""
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    try:
        local = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=path, dst_path=str(into))
    except (MlflowException, OSError) as error:
        raise TrackingError(f"run {run_id}: no artifact {path}: {store.one_line(error)}") from error
    if not Path(local).exists():
        raise TrackingError(f"run {run_id}: no artifact {path}")
    return Path(local)


@store.told()
def is_known(run_id: str) -> bool:
    """Whether the store has this run."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(run_id and store.client().get_run(run_id))
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return False
        raise


def read_tags(run_id: str) -> dict[str, str]:
    return dict(_get(run_id).data.tags)


def read_metrics(run_id: str) -> dict[str, float]:
    return dict(_get(run_id).data.metrics)


def read_datasets(run_id: str) -> dict[str, str]:
    """What a run read: name -> digest of each dataset."""
    inputs = _get(run_id).inputs
    return {used.dataset.name: used.dataset.digest for used in (inputs.dataset_inputs if inputs else [])}


@store.told()
def find_children(run_id: str) -> list[Facts]:
    """The runs below a run, the oldest first."""
    found: list[Facts] = []
    page: str | None = ""
    while page is not None:
        some = store.client().search_runs(
            [store.in_use().experiment],
            f"tags.`{PARENT}` = '{run_id}'",
            max_results=1000,
            order_by=["start_time ASC"],
            page_token=page or None,
        )
        found += map(_facts, some)
        page = some.token or None
    return found


@store.told()
def read_facts(run_id: str) -> Facts:
    return _facts(_get(run_id))


def _facts(found: "mlflow.entities.Run") -> Facts:
    return Facts(
        str(found.info.run_id),
        str(found.info.run_name),
        str(found.info.status),
        found.info.start_time / 1000,
        found.info.end_time / 1000 if found.info.end_time else None,
        found.data.params,
        found.data.tags,
        {one.key: _point(one) for one in found.data._metric_objs},  # noqa: SLF001 - `metrics` leaves the steps out
    )


@store.told()
def read_history(run_id: str, metric: str) -> list[Point]:
    """All points of a metric, by step; of several for one step, as a resumed run may have, the newest."""
    found = sorted(map(_point, store.client().get_metric_history(run_id, metric)), key=lambda point: point.at)
    return sorted({point.step: point for point in found}.values(), key=lambda point: point.step)


def _point(metric: "mlflow.entities.Metric") -> Point:
    return Point(metric.value, metric.step, metric.timestamp / 1000)


def _get(run_id: str) -> "mlflow.entities.Run":
    from mlflow.exceptions import MlflowException

    try:
        return store.client().get_run(run_id)
    except MlflowException as error:
        raise TrackingError(f"no run {run_id} in the tracking store: {store.one_line(error)}") from error


@store.told()
def find_measured(metrics: Sequence[str]) -> "pd.DataFrame":
    """The runs of all experiments that have one of these metrics, as `mlflow.search_runs` gives them."""
    import mlflow
    import pandas as pd

    asked = [f"metrics.`{name}` > -1e300" for name in metrics]
    found = [mlflow.search_runs(search_all_experiments=True, filter_string=one, max_results=10_000) for one in asked]
    return pd.concat(found).drop_duplicates("run_id") if found else pd.DataFrame()
