"""The results of a benchmark in the original runner's files: one CSV a command, and a log of what was not graded.

<log_path>/<workflow>_on_<benchmark>/<benchmark>_results_<UTC time>.csv
<log_path>/<workflow>_on_<benchmark>/<benchmark>_mismatches.log
"""

import csv
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gradeflow.attempt import Attempt
from gradeflow.benchmarks import Competition
from gradeflow.params import Solve

COLUMNS = (
    "competition_id",
    "submission_path",
    "answers_path",
    "score",
    "cost",
    "gold_medal",
    "silver_medal",
    "bronze_medal",
    "above_median",
    "submission_exists",
    "valid_submission",
    "error_message",
)
NO_EXPERIMENT = "no experiment that ended well left a submission"
INVALID = "Submission invalid or missing."


class ResultsFile:
    """A row is in the file when the call returns. The file begins with the first row, and replaces no other."""

    def __init__(self, settings: Solve) -> None:
        self._folder = settings.log_path / f"{settings.workflow}_on_{settings.benchmark}"
        self._benchmark = settings.benchmark
        self.path: Path | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        if self.path is None:
            self.path = self._begin()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        if not row.get("valid_submission"):
            self._add_mismatch(row)

    def _begin(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.now(UTC)
        while True:
            path = self._folder / f"{self._benchmark}_results_{moment:%Y%m%d_%H%M%S}.csv"
            try:
                file = path.open("x", newline="", encoding="utf-8")
            except FileExistsError:
                moment += timedelta(seconds=1)
                continue
            with file:
                csv.DictWriter(file, COLUMNS).writeheader()
            return path

    def _add_mismatch(self, row: Mapping[str, Any]) -> None:
        path, exists = row.get("submission_path") or "", bool(row.get("submission_exists"))
        mismatch = {
            "problem": row["competition_id"],
            "expected_output": row.get("answers_path") or "N/A",
            "prediction": f"File: {path}, Exists: {exists}, Valid: False",
            "extracted_output": row.get("score"),
            "extract_answer_code": row.get("error_message") or INVALID,
        }
        with (self._folder / f"{self._benchmark}_mismatches.log").open("a", encoding="utf-8") as file:
            file.write(json.dumps(mismatch) + "\n")


def row_of(attempt: Attempt) -> dict[str, Any]:
    report = attempt.report.to_dict()
    why = "" if attempt.report.valid_submission else INVALID if attempt.episode.success else NO_EXPERIMENT
    return {name: report.get(name) for name in COLUMNS} | {
        "answers_path": answers_of(attempt.competition),
        "cost": attempt.episode.cost,
        "error_message": why,
    }


def answers_of(competition: Competition) -> str:
    return str(competition.answers) if competition.answers else ""
