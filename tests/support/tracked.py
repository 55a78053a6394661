"""What tests of tracking look at a store with, and a rollout to log."""

from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from gradeflow.types import Event, Example, Rollout, Sample


def client(uri: str | None = None) -> Any:
    import mlflow

    return mlflow.MlflowClient(uri)


def status(run_id: str) -> str:
    return str(client().get_run(run_id).info.status)


def history(run_id: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client().get_metric_history(run_id, name)]


def judged() -> Rollout:
    """A rollout as training records it: what the policy wrote comes last, the judge's calls are below the score."""
    example = Example("p1", "places", "qa", "Where does Ann live?", "Port Arden")
    sample = Sample("p1", "d", "places", "text", "code", "in Port Arden", 1.0, "judge", True, ("Custom",))
    asked, verdict = {"messages": [{"role": "user", "content": "the same?"}]}, {"text": "True", "finish_reason": "stop"}
    events = (
        Event("workflow", "workflow", 101.0, 2.0, {"completion": "code"}, {"answer": "in Port Arden"}),
        Event("operator", "Custom", 101.0, 1.0, {"input": "Where?"}, {"response": "in Port Arden"}, parent=0),
        Event("chat", "executor", 101.0, 0.5, asked, {"text": "in Port Arden"}, 10, 5, 0.25, parent=1),
        Event("sandbox", "run", 102.0, 0.5, {"code": "1"}, {"value": 1}, parent=1),
        Event("score", "score", 103.0, 1.0, {"answer": "in Port Arden"}, {"value": 1.0, "by": "judge"}),
        Event("chat", "gpt-oss", 103.0, 0.5, asked, verdict, 50, 4, 0.5, parent=4),
        Event("chat", "qwen", 103.0, 0.5, asked, {"error": "ProviderError: down"}, parent=4),
        Event("policy", "policy", 100.0, 1.0, asked, {"text": "code"}, 30, 20),
    )
    return Rollout(example, (), sample, events, "both name the port")


def artifact_path(run_id: str, path: str) -> Path:
    """Where a local store keeps a run's file."""
    return Path(url2pathname(urlparse(client().get_run(run_id).info.artifact_uri).path)) / path


def model_path(model_id: str) -> Path:
    """Where a local store keeps the files of a LoggedModel."""
    return Path(url2pathname(urlparse(client().get_logged_model(model_id).artifact_location).path))
