"""Many submissions: which task each is for, and what their reports amount to."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.benchmarks.grading import Submission, aggregate, grade_all, grade_jsonl, submissions, write
from gradeflow.errors import DataError
from gradeflow.workspace import submission_name
from support.competitions import opened
from support.competitions import write as write_task

KNOWN = ("plant-7", "plant-8", "odd id.1")
CRASHES = "def grade(submission, answers):\n    return submission['no such column']\n"


@pytest.fixture
def benchmark(tmp_path: Path) -> Iterator[Benchmark]:
    write_task(tmp_path, task="plant-7")
    write_task(tmp_path, task="plant-8", grade=CRASHES)
    with opened(write_task(tmp_path, task="plant-9", leaderboard="score\n0.0\n1.0\n")) as made:
        yield made


def answer(folder: Path, name: str, value: str = "12.5") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / name
    path.write_text(f"id,answer\n0,@cost[{value}]\n")
    return path


def test_a_folder_s_files_are_for_the_tasks_they_are_named_after(tmp_path: Path) -> None:
    made = [
        ("plant-7", answer(tmp_path, "plant-7.csv")),
        ("plant-8", answer(tmp_path, "submission_plant-8_0a1b2c.csv")),
        ("odd id.1", answer(tmp_path, submission_name("odd id.1"))),
        ("plant-8", answer(tmp_path / "plant-8", "submission.csv")),
    ]
    (tmp_path / ".plant-7.csv").write_text("")
    answer(tmp_path / "scientific_on_engineering", "engineering_results_20260101_000000.csv")
    answer(tmp_path / "plant-8", "notes.txt")
    answer(tmp_path / "modeling_run_plant_7_0a1b2c3d" / "sandbox", "submission_plant-7_0a1b2c.csv")
    assert set(submissions(tmp_path, "", KNOWN)) == {Submission(*one) for one in made}


def test_with_a_task_named_all_files_are_for_it(tmp_path: Path) -> None:
    path = answer(tmp_path, "whatever.csv")
    assert submissions(tmp_path, "plant-7", KNOWN) == [Submission("plant-7", path)]
    assert submissions(path, "plant-7", KNOWN) == [Submission("plant-7", path)]


def test_lines_name_task_and_file_and_may_be_commented_out(tmp_path: Path) -> None:
    lines = tmp_path / "all.jsonl"
    lines.write_text(
        '{"competition_id": "plant-7", "submission_path": "a.csv", "more": 1}\n# {}\n\n// no\n'
        '{"competition_id": "plant-8", "submission_path": "b.csv"}\n'
    )
    assert submissions(lines, "", KNOWN) == [
        Submission("plant-7", Path("a.csv")),
        Submission("plant-8", Path("b.csv")),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", r"a\.csv: name the task that it is for with --task"),
        ("a.jsonl", "", r"a\.jsonl: holds no submissions"),
        ("a.jsonl", '{"competition_id": "x"}\n', r"line 1: expected \{\"competition_id\""),
        ("a.jsonl", "\n[1]\n", "line 2: expected"),
        ("a.jsonl", "{\n", "line 1: expected"),
        ("folder/other.csv", "", "folder: no file is named after a task"),
    ],
)
def test_what_is_for_no_task_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        submissions(path.parent if "/" in name else path, "", KNOWN)


def test_totals_have_their_names_and_faults_count_nowhere_else(benchmark: Benchmark, tmp_path: Path) -> None:
    given = [
        Submission("plant-7", answer(tmp_path, "gold.csv")),
        Submission("plant-7", answer(tmp_path, "wrong.csv", "99")),
        Submission("plant-8", answer(tmp_path, "crash.csv")),
        Submission("plant-7", tmp_path / "missing.csv"),
        Submission("plant-10", answer(tmp_path, "unknown.csv")),
        Submission("plant-9", answer(tmp_path, "low.csv", "99")),
    ]
    totals = aggregate(grade_all(benchmark, given, parallel=3))
    reports, faults = totals.pop("competition_reports"), totals.pop("faults")
    assert totals == {
        "total_runs": 4,
        "total_runs_with_submissions": 3,
        "total_valid_submissions": 3,
        "total_medals": 2,
        "total_gold_medals": 2,
        "total_silver_medals": 0,
        "total_bronze_medals": 0,
        "total_above_median": 2,
    }
    assert [report["score"] for report in reports] == [1.0, 0.0, None, 0.0]
    assert all(len(report) == 16 for report in reports)
    assert [fault["competition_id"] for fault in faults] == ["plant-8", "plant-10"]
    assert "KeyError" in faults[0]["error_message"]


def test_a_report_is_never_written_in_place_of_another(tmp_path: Path) -> None:
    written = {write({"total_runs": number}, tmp_path / "reports") for number in range(3)}
    assert sorted(json.loads(path.read_text())["total_runs"] for path in written) == [0, 1, 2]
    assert all(path.name.endswith("_grading_report.json") for path in written)


def test_a_list_is_graded_into_a_report(benchmark: Benchmark, tmp_path: Path) -> None:
    row = {"competition_id": "plant-7", "submission_path": str(answer(tmp_path, "gold.csv"))}
    (tmp_path / "all.jsonl").write_text(json.dumps(row))
    report = json.loads(grade_jsonl(tmp_path / "all.jsonl", tmp_path / "out", benchmark).read_text())
    assert (report["total_gold_medals"], report["competition_reports"][0]["score"]) == (1, 1.0)
