"""`gradeflow audit tasks` from the command line to table, run and quarantine."""

import json
import time
from pathlib import Path

import mlflow
import pytest

from gradeflow import __main__ as cli
from gradeflow import benchmarks, tracking
from gradeflow.benchmarks import FAMILIES, Competition
from gradeflow.errors import AuditError, SettingsError
from support import tiny, toy_tasks


def run(tmp_path: Path, *argv: str) -> None:
    given = ["--params", str(tiny.ROOT / "params.yaml"), "--solve.quarantine", str(tmp_path / "quarantine.jsonl")]
    cli.run(["audit", "tasks", *given, *argv])


def newest() -> "mlflow.entities.Run":
    found = tracking.find_stage("audit_tasks")
    assert found is not None
    return mlflow.get_run(found)


def table(said: "mlflow.entities.Run") -> dict[str, dict[str, object]]:
    kept = mlflow.artifacts.load_dict(f"runs:/{said.info.run_id}/tasks.json")
    rows = [dict(zip(kept["columns"], row, strict=True)) for row in kept["data"]]
    return {str(row["task"]): row for row in rows}


class Spoilt:
    """A family as it could be: two sound tasks, and one of each kind of bad one."""

    def __init__(self, folder: Path) -> None:
        self.made = {
            "fine-1": toy_tasks.number(folder, "fine-1", question="How much is 1?"),
            "fine-2": toy_tasks.table(folder, "fine-2"),
            "idle": toy_tasks.number(folder, "idle", question="How much is 2?", sample="308.649"),
            "wide": toy_tasks.number(folder, "wide", question="How much is 3?", grade_fn=toy_tasks.by_pattern(0.05)),
            "unread": toy_tasks.number(folder, "unread", question="How much is 4?", answer="No Best Solution"),
            "again": toy_tasks.number(folder, "again", question="how much is 1"),
        }

    def tasks(self) -> tuple[str, ...]:
        return tuple(self.made)

    def competition(self, task_id: str, _data_dir: Path) -> Competition:
        return self.made[task_id]


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> Spoilt:
    family = Spoilt(tmp_path)
    monkeypatch.setattr(benchmarks, "load", lambda _name: family)
    return family


def test_the_built_in_tasks_pass_and_the_run_has_a_line_for_each(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [task for family in FAMILIES for task in benchmarks.load(family).tasks()[:1]]
    assert some == ["builtin-blending", "builtin-fishery", "builtin-pumps", "builtin-ringdown"]
    for family, task in zip(FAMILIES, some, strict=True):
        run(tmp_path, "--benchmark", family, "--task", task)
        said = newest()
        assert said.data.metrics[f"audit/{family}/tasks"] == 1
        assert said.data.metrics[f"audit/{family}/wrong"] == 0
        assert table(said)[task]["sound"] is True
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert "tasks that fail a check" in capsys.readouterr().out


def test_what_is_wrong_is_told_kept_and_put_in_quarantine(
    spoilt: Spoilt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AuditError) as raised:
        run(tmp_path, "--benchmark", "mathmodeling")
    assert str(raised.value) == (
        "something is wrong with 4 of 6 tasks of mathmodeling; 3 of them are unusable, and in quarantine by "
        f"{tmp_path / 'quarantine.jsonl'}"
    )
    told = capsys.readouterr().out
    for line in (
        "mathmodeling idle: sample: the untouched sample submission scores 1 and wins gold",
        "mathmodeling wide: tolerance: says ±0.01, but accepts an error of 0.05",
        "mathmodeling unread: parses: the grader does not read the answer 'No Best Solution': it scores 0",
        "mathmodeling again: duplicate: has the question of fine-1, but for case, spaces and signs",
    ):
        assert line in told
    said = newest()
    figures = {name.removeprefix("audit/mathmodeling/"): value for name, value in said.data.metrics.items()}
    assert figures["tasks"] == 6
    assert (figures["wrong"], figures["unusable"]) == (4, 3)
    assert [figures[name] for name in ("gold", "sample", "empty", "parses", "tolerance", "duplicate")] == [
        0,
        1,
        0,
        1,
        1,
        1,
    ]
    kept = table(said)
    assert [task for task, row in kept.items() if row["sound"]] == ["fine-1", "fine-2"]
    assert (kept["wide"]["unusable"], kept["idle"]["unusable"]) == (False, True)
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == ["again", "idle", "unread"]
    assert "sample: the untouched sample submission scores 1 and wins gold" in lines[1]["reasons"]


def test_a_task_that_was_mended_leaves_quarantine(spoilt: Spoilt, tmp_path: Path) -> None:
    with pytest.raises(AuditError):
        run(tmp_path)
    spoilt.made["unread"] = spoilt.made["fine-1"]
    with pytest.raises(AuditError, match="1 of 2 tasks"):
        run(tmp_path, "--task", "idle", "unread")
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == ["again", "idle"]


def test_a_task_whose_files_are_broken_is_named_and_the_others_are_audited(spoilt: Spoilt, tmp_path: Path) -> None:
    from gradeflow.errors import DataError

    def broken(task_id: str, _data_dir: Path) -> Competition:
        if task_id == "fine-2":
            raise DataError("config.yaml: grader: expected a mapping, found nothing")
        return spoilt.made[task_id]

    spoilt.competition = broken  # type: ignore[method-assign]
    with pytest.raises(AuditError, match="5 of 6 tasks"):
        run(tmp_path)
    assert table(newest())["fine-2"]["files"] == "config.yaml: grader: expected a mapping, found nothing"


def test_the_exit_status_says_whether_anything_is_wrong(
    spoilt: Spoilt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["audit", "tasks", "--params", str(tiny.ROOT / "params.yaml"), "--solve.quarantine", ""]
    cli.main([*arguments, "--task", "fine-1", "fine-2"])
    with pytest.raises(SystemExit) as raised:
        cli.main([*arguments, "--task", "wide"])
    assert raised.value.code == 1
    assert "something is wrong with 1 of 1 tasks of engineering; 0 of them are unusable" in capsys.readouterr().err


def test_unknown_families_and_tasks_are_named(tmp_path: Path, store: Path) -> None:
    with pytest.raises(SettingsError, match="'chess'"):
        run(tmp_path, "--benchmark", "chess")
    with pytest.raises(SettingsError, match="'no-such'"):
        run(tmp_path, "--task", "no-such")


def test_a_folder_of_others_is_audited_as_it_is(tmp_path: Path, store: Path) -> None:
    """With the grader in its sandbox, in the original's layout."""
    folder = tmp_path / "data" / "competitions" / "industry-0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "id: industry-0\nname: x\ncompetition_type: modeling\ndescription: x/description.md\n"
        "dataset:\n  answers: industry-0/prepared/private/answer.csv\n"
        "  sample_submission: industry-0/prepared/public/sample_submission.csv\n"
        "grader:\n  name: x\n  grade_fn: benchmarks.engineeringbench.competitions.industry-0.grade:grade\n"
        "preparer: benchmarks.engineeringbench.competitions.industry-0.prepare:prepare\n"
    )
    (folder / "description.md").write_text(f"# Industry 0\n\nHow much?\n\n{toy_tasks.TOLD}")
    (folder / "leaderboard.csv").write_text("teamId,score\nBest,1.0\nWorst,0.0\n")
    (folder / "grade.py").write_text(
        "def value(table):\n    return float(table.iloc[0]['answer'][6:-1])\n\n"
        "def grade(submission, answers):\n    try:\n        error = abs(value(submission) - value(answers))\n"
        "    except Exception:\n        return 0.0\n    return float(error <= 0.05)\n"
    )
    for part, name, value in (("private", "answer", "308.649"), ("public", "sample_submission", "0.00")):
        path = folder / "prepared" / part / f"{name}.csv"
        toy_tasks.write(path, [("id", "answer"), ("industry-0", f"@cost[{value}]")])
    (folder / "prepared" / "public" / "problem.json").write_text(
        '{"en_question": "How much?", "expected_answer": 308.649}'
    )
    before = time.perf_counter()
    with pytest.raises(AuditError, match="1 of 1 tasks of engineering; 1 of them are unusable"):
        run(tmp_path, "--benchmark", "engineeringbench", "--data-dir", str(tmp_path / "data"))
    assert time.perf_counter() - before < 60
    row = table(newest())["industry-0"]
    assert row["tolerance"] == "says ±0.01, but accepts an error of 0.05"
    assert row["leak"] == "problem.json holds the answer 308.649 as expected_answer"
    assert (row["gold"], row["grader"]) == ("", "")
