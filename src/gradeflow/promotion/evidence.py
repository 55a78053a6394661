"""What a decision rested on, file by file, so that a later look can tell whether it is still that."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradeflow import digest, tracking
from gradeflow.errors import TrackingError
from gradeflow.promotion.evaluated import Evaluation

NAME = "evidence.json"
REPORT = "report.json"
DATA = "dataset/dataset_stats.json"


def collect(evaluations: Mapping[str, Evaluation], report: str, training_run: str) -> str:
    """The SHA-256 of every file of the evaluations, by run, of the report, and of what is told of the data, as JSON."""
    found: Mapping[str, Any] = {
        "report": digest.of_bytes(report.encode()),
        "data": {training_run: about_data(training_run)},
        "evaluations": {run_id: files(one.folder) for run_id, one in evaluations.items()},
    }
    return json.dumps(found, indent=2, sort_keys=True)


def about_data(training_run: str) -> str:
    """The digest of what a training run has about its data; empty where it has nothing."""
    try:
        return digest.of_bytes(tracking.read_text(training_run, DATA).encode())
    except TrackingError:
        return ""


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): digest.of_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
