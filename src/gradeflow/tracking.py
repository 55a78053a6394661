"""MLflow runs: where a stage writes down what it did, and finds what was done before.

With registry.py the only module that imports mlflow, and only inside functions. `connect` comes first; all
else uses the store that it chose. Tags that find things again: `gradeflow.stage`, `gradeflow.chain` (shared
by the stages of one chain), `gradeflow.fingerprint` (what the run's result depends on), `gradeflow.reused`
(the run whose result stands in for this one).
"""

import json
import os
import random
import re
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from gradeflow import params
from gradeflow.errors import TrackingError
from gradeflow.redact import redact
from gradeflow.types import Event, Rollout

if TYPE_CHECKING:
    import matplotlib.figure
    import mlflow
    from mlflow.entities import LiveSpan

STAGE = "gradeflow.stage"
CHAIN = "gradeflow.chain"
FINGERPRINT = "gradeflow.fingerprint"
REUSED = "gradeflow.reused"
VERSION = "gradeflow.version"
GIT_COMMIT = "gradeflow.git.commit"
GIT_DIRTY = "gradeflow.git.dirty"
PARENT = "mlflow.parentRunId"

BATCH = 1000
FLUSH_SECONDS = 2.0
DIGEST_LIMIT = 36
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
# By default MLflow tries for four minutes, in silence, before it says that a server is gone.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}
_BRIEFLY = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
_SPAN_TYPES: Mapping[str, str] = {
    "policy": "LLM",
    "workflow": "CHAIN",
    "operator": "TOOL",
    "chat": "CHAT_MODEL",
    "sandbox": "TOOL",
    "score": "EVALUATOR",
    "turn": "AGENT",
}

_experiment = ""
_configured = ""


def connect(settings: params.Tracking, root: Path) -> None:
    """Choose the store and the experiment of all further calls.

    The store: `settings.uri`, else MLFLOW_TRACKING_URI, else sqlite below `root`. The experiment: that of the
    run that `mlflow run` has opened, else MLFLOW_EXPERIMENT_ID, else `settings.experiment`, made if missing.

    Raises:
        TrackingError: the store or the experiment cannot be used.
    """
    global _experiment, _configured  # noqa: PLW0603 - like the tracking URI, that mlflow keeps the same way
    _configured = settings.experiment
    for name, value in (_QUIET | _PATIENCE).items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"  # its queue drops what it cannot hold
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    import mlflow
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        _try_database(uri)
        with _environment(_BRIEFLY):
            mlflow.set_tracking_uri(uri)
            _experiment = _choose_experiment(uri, settings.experiment, root)
    except (MlflowException, SQLAlchemyError, sqlite3.Error, ImportError, OSError) as error:
        raise _in_words(uri, error) from error


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
        raise _in_words(mlflow.get_tracking_uri(), error) from error


def _in_words(uri: str, error: BaseException) -> TrackingError:
    said = _one_line(error)
    return TrackingError(redact(f"{uri}: {said}. {_remedy(uri, said)}"))


def _try_database(uri: str) -> None:
    """Open the database once: MLflow would go on trying, and printing, for minutes."""
    if uri.startswith("sqlite:///"):
        file = uri.removeprefix("sqlite:///").partition("?")[0]
        with closing(sqlite3.connect(file, timeout=30)) as database:
            database.execute("BEGIN IMMEDIATE")
    elif uri.startswith(("postgresql", "mysql", "mssql")):
        import sqlalchemy

        engine = sqlalchemy.create_engine(uri)
        engine.connect().close()
        engine.dispose()


def _choose_experiment(uri: str, name: str, root: Path) -> str:
    from mlflow.exceptions import MlflowException

    client = _client()
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


def _remedy(uri: str, said: str) -> str:
    if "disk is full" in said:
        return "Free some space, or set tracking.uri to a store elsewhere"
    if uri.startswith("http"):
        return "Start the server, or set tracking.uri (or MLFLOW_TRACKING_URI) to one that runs"
    return "Check tracking.uri and the MLFLOW_ variables of the environment"


def _one_line(error: BaseException) -> str:
    if "failed with exception" in str(error):  # of requests, with its own history
        return "no MLflow server answers there"
    plain = " ".join(str(error).split()).partition(" (Background on")[0].partition(" [SQL:")[0].rstrip(". ")
    plain = re.sub(r"^\(raised as a result of .*?\) (?=\()", "", plain)
    return plain if len(plain) <= 200 else f"{plain[:200]}..."


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
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


@contextmanager
def _unseeded() -> Iterator[None]:
    """MLflow draws the ids of traces from `random`: where training has seeded it, two runs would share their traces."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _client() -> "mlflow.MlflowClient":
    import mlflow

    return mlflow.MlflowClient()


class Run:
    """An open MLflow run. Metrics wait in memory and are sent in batches; the rest is sent at once."""

    def __init__(self, run_id: str, experiment: str, chain: str) -> None:
        self.id = run_id
        self.experiment = experiment
        self.chain = chain
        self._client = _client()
        self._points: list[tuple[str, float, int, int]] = []
        self._flushed = time.monotonic()

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        now = int(time.time() * 1000)
        self._points += [(metric_name(name), float(value), now, step) for name, value in values.items()]
        if len(self._points) >= BATCH or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send the waiting metrics. Those that the store does not take stay, for the next call."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        self._flushed = time.monotonic()
        with suppress(MlflowException):
            while batch := self._points[:BATCH]:
                self._client.log_batch(self.id, metrics=[Metric(*point) for point in batch])
                del self._points[: len(batch)]

    def set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self.id, tags=[RunTag(name, str(value)) for name, value in tags.items()])

    def log_dataset(self, name: str, path: Path, digest_md5: str, context: str, rows: int) -> None:
        """Record what the run read. `digest_md5` is DVC's, since MLflow takes at most 36 characters."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if len(digest_md5) > DIGEST_LIMIT:
            raise TrackingError(f"dataset {name}: digest {digest_md5} is longer than {DIGEST_LIMIT} characters")
        dataset = Dataset(name, digest_md5, source_type="local", source=json.dumps({"uri": path.as_posix()}))
        tags = {"mlflow.data.context": context, "gradeflow.rows": str(rows)}
        used = DatasetInput(dataset, tags=[InputTag(key, value) for key, value in tags.items()])
        self._client.log_inputs(self.id, datasets=[used])

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows where the UI and `mlflow.load_table` find them; a table of that name is replaced."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self._client.log_dict(self.id, {"columns": columns, "data": data}, name)
        tables = json.loads(self._client.get_run(self.id).data.tags.get("mlflow.loggedArtifacts", "[]"))
        if (table := {"path": name, "type": "table"}) not in tables:
            self._client.set_tag(self.id, "mlflow.loggedArtifacts", json.dumps([*tables, table]))

    def log_artifact(self, file: Path, folder: str | None = None) -> None:
        self._client.log_artifact(self.id, str(file), folder)

    def log_artifacts(self, files: Path, folder: str | None = None) -> None:
        """Store all that a local folder holds below `folder` of the run."""
        self._client.log_artifacts(self.id, str(files), folder)

    def log_text(self, text: str, name: str) -> None:
        self._client.log_text(self.id, text, name)

    def log_figure(self, figure: "matplotlib.figure.Figure", name: str) -> None:
        self._client.log_figure(self.id, figure, name)

    @_unseeded()
    def log_rollout_trace(self, rollout: Rollout, step: int, judge: str = "") -> str:
        """Store a rollout as one trace: events as spans, the score as feedback, `judge` as the source of a verdict.

        Returns the trace's id.
        """
        import mlflow

        events = rollout.events
        started = min((event.started for event in events), default=time.time())
        ended = max((event.started + event.seconds for event in events), default=started)
        root = mlflow.start_span_no_context(
            "rollout",
            span_type="AGENT",
            inputs={"problem": rollout.example.problem, "id": rollout.example.id},
            tags={"kind": rollout.example.kind, "step": str(step)},
            metadata={"mlflow.sourceRun": self.id, "gradeflow.source": rollout.example.source},
            experiment_id=self.experiment,
            start_time_ns=_nanoseconds(started),
        )
        _log_spans(events, root)
        sample = rollout.sample
        root.end(
            outputs={
                "answer": sample.answer,
                "score": sample.score,
                "failure": sample.failure,
                "fault": sample.fault,
                "reason": rollout.reason,
            },
            end_time_ns=_nanoseconds(ended),
        )
        _log_feedback(root.trace_id, rollout, judge)
        return root.trace_id

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        self.flush()
        lost = len(self._points)
        with told():
            self._client.set_terminated(self.id, "FAILED" if lost else status)
        if lost:
            raise TrackingError(f"run {self.id}: {lost} metric points were not taken by the tracking store")


def metric_name(name: str) -> str:
    """The name with what MLflow does not allow in it replaced: `acc,none` becomes `acc_none`."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _log_spans(events: Sequence[Event], root: "LiveSpan") -> None:
    """Make a span of each event below its parent's; a parent may come after its children."""
    import mlflow

    spans: dict[int, LiveSpan] = {}

    def span(index: int) -> "LiveSpan":
        if index not in spans:
            event = events[index]
            spans[index] = mlflow.start_span_no_context(
                event.name,
                span_type=_SPAN_TYPES[event.kind],
                parent_span=root if event.parent is None else span(event.parent),
                inputs=dict(event.inputs),
                attributes=_attributes(event),
                start_time_ns=_nanoseconds(event.started),
            )
        return spans[index]

    for index in range(len(events)):
        span(index)
    for index, event in enumerate(events):
        spans[index].end(outputs=dict(event.outputs), end_time_ns=_nanoseconds(event.started + event.seconds))


def _attributes(event: Event) -> dict[str, Any]:
    read, written = event.prompt_tokens, event.completion_tokens
    if event.kind not in {"chat", "policy"}:
        return {}
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    # Without a cost MLflow would put one there, from its own list of prices.
    return {
        "mlflow.chat.tokenUsage": usage,
        "mlflow.llm.model": event.name,
        "mlflow.llm.cost": {"total_cost": event.cost},
    }


def _log_feedback(trace_id: str, rollout: Rollout, judge: str) -> None:
    import mlflow
    from mlflow.entities import AssessmentError, AssessmentSource

    sample = rollout.sample
    by_judge = sample.by == "judge"
    source = AssessmentSource("LLM_JUDGE" if by_judge else "CODE", (by_judge and judge) or sample.by or "gradeflow")
    said: dict[str, Any] = {"value": sample.score, "rationale": rollout.reason or None}
    if sample.score is None:
        said = {"error": AssessmentError(sample.fault or "unknown", rollout.reason or None)}
    mlflow.log_feedback(trace_id=trace_id, name="score", source=source, **said)


@contextmanager
def start_run(
    stage: str,
    settings_tree: Mapping[str, Any],
    *,
    name: str | None = None,
    chain: str | None = None,
    resume: str | None = None,
    fingerprint: str | None = None,
) -> Iterator[Run]:
    """Open the stage's run: the one named by `resume`, else the one that `mlflow run` opened, else its own.

    Settings become params (`train.learning_rate`), but only those that the run lacks: `mlflow run` has logged
    its own spelling, and MLflow refuses a second. An exception ends the run as FAILED, Ctrl-C as KILLED.
    """
    given = os.environ.pop("MLFLOW_RUN_ID", None)  # joined once: the process's further runs are their own
    with told():
        run_id = resume or given or _create(stage)
        run = _reopen(run_id, name, chain)
        run.set_tags(_tags(stage, run.chain, fingerprint))
        _log_params(run, settings_tree)
        if given and given != run_id:
            _client().set_tag(given, REUSED, run_id)
        try:
            yield run
        except BaseException as error:
            # What went wrong in the stage is what its user should read, and soon.
            with suppress(TrackingError), _environment(_BRIEFLY):
                run.end("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        run.end("FINISHED")


def note_reuse(stage: str, run_id: str, *, chain: str | None = None) -> None:
    """Leave a finished run in this chain that points to the earlier one whose result is used again."""
    with start_run(stage, {}, name=f"{_title(stage, run_id)} (reused)", chain=chain) as run:
        run.set_tags({REUSED: run_id})


def _title(stage: str, run_id: str) -> str:
    """A name that tells runs of one stage apart, in charts and comparisons too."""
    return f"{stage} {run_id[:8]}"


def _create(stage: str) -> str:
    from mlflow.tracking.context.registry import resolve_tags

    run_id = str(_client().create_run(_experiment, tags=resolve_tags({}), run_name=stage).info.run_id)
    _client().update_run(run_id, name=_title(stage, run_id))
    return run_id


def _reopen(run_id: str, name: str | None, chain: str | None) -> Run:
    client = _client()
    info = client.get_run(run_id)
    if info.info.lifecycle_stage != "active":
        raise TrackingError(f"run {run_id} is deleted. Restore it, or start without it")
    client.update_run(run_id, status="RUNNING", name=name)
    chain = os.environ.get("GRADEFLOW_CHAIN") or chain or info.data.tags.get(CHAIN) or run_id
    return Run(run_id, str(info.info.experiment_id), chain)


def _tags(stage: str, chain: str, fingerprint: str | None) -> dict[str, str]:
    tags = {STAGE: stage, CHAIN: chain, VERSION: version("gradeflow"), **_git_tags()}
    if fingerprint:
        tags[FINGERPRINT] = fingerprint
    if parent := os.environ.get("GRADEFLOW_PARENT_RUN"):
        tags[PARENT] = parent
    return tags


def _git_tags() -> dict[str, str]:
    """Commit and dirtiness of the working folder's repository; nothing where there is none."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {GIT_COMMIT: commit, GIT_DIRTY: str(bool(_git("status", "--porcelain"))).lower()}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _log_params(run: Run, tree: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    client = _client()
    known = client.get_run(run.id).data.params
    lacking = [Param(name, text) for name, text in _flatten(tree, "") if name not in known]
    for start in range(0, len(lacking), 100):
        client.log_batch(run.id, params=lacking[start : start + 100])


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield metric_name(name), value if isinstance(value, str) else json.dumps(value, default=str)


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


@told()
def _own_experiments() -> list[str]:
    named = [_client().get_experiment_by_name(name) for name in (_configured, "Default")]
    return [*{_experiment, *(str(found.experiment_id) for found in named if found)}]


@told()
def _all_experiments() -> list[str]:
    return [str(experiment.experiment_id) for experiment in _client().search_experiments()]


@told()
def _newest(tags: Mapping[str, str], condition: str, experiments: list[str]) -> str | None:
    asked = [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
    found = _client().search_runs(
        experiments,
        " and ".join([*asked, f"attributes.{condition}"]),
        max_results=1,
        order_by=["start_time DESC"],
    )
    return str(found[0].info.run_id) if found else None


def child_environment(run: Run) -> dict[str, str]:
    """The environment of a subprocess whose runs belong below `run` and into its chain."""
    import mlflow

    kept = {key: value for key, value in os.environ.items() if key not in {"MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"}}
    return kept | {
        "GRADEFLOW_PARENT_RUN": run.id,
        "GRADEFLOW_CHAIN": run.chain,
        "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
        "MLFLOW_EXPERIMENT_ID": run.experiment,
    }


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
        raise TrackingError(f"run {run_id}: no artifact {path}: {_one_line(error)}") from error
    if not Path(local).exists():
        raise TrackingError(f"run {run_id}: no artifact {path}")
    return Path(local)


def is_known(run_id: str) -> bool:
    """Whether the store has this run."""
    from mlflow.exceptions import MlflowException

    with told():
        try:
            return bool(run_id and _client().get_run(run_id))
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


def _get(run_id: str) -> "mlflow.entities.Run":
    from mlflow.exceptions import MlflowException

    try:
        return _client().get_run(run_id)
    except MlflowException as error:
        raise TrackingError(f"no run {run_id} in the tracking store: {_one_line(error)}") from error
