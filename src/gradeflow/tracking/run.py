"""An open run, and what it is opened with."""

import json
import os
import shutil
import subprocess
import sys
import time
from asyncio import CancelledError
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from gradeflow.errors import GradeflowError, TrackingError, Unsent
from gradeflow.redact import redact
from gradeflow.tracking import store, traces
from gradeflow.tracking.courier import COURIER, Courier
from gradeflow.tracking.names import (
    CHAIN,
    ERROR,
    FINGERPRINT,
    GIT_COMMIT,
    GIT_DIRTY,
    PARENT,
    REUSED,
    STAGE,
    VERSION,
    metric_name,
)
from gradeflow.tracking.outbox import Outbox
from gradeflow.tracking.sender import TURN, Sender
from gradeflow.types import Rollout

if TYPE_CHECKING:
    import matplotlib.figure

DIGEST_LIMIT = 36
OPEN_S = 10.0
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Run:
    """An open MLflow run. What it logs is on disk when the call returns, and soon after in the store."""

    def __init__(
        self, run_id: str, experiment: str, chain: str, git: Mapping[str, str], courier: Courier | None
    ) -> None:
        self.id = run_id
        self.experiment = experiment
        self.chain = chain
        self.git = git
        self.courier = courier
        self._outbox = Outbox(store.in_use().outboxes / run_id, wait_s=OPEN_S)
        self._sender = Sender(self._outbox, courier)
        self._sender.start()

    @cached_property
    def context(self) -> Mapping[str, str]:
        """The tags that MLflow and git have for all runs of this process."""
        from mlflow.tracking.context.registry import resolve_tags

        found: Mapping[str, str] = resolve_tags(dict(self.git))
        return found

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        points = {metric_name(name): float(value) for name, value in values.items()}
        self._outbox.add({"metrics": points, "step": step, "at": _now_ms()})

    def log_params(self, values: Mapping[str, str]) -> None:
        self._outbox.add({"params": dict(values)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._outbox.add({"tags": {name: str(value) for name, value in tags.items()}})

    def log_dataset(self, name: str, path: Path, digest_md5: str, context: str, rows: int) -> None:
        """Record what the run read. `digest_md5` is DVC's, since MLflow takes at most 36 characters."""
        if len(digest_md5) > DIGEST_LIMIT:
            raise TrackingError(f"dataset {name}: digest {digest_md5} is longer than {DIGEST_LIMIT} characters")
        tags = {"mlflow.data.context": context, "gradeflow.rows": str(rows)}
        source = json.dumps({"uri": path.as_posix()})
        self._outbox.add({"dataset": {"name": name, "digest": digest_md5, "source": source, "tags": tags}})

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows where the UI and `mlflow.load_table` find them; a table of that name is replaced."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self._log_text(json.dumps({"columns": columns, "data": data}), name, {"table": name})

    def log_artifact(self, file: Path, folder: str | None = None) -> None:
        self._outbox.add_file(lambda own: shutil.copy2(file, own), {"folder": folder})

    def log_artifacts(self, files: Path, folder: str | None = None) -> None:
        """Store all that a local folder holds below `folder` of the run."""
        self._outbox.add_file(lambda own: shutil.copytree(files, own, dirs_exist_ok=True), {"folder": folder})

    def log_text(self, text: str, name: str) -> None:
        self._log_text(text, name, {})

    def _log_text(self, text: str, name: str, entry: Mapping[str, str]) -> None:
        folder, file = _split(name)
        self._outbox.add_file(lambda own: (own / file).write_text(text, encoding="utf-8"), {"folder": folder, **entry})

    def log_figure(self, figure: "matplotlib.figure.Figure", name: str) -> None:
        folder, file = _split(name)
        self._outbox.add_file(lambda own: figure.savefig(own / file), {"folder": folder})

    def log_rollout_trace(
        self, rollout: Rollout, step: int, judge: str = "", *, name: str = "", secrets: Collection[str] = ()
    ) -> str:
        """Store a rollout as one trace: events as spans, the score as feedback, `judge` as the source of a verdict.

        Returns the trace's id. Of one `name` the run has a single trace, however often it is logged. `secrets`, and
        what looks like one, are blanked out.
        """
        trace = redact(traces.record(rollout, step, judge, self.id, self.experiment, name), secrets)
        self._outbox.add({"trace": trace})
        return f"tr-{trace['id']}"

    def flush(self) -> bool:
        """Wait until the store has all that was logged; False where it is away."""
        return self._sender.drain()

    def end(self, status: Status, *, soon: bool = False) -> None:
        """Say how the run ended, and wait until the store knows, or, `soon`, some seconds.

        Raises:
            Unsent: the store is away; the next command sends what waits.
            TrackingError: there is something that the store will never take.
        """
        self._outbox.add({"end": status, "at": _now_ms()})
        sent = self._sender.drain(soon=soon)
        self._sender.stop()
        if not sent:
            why = self._sender.trouble or "the tracking store does not answer"
            raise Unsent(
                f"{why}. What run {self.id} logged is not lost: it waits in {self._outbox.folder}, and the next "
                f"command in this folder, such as the same one again, sends it first"
            )
        if self._sender.refused:
            raise TrackingError(self._sender.refusals())


def _now_ms() -> int:
    return int(time.time() * 1000)


def _split(name: str) -> tuple[str | None, str]:
    """The folder and the file of an artifact's path."""
    path = PurePosixPath(name)
    return (None if path.parent == PurePosixPath() else str(path.parent)), path.name


@contextmanager
def start_run(
    stage: str,
    settings_tree: Mapping[str, Any],
    *,
    name: str | None = None,
    chain: str | None = None,
    resume: str | None = None,
    fingerprint: str | None = None,
    parent: Run | None = None,
    tags: Mapping[str, str] | None = None,
    apart: bool = False,
) -> Iterator[Run]:
    """Open the stage's run: the one named by `resume`, else the one that `mlflow run` opened, else its own.

    With a `parent` it is a run of its own below that one and in its chain. It has `tags` from the first. What it and
    the runs below it log is brought to the store by this process, or `apart`, by one beside it, which takes seconds to
    start.

    Settings become params (`train.learning_rate`), but only those that the run lacks: `mlflow run` has logged
    its own spelling, and MLflow refuses a second. An exception ends the run as FAILED, Ctrl-C as KILLED.
    """
    with store.told():
        if parent is not None:
            run = _open_below(parent, stage, settings_tree, name or stage, tags or {})
        else:
            courier = COURIER if apart else None
            if courier:
                courier.start()
            run = _open(stage, settings_tree, name, chain, resume, fingerprint, tags or {}, courier)
        try:
            yield run
        except BaseException as error:
            run.set_tags({ERROR: _said(error)})
            try:
                run.end("KILLED" if isinstance(error, KeyboardInterrupt | CancelledError) else "FAILED", soon=True)
            except TrackingError as more:  # what went wrong in the stage is what its user should read last
                print(f"gradeflow: {more}", file=sys.stderr)
            raise
        run.end("FINISHED")


def _said(error: BaseException) -> str:
    """In one line: what the command ends with, or the kind of a bug."""
    said = " ".join(str(error).split())
    if not isinstance(error, GradeflowError):
        said = f"{type(error).__name__}: {said}".rstrip(": ")
    return str(redact(said))[:1000]


def _open(
    stage: str,
    tree: Mapping[str, Any],
    name: str | None,
    chain: str | None,
    resume: str | None,
    fingerprint: str | None,
    tags: Mapping[str, str],
    courier: Courier | None,
) -> Run:
    given = os.environ.pop("MLFLOW_RUN_ID", None)  # joined once: the process's further runs are their own
    client = store.client()
    run_id = resume or given or _create(stage, fingerprint)
    found = client.get_run(run_id)
    if found.info.lifecycle_stage != "active":
        raise TrackingError(f"run {run_id} is deleted. Restore it, or start without it")
    client.update_run(run_id, status="RUNNING", name=name)
    if ERROR in found.data.tags:
        client.delete_tag(run_id, ERROR)
    chain = os.environ.get("GRADEFLOW_CHAIN") or chain or found.data.tags.get(CHAIN) or run_id
    git = _git_tags()
    _log_at_once(run_id, found.data.params, tree, {**_tags(stage, chain, fingerprint), **git, **tags})
    if given and given != run_id:
        client.set_tag(given, REUSED, run_id)
    return Run(run_id, str(found.info.experiment_id), chain, git, courier)


def _open_below(parent: Run, stage: str, tree: Mapping[str, Any], name: str, tags: Mapping[str, str]) -> Run:
    """A new run, in few calls: there may be thousands."""
    known = {**parent.context, **_tags(stage, parent.chain, None), PARENT: parent.id, **tags}
    run = Run(_create_below(parent, known, name), parent.experiment, parent.chain, parent.git, parent.courier)
    run.log_params(dict(_flatten(tree, "")))
    return run


def _create_below(parent: Run, tags: dict[str, str], name: str) -> str:
    client = store.client()
    if parent.courier and parent.courier.ready:
        return parent.courier.create_run(client.tracking_uri, parent.experiment, tags, name)
    with TURN:
        return str(client.create_run(parent.experiment, tags=tags, run_name=name).info.run_id)


def note_reuse(stage: str, run_id: str, *, chain: str | None = None) -> None:
    """Leave a finished run in this chain that points to the earlier one whose result is used again."""
    with start_run(stage, {}, name=f"{_title(stage, run_id)} (reused)", chain=chain) as run:
        run.set_tags({REUSED: run_id})


def _title(stage: str, run_id: str) -> str:
    """A name that tells runs of one stage apart, in charts and comparisons too."""
    return f"{stage} {run_id[:8]}"


def _create(stage: str, fingerprint: str | None) -> str:
    """A run that is found by its stage and fingerprint from the first."""
    from mlflow.tracking.context.registry import resolve_tags

    client = store.client()
    tags = {STAGE: stage, **({FINGERPRINT: fingerprint} if fingerprint else {})}
    made = client.create_run(store.in_use().experiment, tags=resolve_tags(tags), run_name=stage)
    client.update_run(made.info.run_id, name=_title(stage, made.info.run_id))
    return str(made.info.run_id)


def _tags(stage: str, chain: str, fingerprint: str | None) -> dict[str, str]:
    tags = {STAGE: stage, CHAIN: chain, VERSION: version("gradeflow")}
    if fingerprint:
        tags[FINGERPRINT] = fingerprint
    if above := os.environ.get("GRADEFLOW_PARENT_RUN"):
        tags[PARENT] = above
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


def _log_at_once(run_id: str, known: Mapping[str, str], tree: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """What a run is found by, and its settings: without these it does not start."""
    from mlflow.entities import Param, RunTag

    client = store.client()
    if tags:
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    lacking = [Param(key, text) for key, text in _flatten(tree, "") if key not in known]
    for start in range(0, len(lacking), 100):
        client.log_batch(run_id, params=lacking[start : start + 100])


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield metric_name(name), value if isinstance(value, str) else json.dumps(value, default=str)


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
