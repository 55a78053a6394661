"""The audit of tasks: a sound one passes, and each defect that published benchmarks have had is named."""

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeflow import benchmarks
from gradeflow.benchmarks import FAMILIES, Competition, Grader, gold, soundness
from gradeflow.benchmarks.soundness import Finding, Tolerance, duplicates, inspect, stated
from gradeflow.errors import SandboxError
from support import toy_tasks
from support.toy_tasks import by_pattern


def found(competition: Competition, tmp_path: Path) -> dict[str, str]:
    """By check, what is said; each check at most once."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    findings = inspect(competition, scratch)
    assert {finding.task_id for finding in findings} <= {competition.id}
    said = {finding.check: finding.said for finding in findings}
    assert len(said) == len(findings), findings
    return said


def unusable(competition: Competition, tmp_path: Path) -> set[str]:
    (tmp_path / "again").mkdir(exist_ok=True)
    return {finding.check for finding in inspect(competition, tmp_path / "again") if finding.unusable}


@pytest.mark.parametrize("make", [toy_tasks.number, toy_tasks.table])
def test_a_sound_task_has_no_findings(make: Callable[[Path], Competition], tmp_path: Path) -> None:
    assert found(make(tmp_path), tmp_path) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_built_in_tasks_are_sound_and_each_is_another(family: str, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    made = [benchmarks.load(family).competition(task, tmp_path) for task in benchmarks.load(family).tasks()]
    for competition in made:
        competition.prepare()
        assert inspect(competition, tmp_path / "scratch") == []
    assert list(duplicates(made)) == []


def test_a_gold_submission_that_does_not_win_is_named(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, grade_fn=lambda _submission, _answers: 0.5)
    said = found(task, tmp_path)
    assert said["gold"] == "the gold submission scores 0.5; the leaderboard's best is 1"
    assert "gold" in unusable(task, tmp_path)


def test_where_lower_is_better_the_best_is_the_lowest(tmp_path: Path) -> None:
    task = toy_tasks.table(tmp_path)

    def error(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        return 1 - toy_tasks.accuracy(submission, answers)

    lower = replace(task, grader=Grader("error", error, is_lower_better=True), leaderboard=(0.1, 0.2, 0.3, 0.5))
    assert found(lower, tmp_path) == {}
    worst = replace(lower, grader=Grader("accuracy", toy_tasks.accuracy, is_lower_better=True))
    said = found(worst, tmp_path)
    assert said["gold"] == "the gold submission scores 1; the leaderboard's best is 0.1"
    assert said["sample"] == "the untouched sample submission scores 0 and wins gold"


def test_a_gold_submission_that_is_invalid_missing_or_not_named_is_named(tmp_path: Path) -> None:
    task = toy_tasks.table(tmp_path)
    gold_file = toy_tasks.write(tmp_path / "gold.csv", [("id", "label"), ("a100", "cat"), ("a101", "dog")])
    assert found(replace(task, gold_submission=gold_file), tmp_path)["gold"].startswith(
        "the gold submission is invalid"
    )
    missing = replace(task, gold_submission=tmp_path / "none.csv")
    assert found(missing, tmp_path)["gold"] == "its gold submission none.csv is missing"
    nothing = replace(task, answers=None, grader=Grader("toy", lambda _submission, _answers: 0.1))
    assert "whether it can be solved is not known" in found(nothing, tmp_path)["gold"]
    assert unusable(nothing, tmp_path) == set()


def test_a_sample_submission_that_wins_is_named(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, answer="0.008")
    said = found(task, tmp_path)
    assert said["sample"] == "the untouched sample submission scores 1 and wins gold"
    assert unusable(task, tmp_path) == {"sample", "tolerance"}


def test_a_bronze_medal_for_the_sample_is_one_too_many(tmp_path: Path) -> None:
    task = toy_tasks.table(tmp_path)
    ids = [(f"a{100 + place}", "cat") for place in range(60)]
    toy_tasks.write(task.sample_submission, [("id", "label"), *ids])
    assert found(task, tmp_path) == {}
    easy = replace(task, leaderboard=(0.9, 0.4, 0.3, 0.2, 0.1))
    assert found(easy, tmp_path)["sample"].endswith("wins bronze")


def test_an_empty_submission_that_wins_is_named(tmp_path: Path) -> None:
    def generous(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        return float(not len(submission) or submission.equals(answers))

    task = toy_tasks.number(tmp_path, grade_fn=generous, told="")
    assert found(task, tmp_path) == {"empty": "a file with the header alone scores 1 and wins gold"}


def test_rows_without_answers_are_empty_too(tmp_path: Path) -> None:
    def generous(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        if len(submission) != len(answers):
            return 0.0
        return float(((submission["answer"] == "") | (submission["answer"] == answers["answer"])).all())

    task = toy_tasks.number(tmp_path, grade_fn=generous, told="")
    assert found(task, tmp_path) == {"empty": "a file with ids alone scores 1 and wins gold"}


@pytest.mark.parametrize("answer", ["No Best Solution", "1.2e-5", "12,345.5", "1/3", ""])
def test_an_answer_that_its_grader_does_not_read_is_named(answer: str, tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, answer=answer)
    assert found(task, tmp_path) == {"parses": f"the grader does not read the answer {answer!r}: it scores 0"}
    assert unusable(task, tmp_path) == {"parses"}


@pytest.mark.parametrize(("answer", "taken"), [("1.25e4", "1.25"), ("12,345", "12")])
def test_an_answer_that_its_grader_reads_in_part_is_named(answer: str, taken: str, tmp_path: Path) -> None:
    grade_fn = by_pattern(pattern=r"@value\[(-?\d+(?:\.\d+)?)")
    task = toy_tasks.number(tmp_path, answer=answer, grade_fn=grade_fn)
    assert found(task, tmp_path)["parses"] == f"the grader takes {taken} for the answer {answer}"


@pytest.mark.parametrize("coded", [0.05, 0.02, 0.011])
def test_a_tolerance_wider_than_stated_is_told_and_the_task_is_usable(coded: float, tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, grade_fn=by_pattern(coded))
    assert found(task, tmp_path) == {"tolerance": f"says ±0.01, but accepts an error of {coded:.2g}"}
    assert unusable(task, tmp_path) == set()


def test_a_tolerance_narrower_than_stated_is_told_and_the_task_is_not_usable(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, grade_fn=by_pattern(0.005))
    assert found(task, tmp_path) == {"tolerance": "says ±0.01, but refuses an error of less"}
    assert unusable(task, tmp_path) == {"tolerance"}


def test_one_sided_tolerances_are_told(tmp_path: Path) -> None:
    def one_sided(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        if not len(submission):
            return 0.0
        said, known = (float(table["answer"][0][7:-1] or 0) for table in (submission, answers))
        return float(known <= said <= known + 0.01)

    assert "tolerance" in found(toy_tasks.number(tmp_path, grade_fn=one_sided), tmp_path)


def test_an_absolute_tolerance_on_a_small_answer_is_told(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, answer="0.04")
    assert found(task, tmp_path) == {
        "tolerance": "the tolerance of 0.01 is 25.0% of the answer 0.04; below 1 it should be relative"
    }
    assert unusable(task, tmp_path) == set()


def test_a_relative_tolerance_is_held_to_as_well(tmp_path: Path) -> None:
    told = "## Evaluation\nAn answer within 1% counts."
    fair = toy_tasks.number(tmp_path, told=told, grade_fn=by_pattern(0.01, relative=True))
    assert found(fair, tmp_path) == {}
    wide = toy_tasks.number(tmp_path, "toy-3", told=told, grade_fn=by_pattern(0.05, relative=True))
    assert found(wide, tmp_path) == {"tolerance": "says ±1 %, but accepts an error of 15"}


@pytest.mark.parametrize("value", ["50100000", "1000000000000", "99999999999999999999", "0", "-0.5"])
def test_numbers_of_any_size_raise_no_false_alarm(value: str, tmp_path: Path) -> None:
    said = found(toy_tasks.number(tmp_path, answer=value, sample="7"), tmp_path)
    assert said.get("tolerance", "").startswith("the tolerance of 0.01 is 2.0%") == (value == "-0.5")
    assert set(said) <= {"tolerance"}
    assert bool(said) == (value == "-0.5")


def test_the_tolerance_of_an_array_is_tried_on_all_its_numbers(tmp_path: Path) -> None:
    def share(submission: Path, answers: Path) -> float:
        try:
            said = np.load(submission)
        except (ValueError, EOFError):
            return 0.0
        known = np.load(answers)
        return float(np.mean(np.abs(said - known) <= 0.1 * known)) if said.shape == known.shape else 0.0

    task = toy_tasks.competition(tmp_path, "toy-4", "Three numbers, within 2% each.", share)
    answers, sample = tmp_path / "answer.npy", tmp_path / "sample.npy"
    np.save(answers, [1.5, 20.25, 3.125])
    np.save(sample, [0.0, 0.0, 0.0])
    grader = Grader("share", share, reads_files=True)
    task = replace(task, answers=answers, sample_submission=sample, grader=grader)
    assert found(task, tmp_path) == {"tolerance": "says ±2 %, but accepts an error of 10.0%"}


def test_a_grader_that_crashes_is_told_and_is_no_score(tmp_path: Path) -> None:
    def crash(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        return toy_tasks.accuracy(submission, answers) if len(submission) else 1 / 0

    task = replace(toy_tasks.table(tmp_path), grader=Grader("toy", crash))
    assert found(task, tmp_path)["grader"].startswith("a file with the header alone crashes it: ")
    assert unusable(task, tmp_path) == set()
    always = replace(task, grader=Grader("toy", lambda _submission, _answers: 1 / 0))
    assert unusable(always, tmp_path) == {"grader"}


def test_a_sandbox_that_breaks_down_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise SandboxError("no sandbox", cause="sandbox")

    monkeypatch.setattr(soundness, "grade_csv", broken)
    with pytest.raises(SandboxError):
        inspect(toy_tasks.number(tmp_path), tmp_path)


def test_equal_questions_are_named_and_answers_that_contradict_each_other(tmp_path: Path) -> None:
    first = toy_tasks.number(tmp_path, "toy-1")
    same = toy_tasks.number(tmp_path, "toy-2", question=toy_tasks.QUESTION.replace("A tank", "A  TANK,"))
    other = toy_tasks.number(tmp_path, "toy-3", answer="17")
    different = toy_tasks.number(tmp_path, "toy-4", question="How much is left?")
    assert list(duplicates([first, same, different, other])) == [
        Finding("toy-2", "duplicate", "has the question of toy-1, but for case, spaces and signs"),
        Finding("toy-1", "duplicate", "toy-3 has its question, and the answer 17 instead of 308.649", unusable=False),
        Finding("toy-3", "duplicate", "has the question of toy-1, and the answer 17 instead of 308.649"),
    ]


def test_one_question_about_other_data_is_another_task(tmp_path: Path) -> None:
    one, other = (toy_tasks.table(tmp_path, name) for name in ("toy-5", "toy-6"))
    assert [finding.task_id for finding in duplicates([one, other])] == ["toy-6"]
    toy_tasks.write(other.public_dir / "test.csv", [("id", "weight"), ("a100", 1)])
    assert list(duplicates([one, other])) == []


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (toy_tasks.TOLD, ("0.01", None)),
        ("Reach it within 24 hours.\n\n## Evaluation\nwithin 0.5 of the optimum", ("0.5", None)),
        ("Reach it within 24 hours.\n\nScored within 2% of it.", (None, "0.02")),
        ("Reach it within 24 hours.\n\nAny answer counts.", (None, None)),
        ("# Evaluation\ntolerance of 1e-3, or 12.5 %", ("0.001", None)),
        ("# Evaluation\nwithin 12.5 %", (None, "0.125")),
        ("# Evaluation\n+/- 3", ("3", None)),
    ],
)
def test_what_a_description_states_is_read_where_it_speaks_of_grading(
    description: str, expected: tuple[str | None, str | None]
) -> None:
    absolute, relative = (Decimal(value) if value else None for value in expected)
    assert stated(description) == Tolerance(absolute, relative)


def test_of_two_tolerances_the_relative_one_is_for_answers_below_one() -> None:
    both = Tolerance(Decimal("0.01"), Decimal("0.02"))
    assert (both.at(Decimal("0.5")), both.at(Decimal(-3))) == (Decimal("0.010"), Decimal("0.01"))
    assert Tolerance(None, Decimal("0.02")).at(Decimal(-3)) == Decimal("0.06")


@given(st.decimals(-(10**15), 10**15, places=6))
def test_a_gold_answer_is_rewritten_as_the_number_that_it_is(value: Decimal) -> None:
    assert Decimal(gold.plain(value)) == value
    assert "e" not in gold.plain(value).lower()
