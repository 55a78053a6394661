"""The built-in fish stocks: a closed form that solves the equation, and small answers graded fairly."""

from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from gradeflow.benchmarks import mathmodeling
from gradeflow.benchmarks.mathmodeling import Fishery, problem
from gradeflow.benchmarks.number import grade


@given(st.integers(0, 10_000))
def test_the_closed_form_solves_the_equation(seed: int) -> None:
    fishery = Fishery.make(seed)
    growth, capacity, catch, start, years = (
        float(getattr(fishery, name)) for name in ("growth", "capacity", "catch", "start", "years")
    )
    found = solve_ivp(
        lambda _, stock: growth * stock * (1 - stock / capacity) - catch, (0, years), [start], rtol=1e-10, atol=1e-12
    )
    assert found.y[0][-1] == pytest.approx(float(fishery.stock()), rel=1e-6)


@given(st.integers(0, 10_000))
def test_a_stock_is_drawn_that_neither_the_start_nor_the_rest_tells(seed: int) -> None:
    fishery = Fishery.make(seed)
    stock = fishery.stock()
    assert all(abs(stock - known) > known / 20 for known in (fishery.start, *fishery.rests()))
    assert (Decimal("0.2") < stock < 1) == (seed % 4 == 3)
    assert Fishery.make(seed) == fishery


def test_the_question_names_every_quantity() -> None:
    fishery = Fishery.make(5)
    for value in (fishery.growth, fishery.capacity, fishery.catch, fishery.start, fishery.years):
        assert f" {value} " in fishery.question()


@pytest.mark.parametrize(("factor", "score"), [("0.9901", 1.0), ("1.0099", 1.0), ("0.9899", 0.0), ("1.0101", 0.0)])
def test_of_a_stock_below_one_a_hundredth_of_itself_is_allowed(factor: str, score: float, tmp_path: Path) -> None:
    fishery = Fishery.make(3)
    assert fishery.stock() < 1
    asked = problem(fishery, "t")
    assert "where the stock is below 1 in size, an answer has to be within 1% of it" in (
        asked.competition(tmp_path).description
    )
    answer = fishery.stock() * Decimal(factor)
    assert grade(asked, pd.DataFrame({"id": ["t"], "answer": [f"@value[{answer:.12f}]"]})) == score


def test_the_gold_submission_is_the_solution_to_twelve_digits(tmp_path: Path) -> None:
    competition = mathmodeling.competition("builtin-fishery", tmp_path)
    competition.prepare()
    assert competition.gold_submission is not None
    assert competition.gold_submission.read_text().splitlines() == [
        "id,answer",
        "builtin-fishery,@value[16.3071493005]",
    ]
