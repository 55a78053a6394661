"""Reports: thresholds by Kaggle's medal table, and what is valid."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError
from gradeflow.benchmarks.report import CompetitionReport, Positions, grade_csv, medal, positions, thresholds
from gradeflow.errors import GraderError


def competition(tmp_path: Path, grade_fn: Callable[..., float], *, lower: bool = False) -> Competition:
    return Competition(
        id="toy",
        name="Toy",
        description="",
        grader=Grader("toy", grade_fn, is_lower_better=lower),
        answers=None,
        gold_submission=None,
        sample_submission=tmp_path / "sample_submission.csv",
        competition_type="simple",
        prepare_fn=lambda _raw, _public, _private: None,
        raw_dir=tmp_path,
        private_dir=tmp_path,
        public_dir=tmp_path,
        leaderboard=tuple(score / 10 for score in range(1, 11)),
    )


def first_cell(submission: pd.DataFrame, _answers: pd.DataFrame | None) -> float:
    if list(submission.columns) != ["score"]:
        raise InvalidSubmissionError("expected one column")
    return float(submission["score"][0])


def submitted(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "submission.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("teams", "expected"),
    [
        (1, Positions(1, 1, 1)),
        (2, Positions(1, 1, 1)),
        (9, Positions(1, 1, 3)),
        (99, Positions(9, 19, 39)),
        (100, Positions(10, 20, 40)),
        (249, Positions(10, 49, 99)),
        (250, Positions(10, 50, 100)),
        (999, Positions(11, 50, 100)),
        (1000, Positions(12, 50, 100)),
        (4500, Positions(19, 225, 450)),
    ],
)
def test_medals_go_to_the_places_of_the_table(teams: int, expected: Positions) -> None:
    assert positions(teams) == expected


def test_the_places_agree_with_the_formula_in_fractions_for_every_size() -> None:
    for teams in range(1, 100):
        places = [max(1, int(share * teams)) for share in (0.1, 0.2, 0.4)]
        assert positions(teams) == Positions(*places)


@pytest.mark.parametrize("lower", [False, True])
def test_thresholds_do_not_depend_on_the_order_of_the_leaderboard(lower: bool) -> None:
    scores = [float(score) for score in range(1, 301)]
    shuffled = random.Random(0).sample(scores, len(scores))
    found = thresholds(shuffled, lower_is_better=lower)
    best = 10 if lower else 291
    assert (found.gold, found.median) == (best, 150.5)
    assert (found.silver, found.bronze) == ((50, 100) if lower else (251, 201))


def test_a_board_of_two_teams_has_one_threshold_and_a_median_between_them() -> None:
    found = thresholds([1.0, 0.0], lower_is_better=False)
    assert (found.gold, found.silver, found.bronze, found.median) == (1.0, 1.0, 1.0, 0.5)


@pytest.mark.parametrize("lower", [False, True])
def test_a_threshold_itself_wins_the_medal_and_only_the_best_one(lower: bool) -> None:
    limits = thresholds([float(score) for score in range(1, 11)], lower_is_better=lower)
    order = (1, 2, 3, 4, 5) if lower else (10, 9, 8, 7, 6)
    won = [medal(score, limits, lower_is_better=lower) for score in order]
    assert won == ["gold", "silver", "bronze", "bronze", None]


def test_the_report_has_its_sixteen_fields() -> None:
    assert [field.name for field in fields(CompetitionReport)] == [
        "competition_id",
        "score",
        "gold_threshold",
        "silver_threshold",
        "bronze_threshold",
        "median_threshold",
        "any_medal",
        "gold_medal",
        "silver_medal",
        "bronze_medal",
        "above_median",
        "submission_exists",
        "valid_submission",
        "is_lower_better",
        "created_at",
        "submission_path",
    ]


def test_a_report_survives_its_dictionary(tmp_path: Path) -> None:
    report = grade_csv(submitted(tmp_path, "score\n0.95\n"), competition(tmp_path, first_cell))
    assert report.to_dict()["created_at"].endswith("Z")
    assert CompetitionReport.from_dict(report.to_dict()) == report
    assert report.created_at.utcoffset() == datetime.now(UTC).utcoffset()


def test_scores_are_rounded_to_five_places(tmp_path: Path) -> None:
    report = grade_csv(submitted(tmp_path, "score\n0.123456789\n"), competition(tmp_path, first_cell))
    assert report.score == 0.12346


def test_the_median_has_to_be_beaten(tmp_path: Path) -> None:
    toy = competition(tmp_path, first_cell)
    at, above = (grade_csv(submitted(tmp_path, f"score\n{score}\n"), toy) for score in (0.55, 0.56))
    assert (at.median_threshold, at.above_median, above.above_median) == (0.55, False, True)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("content", ["", "nonsense\n1\n", '"', "\xff", "a,b\n1\n2,3,4,5\n"])
def test_an_invalid_submission_has_no_score_and_no_medal_in_either_direction(
    tmp_path: Path, content: str, lower: bool
) -> None:
    path = tmp_path / "submission.csv"
    path.write_bytes(content.encode("latin-1"))
    report = grade_csv(path, competition(tmp_path, first_cell, lower=lower))
    assert (report.score, report.submission_exists, report.valid_submission) == (None, True, False)
    assert not any((report.any_medal, report.gold_medal, report.above_median))


@pytest.mark.parametrize("missing", [None, "nowhere.csv", "."])
def test_a_missing_submission_does_not_exist(tmp_path: Path, missing: str | None) -> None:
    path = tmp_path / missing if missing else None
    report = grade_csv(path, competition(tmp_path, first_cell))
    assert (report.score, report.submission_exists, report.valid_submission) == (None, False, False)


def test_a_grader_that_crashes_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(GraderError, match=r"toy: grader toy crashed: ValueError") as caught:
        grade_csv(submitted(tmp_path, "score\nabc\n"), competition(tmp_path, first_cell))
    assert caught.value.cause == "grader_crashed"


@pytest.mark.parametrize("score", ["nan", "inf"])
def test_a_grader_without_a_number_is_a_fault(tmp_path: Path, score: str) -> None:
    with pytest.raises(GraderError) as caught:
        grade_csv(submitted(tmp_path, f"score\n{score}\n"), competition(tmp_path, first_cell))
    assert caught.value.cause == "grader_no_number"


def test_the_grader_is_given_the_answers_where_a_file_holds_them(tmp_path: Path) -> None:
    answers = tmp_path / "answers.csv"
    answers.write_text("score\n0.5\n")

    def same(submission: pd.DataFrame, known: pd.DataFrame | None) -> float:
        assert known is not None
        return float(submission.equals(known))

    toy = replace(competition(tmp_path, same), answers=answers)
    assert grade_csv(submitted(tmp_path, "score\n0.5\n"), toy).score == 1.0
