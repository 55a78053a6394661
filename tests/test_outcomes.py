"""Figures of a benchmark over its tasks and seeds."""

import pytest

from gradeflow.outcomes import Outcome, so_far, summary


def outcome(task: str, seed: int, score: float | None, medal: str = "") -> Outcome:
    return Outcome(task, seed, score, medal, score is not None, bool(medal), 2, 0.25, 1.0)


def test_rates_are_means_over_tasks_and_errors_are_over_seeds() -> None:
    found = [
        outcome("a", 0, 1.0, "gold"),
        outcome("b", 0, 0.0),
        outcome("a", 1, 1.0, "gold"),
        outcome("b", 1, 1.0, "bronze"),
        outcome("a", 2, 1.0, "gold"),
        outcome("b", 2, None),
    ]
    figures = summary(found)
    assert figures["solve/tasks"] == 6
    assert figures["solve/cost"] == 1.5
    assert figures["solve/any_medal_rate"] == pytest.approx(2 / 3)
    assert figures["solve/any_medal_rate_stderr"] == pytest.approx(1 / 6)
    assert figures["solve/valid_rate"] == pytest.approx(5 / 6)
    assert figures["solve/score_mean"] == pytest.approx((0.5 + 1 + 1) / 3)


def test_one_seed_has_no_standard_error() -> None:
    assert not any("stderr" in name for name in summary([outcome("a", 0, 1.0)]))


def test_without_a_score_there_is_no_mean() -> None:
    assert "solve/score_mean" not in summary([outcome("a", 0, None)])
    assert so_far([outcome("a", 0, None)]) == "medals 0%  0.25 USD"
    assert so_far([]) == ""
