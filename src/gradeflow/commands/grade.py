"""`gradeflow grade`: submissions against a benchmark's own graders."""

from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from gradeflow.benchmarks import grading
from gradeflow.benchmarks.catalogue import MODES, Benchmark
from gradeflow.benchmarks.grading import Graded
from gradeflow.errors import DataError, GraderError, SettingsError
from gradeflow.params import Params

MEDALS = ("gold", "silver", "bronze")


def main(params: Params, *, submission: Path, task: str, mode: str, out: Path) -> None:
    """Grade, print a line for each submission, and write the report.

    Raises:
        GraderError: some have no report; each is named in the table, and in the report.
        DataError: some are not there.
    """
    if mode not in MODES:
        raise SettingsError(f"--mode is {mode!r}; expected one of {', '.join(MODES)}")
    with Benchmark(params.solve, params.sandbox, params.grade, mode=mode) as opened:
        given = grading.submissions(submission, task, opened.tasks())
        results = list(
            track(grading.grade_all(opened, given, params.sandbox.parallel), "grading", len(given), transient=True)
        )
    totals = grading.aggregate(results)
    written = grading.write(totals, out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(_table(results))
    valid, medals, runs = (totals[f"total_{name}"] for name in ("valid_submissions", "medals", "runs"))
    console.print(f"{valid} of {runs} graded ones valid, {medals} with a medal -> {written}")
    if faults := [one.fault for one in results if one.fault]:
        raise GraderError(f"{len(faults)} of {len(results)} could not be graded: {faults[0]}", cause="grader")
    if lacking := [one.submission.path for one in results if one.report and not one.report.submission_exists]:
        raise DataError(f"{len(lacking)} of {len(results)} submissions are not there: {lacking[0]}: no such file")


def _table(results: list[Graded]) -> Table:
    names = ("task", "submission", "score", "medal", "median", "gold from", "outcome")
    table = Table(*(Column(name, overflow="fold") for name in names))
    for one in results:
        table.add_row(one.submission.competition_id, one.submission.path.name, *_cells(one))
    return table


def _cells(one: Graded) -> tuple[str, ...]:
    report = one.report
    if report is None:
        return "", "", "", "", f"not graded: {one.fault}"
    medal = next((name for name in MEDALS if getattr(report, f"{name}_medal")), "")
    invalid = f"invalid: {one.why}" if one.why else "invalid"
    outcome = "valid" if report.valid_submission else invalid if report.submission_exists else "no such file"
    score = "" if report.score is None else f"{report.score:g}"
    gold = f"{report.gold_threshold:g}{' or less' if report.is_lower_better else ''}"
    return score, medal, "above" if report.above_median else "", gold, outcome
