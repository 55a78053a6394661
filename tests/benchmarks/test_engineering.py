"""The built-in engineering task: solvable, honest about its tolerance, and silent about its answer."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest

from gradeflow import benchmarks
from gradeflow.benchmarks import Competition, InvalidSubmissionError, engineering
from gradeflow.benchmarks.engineering import Blend, Ingredient, problem
from gradeflow.benchmarks.number import describe, grade
from gradeflow.benchmarks.report import CompetitionReport, grade_csv
from gradeflow.errors import SettingsError

OPTIMUM = Blend.make(seed=0).optimum()
CHEAP = Blend((Ingredient("a", 1, 10, 1, 1), Ingredient("b", 50, 30, 1, 9)), sacks=1, protein=20, fibre=5)


@pytest.fixture
def blending(tmp_path: Path) -> Competition:
    made = benchmarks.load("engineering").competition("builtin-blending", tmp_path)
    made.prepare()
    return made


def graded(blending: Competition, answer: str, identifier: str = "builtin-blending") -> CompetitionReport:
    path = blending.public_dir.parent / "submission.csv"
    path.write_text(f"id,answer\n{identifier},{answer}\n", encoding="utf-8")
    return grade_csv(path, blending)


def test_the_gold_answer_scores_one_and_wins_gold(blending: Competition) -> None:
    report = graded(blending, f"@cost[{OPTIMUM}]")
    assert (report.score, report.gold_medal, report.valid_submission) == (1.0, True, True)


def test_the_untouched_sample_submission_loses(blending: Competition) -> None:
    report = grade_csv(blending.sample_submission, blending)
    assert (report.score, report.any_medal, report.valid_submission) == (0.0, False, True)


def test_the_stated_tolerance_is_the_graders(blending: Competition) -> None:
    found = re.search(r"within (\S+) of the lowest cost", blending.description)
    assert found
    stated, beyond = Decimal(found[1]), Decimal("0.00001")
    for sign in (-1, 1):
        assert graded(blending, f"@cost[{OPTIMUM + sign * stated}]").score == 1.0
        assert graded(blending, f"@cost[{OPTIMUM + sign * (stated + beyond)}]").score == 0.0


@pytest.mark.parametrize(("answer", "score"), [("0.5", 1.0), ("0.504", 1.0), ("0.506", 0.0), ("0", 0.0)])
def test_small_answers_have_a_relative_tolerance(answer: str, score: float) -> None:
    row = pd.DataFrame({"id": ["t"], "answer": [f"@cost[{answer}]"]})
    assert CHEAP.optimum() == Decimal("0.5")
    assert grade(problem(CHEAP, "t"), row) == score


@pytest.mark.parametrize("answer", ["@COST[3.0649E2]", "@cost[306.490]", " @cost[30649e-2] "])
def test_numbers_may_be_written_in_any_usual_way(blending: Competition, answer: str) -> None:
    assert graded(blending, answer).score == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "306.49",
        "@profit[306.49]",
        "@cost[No Best Solution]",
        "@cost[nan]",
        "@cost[inf]",
        "@cost[1e999999999]",
        "@cost[1] @cost[306.49]",
    ],
)
def test_anything_but_one_number_is_invalid(blending: Competition, answer: str) -> None:
    report = graded(blending, answer)
    assert (report.score, report.valid_submission) == (None, False)


def test_a_submission_for_another_task_is_invalid(blending: Competition) -> None:
    assert graded(blending, f"@cost[{OPTIMUM}]", identifier="industry-0").score is None


@pytest.mark.parametrize(
    "submission",
    [
        pd.DataFrame({"answer": ["@cost[1]"], "id": ["t"]}),
        pd.DataFrame({"id": ["t"]}),
        pd.DataFrame({"id": [], "answer": []}),
        pd.DataFrame({"id": ["t", "t"], "answer": ["@cost[1]", "@cost[0.5]"]}),
    ],
)
def test_other_columns_or_rows_are_invalid(submission: pd.DataFrame) -> None:
    with pytest.raises(InvalidSubmissionError):
        grade(problem(CHEAP, "t"), submission)


def test_no_public_file_tells_the_answer(blending: Competition) -> None:
    files = [path for path in blending.public_dir.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["problem.json", "sample_submission.csv"]
    assert not any(str(OPTIMUM) in path.read_text() for path in files)
    assert str(OPTIMUM) not in blending.description
    told = json.loads((blending.public_dir / "problem.json").read_text())
    assert sorted(told) == ["difficulty", "en_question", "id"]


def test_the_cheapest_allowed_plan_is_found_exactly() -> None:
    protein = Ingredient("protein", 300, 400, 20, 2)
    starch = Ingredient("starch", 100, 100, 10, 3)
    blend = Blend((protein, starch), sacks=3, protein=200, fibre=100)
    assert blend.optimum() == Decimal(5)  # one sack of protein, two of starch


def test_every_seed_makes_a_problem_that_the_cheapest_sacks_do_not_solve() -> None:
    for seed in range(10):
        blend = Blend.make(seed)
        assert blend.optimum() > Decimal(min(map(blend.cents, blend.plans()))) / 100
    assert Blend.make(3) == Blend.make(3) != Blend.make(4)


def test_the_description_says_all_that_the_solver_needs() -> None:
    text = describe(problem(CHEAP, "t"))
    for fact in (
        "0.01 USD a sack",
        "0.50 USD a sack",
        "exactly 1 sacks",
        "20 g protein",
        "5 g fibre",
        "id,answer",
        "@cost[",
    ):
        assert fact in text


def test_both_spellings_of_a_family_are_the_same(tmp_path: Path) -> None:
    one, other = (
        benchmarks.load(name).competition("builtin-blending", tmp_path) for name in ("engineering", "engineeringbench")
    )
    assert one.description == other.description


def test_unknown_families_and_tasks_are_named_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"solve.benchmark is 'chess'; expected one of engineering"):
        benchmarks.load("chess").competition("builtin-blending", tmp_path)
    with pytest.raises(SettingsError, match=r"solve.task is '../x'; engineering has builtin-blending"):
        benchmarks.load("engineering").competition("../x", tmp_path)
    with pytest.raises(SettingsError, match="no-such"):
        engineering.competition("no-such", tmp_path)
