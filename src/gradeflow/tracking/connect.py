"""Choosing the store and the experiment of all further calls."""

import contextlib
import os
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from gradeflow import params
from gradeflow.errors import TrackingError
from gradeflow.tracking import moved, sender, store

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
# By default MLflow tries for four minutes, in silence, before it says that a server is gone.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}
OUTBOXES = Path(".gradeflow/outbox")


def connect(settings: params.Tracking, root: Path) -> None:
    """Choose the store and the experiment of all further calls, and send what earlier runs could not.

    The store: `settings.uri`, else MLFLOW_TRACKING_URI, else sqlite below `root`. The experiment: that of the
    run that `mlflow run` has opened, else MLFLOW_EXPERIMENT_ID, else `settings.experiment`, made if missing.

    Raises:
        TrackingError: the store or the experiment cannot be used.
    """
    for name, value in (_QUIET | _PATIENCE).items():
        os.environ.setdefault(name, value)
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    import mlflow
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        _try_database(uri, root)
        with store.environment(store.BRIEFLY):
            mlflow.set_tracking_uri(uri)
            experiment = _choose_experiment(uri, settings.experiment, root)
    except (MlflowException, SQLAlchemyError, sqlite3.Error, ImportError, OSError) as error:
        raise store.in_words(uri, error) from error
    store.use(store.Connection(experiment, settings.experiment, root.resolve() / OUTBOXES))
    with store.told():
        sender.send_what_waits(store.in_use().outboxes)


def _try_database(uri: str, root: Path) -> None:
    """Open the database once: MLflow would go on trying, and printing, for minutes."""
    if uri.startswith("sqlite:///"):
        file = Path(uri.removeprefix("sqlite:///").partition("?")[0])
        if not file.exists() and file.parent.is_dir():
            _make_database(file)
        with closing(sqlite3.connect(file, timeout=30)) as database:
            database.execute("BEGIN IMMEDIATE")
        for old in moved.follow(file, root):
            print(f"gradeflow: {file} came from {old}; its paths now lead here", file=sys.stderr)
    elif uri.startswith(("postgresql", "mysql", "mssql")):
        import sqlalchemy

        engine = sqlalchemy.create_engine(uri)
        engine.connect().close()
        engine.dispose()


def _make_database(file: Path) -> None:
    """Make MLflow's tables elsewhere first: it makes them one by one, and opens no file that SIGKILL left half made."""
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        part = Path(folder) / file.name
        SqlAlchemyStore(f"sqlite:///{part}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()  # type: ignore[no-untyped-call]
        with contextlib.suppress(FileExistsError):  # another process may have made it just now
            os.link(part, file)


def _choose_experiment(uri: str, name: str, root: Path) -> str:
    from mlflow.exceptions import MlflowException

    client = store.client()
    if given := os.environ.get("MLFLOW_RUN_ID"):
        return str(client.get_run(given).info.experiment_id)
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return str(client.get_experiment(given).experiment_id)
    if (found := client.get_experiment_by_name(name)) is None:
        local = None if uri.startswith("http") else (root.resolve() / "mlruns" / name).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=local))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process may have made it just now
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise TrackingError(
            f"{uri}: experiment {name} is deleted. Bring it back with "
            f"`mlflow experiments restore -x {found.experiment_id}`, or set tracking.experiment to another"
        )
    return str(found.experiment_id)
