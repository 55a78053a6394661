"""`gradeflow grade` and `gradeflow prepare`, as they are typed."""

import json
from pathlib import Path

import pytest

from gradeflow import __main__ as cli
from support.competitions import write

PARAMS = ["--params", str(Path(__file__).parents[2] / "params.yaml")]


def answer(path: Path, value: str) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f"id,answer\n0,@cost[{value}]\n")
    return path


def run(*words: object) -> int:
    try:
        cli.main([*map(str, words), *PARAMS])
    except SystemExit as end:
        return int(str(end.code))
    return 0


def test_one_file_is_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = write(tmp_path), answer(tmp_path / "mine.csv", "12.5")
    options = ["--benchmark", "engineeringbench", "--data-dir", data, "--task", "plant-7", "--out", tmp_path / "out"]
    assert run("grade", file, *options) == 0
    printed = capsys.readouterr().out
    assert "plant-7" in printed
    assert "gold" in printed
    (report,) = (tmp_path / "out").iterdir()
    assert f"1 of 1 graded ones valid, 1 with a medal -> {report}" in printed
    assert json.loads(report.read_text())["competition_reports"][0]["submission_path"] == str(file)


def test_a_file_that_is_invalid_says_why_and_one_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data-dir", write(tmp_path), "--out", tmp_path / "out"]
    (tmp_path / "mine.csv").write_text("")
    assert run("grade", tmp_path / "mine.csv", "--task", "plant-7", *options) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "invalid:" in printed
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"competition_id": "plant-7", "submission_path": str(tmp_path / "none.csv")}) + "\n")
    assert run("grade", rows, *options) == 1
    assert "1 of 1 submissions are not there" in capsys.readouterr().err


def test_a_folder_is_graded_and_a_fault_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, task="plant-8", grade="def grade(submission, answers):\n    raise ValueError('odd')\n")
    data = write(tmp_path)
    answer(tmp_path / "in" / "plant-7.csv", "99")
    answer(tmp_path / "in" / "submission_plant-8_123abc.csv", "12.5")
    assert run("grade", tmp_path / "in", "--data-dir", data, "--out", tmp_path / "out") == 1
    told = capsys.readouterr()
    assert "gradeflow: 1 of 2 could not be graded: plant-8: its grader crashed: ValueError: odd" in told.err
    assert "1 of 1 graded ones valid, 0 with a medal" in told.out
    (report,) = (tmp_path / "out").iterdir()
    assert [fault["competition_id"] for fault in json.loads(report.read_text())["faults"]] == ["plant-8"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--task", "plant-7", "--mode", "best"], 2, "--mode is 'best'; expected one of test, validation, prepare"),
        (["--task", "plant-9"], 1, "solve.task is 'plant-9'; engineering has plant-7"),
        ([], 1, "name the task that it is for with --task"),
        (["--benchmark", "chess"], 2, "solve.benchmark is 'chess'"),
        (["--data-dir", "/nowhere"], 1, "/nowhere: no such folder"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str
) -> None:
    file = answer(tmp_path / "mine.csv", "12.5")
    options = ["--data-dir", write(tmp_path), "--out", tmp_path / "out", *words]
    assert run("grade", file, *options) == status
    assert message in capsys.readouterr().err


def test_what_is_not_prepared_is_prepared_without_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path)
    own = data / "competitions" / "plant-7" / "prepared"
    for name in ("public/sample_submission.csv", "private/answer.csv"):
        (own / name).unlink()
        (own / name).parent.rmdir()
    for said in ("plant-7: prepared\n", "plant-7: prepared already; remove "):
        assert run("prepare", "--data-dir", data) == 0
        assert said in capsys.readouterr().out
    assert "12.5" not in (own / "public" / "problem.json").read_text()
    assert run("grade", own / "private" / "answer.csv", "--task", "plant-7", "--data-dir", data, "--out", tmp_path) == 0


def test_tasks_that_cannot_be_prepared_do_not_keep_others_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path)
    (tmp_path / "tasks.txt").write_text("plant-6\nplant-7\n")
    assert run("prepare", "--data-dir", data, "--dataset-file", tmp_path / "tasks.txt") == 1
    told = capsys.readouterr()
    assert "plant-6: FAILED" in told.out
    assert "plant-7: prepared already" in told.out
    assert "1 of 2 were not prepared" in told.err
