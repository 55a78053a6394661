"""The store and experiment in use, and how its failures are told."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow.errors import TrackingError
from gradeflow.redact import redact

if TYPE_CHECKING:
    import mlflow

BRIEFLY = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


@dataclass(frozen=True, slots=True)
class Connection:
    """`experiment` is the id of the one that runs go to, `configured` the name in the settings."""

    experiment: str
    configured: str
    outboxes: Path


_connection: Connection | None = None


def use(connection: Connection) -> None:
    """Make this the connection of the process, as mlflow keeps its tracking URI."""
    global _connection  # noqa: PLW0603
    _connection = connection


def in_use() -> Connection:
    assert _connection is not None, "tracking.connect comes first"
    return _connection


def client() -> "mlflow.MlflowClient":
    import mlflow

    return mlflow.MlflowClient()


@contextmanager
def told() -> Iterator[None]:
    """Tell in one line, with the store's name, what MLflow raises inside.

    Raises:
        TrackingError: the store does not answer, or refuses.
    """
    import mlflow
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    try:
        yield
    except (MlflowException, RequestException) as error:
        raise in_words(mlflow.get_tracking_uri(), error) from error


def in_words(uri: str, error: BaseException) -> TrackingError:
    said = one_line(error)
    return TrackingError(redact(f"{uri}: {said}. {_remedy(uri, said)}"))


def one_line(error: BaseException) -> str:
    if "failed with exception" in str(error):  # of requests, with its own history
        return "no MLflow server answers there"
    plain = " ".join(str(error).split()).partition(" (Background on")[0].partition(" [SQL:")[0].rstrip(". ")
    plain = re.sub(r"^\(raised as a result of .*?\) (?=\()", "", plain)
    return plain if len(plain) <= 200 else f"{plain[:200]}..."


def _remedy(uri: str, said: str) -> str:
    if "disk is full" in said:
        return "Free some space, or set tracking.uri to a store elsewhere"
    if uri.startswith("postgresql") and "No module named" in said:
        return "Install its driver: pip install 'gradeflow[postgresql]'"
    if uri.startswith("http"):
        return "Start the server, or set tracking.uri (or MLFLOW_TRACKING_URI) to one that runs"
    return "Check tracking.uri and the MLFLOW_ variables of the environment"


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
