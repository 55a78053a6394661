"""Names that a store and its readers share: tags of a run, and what MLflow allows in the name of a metric."""

import functools
import re

STAGE = "gradeflow.stage"
CHAIN = "gradeflow.chain"
FINGERPRINT = "gradeflow.fingerprint"
REUSED = "gradeflow.reused"
ERROR = "gradeflow.error"
VERSION = "gradeflow.version"
GIT_COMMIT = "gradeflow.git.commit"
GIT_DIRTY = "gradeflow.git.dirty"
PARENT = "mlflow.parentRunId"


@functools.cache
def metric_name(name: str) -> str:
    """The name with what MLflow does not allow in it replaced: `acc,none` becomes `acc_none`."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]
