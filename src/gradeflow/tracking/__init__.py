"""MLflow runs: where a stage writes down what it did, and finds what was done before.

With registry.py the only part that imports mlflow, and only inside functions. `connect` comes first; all
else uses the store that it chose. Tags that find things again: `gradeflow.stage`, `gradeflow.chain` (shared
by the stages of one chain), `gradeflow.fingerprint` (what the run's result depends on), `gradeflow.reused`
(the run whose result stands in for this one).

What a run logs goes to its outbox on disk, and from there to the store in a thread's own time: a server that is
slow, or gone for a while, holds up nothing and loses nothing.
"""

from gradeflow.tracking.connect import connect
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
from gradeflow.tracking.read import (
    Facts,
    Point,
    download_artifact,
    find_children,
    find_measured,
    find_run,
    find_stage,
    find_unfinished,
    is_known,
    newest_run,
    read_datasets,
    read_facts,
    read_history,
    read_metrics,
    read_tags,
    read_text,
)
from gradeflow.tracking.run import Run, child_environment, note_reuse, start_run
from gradeflow.tracking.store import environment, told
from gradeflow.tracking.traces import record_call

__all__ = [
    "CHAIN",
    "ERROR",
    "FINGERPRINT",
    "GIT_COMMIT",
    "GIT_DIRTY",
    "PARENT",
    "REUSED",
    "STAGE",
    "VERSION",
    "Facts",
    "Point",
    "Run",
    "child_environment",
    "connect",
    "download_artifact",
    "environment",
    "find_children",
    "find_measured",
    "find_run",
    "find_stage",
    "find_unfinished",
    "is_known",
    "metric_name",
    "newest_run",
    "note_reuse",
    "read_datasets",
    "read_facts",
    "read_history",
    "read_metrics",
    "read_tags",
    "read_text",
    "record_call",
    "start_run",
    "told",
]
