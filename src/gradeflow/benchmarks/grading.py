"""Many submissions at once: which task each is for, their reports, and what they amount to."""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.benchmarks.report import CompetitionReport, explain
from gradeflow.errors import DataError, GradeflowError
from gradeflow.workspace import LONGEST_ID

RUNNERS_NAME = re.compile(r"submission_(?P<task>.+)_[0-9a-f]{6}")

WORKSPACES = "modeling_run_"


@dataclass(frozen=True, slots=True)
class Submission:
    """A file, and the competition that it was made for."""

    competition_id: str
    path: Path


@dataclass(frozen=True, slots=True)
class Graded:
    """A submission with its report, or with the fault for which it has none; `why` says what makes it invalid."""

    submission: Submission
    report: CompetitionReport | None
    fault: GradeflowError | None = None
    why: str = ""


def submissions(path: Path, task: str, known: Collection[str]) -> list[Submission]:
    """What a path holds: one file, JSON Lines with competition_id and submission_path, or a folder of files.

    In a folder a file is for the task it is named after, `ID.csv`, `submission_ID_<6 hex digits>.csv` or
    `ID/submission.csv`; other files, and the workspaces of runs, are left. With `task` all files are for that one.

    Raises:
        DataError: there is none.
    """
    if path.is_dir():
        names = {_safe(one): one for one in known}
        files = ((file, task or _task_of(file, names)) for file in sorted(_files(path)))
        found = [Submission(one, file) for file, one in files if one]
        if not found:
            raise DataError(
                f"{path}: no file is named after a task; expected ID.csv, submission_ID_<6 hex digits>.csv or "
                "ID/submission.csv, or --task ID"
            )
    elif path.suffix == ".jsonl" and not task:
        found = list(_rows(path))
    elif task:
        found = [Submission(task, path)]
    else:
        raise DataError(f"{path}: name the task that it is for with --task, or give JSON Lines or a folder")
    if not found:
        raise DataError(f"{path}: holds no submissions")
    return found


def _files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith(WORKSPACES):
            yield from _files(entry)
        elif entry.is_file() and not entry.name.startswith("."):
            yield entry


def _task_of(file: Path, names: dict[str, str]) -> str | None:
    runners = RUNNERS_NAME.fullmatch(file.stem)
    name = runners["task"] if runners else file.stem
    return names.get(file.parent.name if name == "submission" else name)


def _safe(task_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", task_id)[:LONGEST_ID]


def _rows(path: Path) -> Iterator[Submission]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith(("#", "//")):
            continue
        try:
            row = json.loads(line)
            yield Submission(str(row["competition_id"]), Path(str(row["submission_path"])))
        except (ValueError, KeyError, TypeError):
            message = 'expected {"competition_id": ..., "submission_path": ...}'
            raise DataError(f"{path}, line {number}: {message}, found {line.strip()[:80]}") from None


def grade_all(benchmark: Benchmark, given: Iterable[Submission], parallel: int = 1) -> Iterator[Graded]:
    """Grade submissions side by side; each is given back in its turn, with what went wrong where something did."""
    with ThreadPoolExecutor(parallel) as pool:
        yield from pool.map(lambda one: _graded(benchmark, one), given)


def _graded(benchmark: Benchmark, submission: Submission) -> Graded:
    try:
        report, why = explain(submission.path, benchmark.competition(submission.competition_id))
    except GradeflowError as error:
        return Graded(submission, None, error)
    return Graded(submission, report, why=why)


def aggregate(results: Iterable[Graded]) -> dict[str, Any]:
    """Totals and reports, under MLE-bench's names; `faults` has what has no report, and counts nowhere else."""
    results = list(results)
    reports = [one.report for one in results if one.report is not None]
    medals = {f"total_{name}s": sum(getattr(one, name) for one in reports) for name in _MEDALS}
    return {
        "total_runs": len(reports),
        "total_runs_with_submissions": sum(one.submission_exists for one in reports),
        "total_valid_submissions": sum(one.valid_submission for one in reports),
        "total_medals": sum(medals.values()),
        **medals,
        "total_above_median": sum(one.above_median for one in reports),
        "competition_reports": [one.to_dict() for one in reports],
        "faults": [
            {
                "competition_id": one.submission.competition_id,
                "submission_path": str(one.submission.path),
                "error_message": str(one.fault),
            }
            for one in results
            if one.fault is not None
        ],
    }


_MEDALS = ("gold_medal", "silver_medal", "bronze_medal")


def write(totals: dict[str, Any], folder: Path) -> Path:
    """Write `{timestamp}_grading_report.json`, never in place of another."""
    folder.mkdir(parents=True, exist_ok=True)
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    for ending in ("UTC", *(f"UTC-{number}" for number in range(2, 1000))):
        try:
            with (folder / f"{moment}-{ending}_grading_report.json").open("x", encoding="utf-8") as file:
                json.dump(totals, file, indent=2)
                return Path(file.name)
        except FileExistsError:
            continue
    raise DataError(f"{folder}: too many reports of this second")


def grade_jsonl(path: Path, output_dir: Path, benchmark: Benchmark) -> Path:
    """Grade what a JSONL names and write the report; returns its path."""
    given = submissions(path, "", benchmark.tasks())
    return write(aggregate(grade_all(benchmark, given)), output_dir)
