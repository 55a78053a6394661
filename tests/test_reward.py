"""What an agent's work is worth, without the loopholes of the original's reward."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeflow.benchmarks.report import CompetitionReport
from gradeflow.reward import MOST, normalized, reward

VALID = CompetitionReport(
    "t", 1.0, 1.0, 1.0, 1.0, 0.5, True, True, False, False, True, True, True, False, datetime.now(UTC), "s.csv"
)
INVALID = replace(VALID, score=None, valid_submission=False, any_medal=False, gold_medal=False)


def test_the_best_work_earns_the_most() -> None:
    assert reward(VALID, success=True, experiments=1) == MOST == 1.5


@pytest.mark.parametrize(
    ("report", "success", "experiments", "earned"),
    [
        (replace(VALID, score=0.0), True, 1, 0.5),
        (INVALID, True, 1, 0.3),
        (INVALID, False, 2, 0.0),
        (INVALID, False, 0, 0.0),
        (replace(VALID, score=3.0, is_lower_better=True), True, 1, 0.75),
        (replace(VALID, score=0.0, is_lower_better=True), True, 1, 1.5),
        (replace(INVALID, is_lower_better=True), True, 1, 0.3),
        (VALID, False, 1, 0.0),
    ],
)
def test_what_work_earns(report: CompetitionReport, success: bool, experiments: int, earned: float) -> None:
    assert reward(report, success=success, experiments=experiments) == pytest.approx(earned)


@given(st.floats(allow_nan=False, allow_infinity=False), st.booleans())
def test_a_score_is_a_figure_from_0_to_1(score: float, lower: bool) -> None:
    assert 0 <= normalized(score, lower_is_better=lower) <= 1


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())
def test_a_better_score_is_never_worth_less(one: float, other: float, lower: bool) -> None:
    better, worse = (min(one, other), max(one, other)) if lower else (max(one, other), min(one, other))
    assert normalized(better, lower_is_better=lower) >= normalized(worse, lower_is_better=lower)
