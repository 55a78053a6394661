"""The built-in competition: AUC, what is a valid submission, and a leaderboard on which places mean something."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from gradeflow.benchmarks import Competition, InvalidSubmissionError, mle
from gradeflow.benchmarks.mle import TEAMS, TEST, TRAIN, Fleet, auc, grade
from gradeflow.benchmarks.report import grade_csv

ANSWERS = pd.DataFrame({"id": ["7", "3", "5"], "failed": ["1", "0", "0"]})


@pytest.fixture
def pumps(tmp_path: Path) -> Competition:
    made = mle.competition("builtin-pumps", tmp_path)
    made.prepare()
    return made


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2).filter(
        lambda rows: len({r[0] for r in rows}) == 2
    )
)
def test_the_auc_is_the_one_everybody_computes(rows: Sequence[tuple[bool, int]]) -> None:
    truth, scores = zip(*rows, strict=True)
    assert auc(truth, scores) == pytest.approx(roc_auc_score(truth, scores))


def submission(ids: Sequence[str] = ("7", "3", "5"), failed: Sequence[str] = ("0.9", "0.1", "0.2")) -> pd.DataFrame:
    return pd.DataFrame({"id": ids, "failed": failed})


@pytest.mark.parametrize(
    ("given", "score"),
    [
        (submission(), 1.0),
        (submission(("3", "5", "7"), ("0.1", "0.2", "0.9")), 1.0),
        (submission((" 7", "3 ", "5"), ("2", "-1e3", "1")), 1.0),
        (submission(failed=("0.1", "0.9", "0.2")), 0.0),
        (submission(failed=("0.2", "0.1", "0.2")), 0.75),
        (submission(failed=("1", "1", "1")), 0.5),
    ],
)
def test_a_ranking_is_scored_by_pairs_whatever_its_order_of_rows(given: pd.DataFrame, score: float) -> None:
    assert grade(given, ANSWERS) == score


@pytest.mark.parametrize(
    "given",
    [
        submission(failed=("nan", "0", "0")),
        submission(failed=("inf", "0", "0")),
        submission(failed=("", "0", "0")),
        submission(failed=("yes", "0", "0")),
        submission(("7", "3", "3")),
        submission(("7", "3", "9")),
        submission(("7", "3"), ("1", "0")),
        submission((), ()),
        submission().rename(columns={"failed": "target"}),
        submission()[["failed", "id"]],
    ],
)
def test_what_is_no_ranking_of_the_test_rows_is_invalid(given: pd.DataFrame) -> None:
    with pytest.raises(InvalidSubmissionError):
        grade(given, ANSWERS)


def test_teams_are_spread_between_guessing_and_what_can_be_known(pumps: Competition) -> None:
    fleet = Fleet.make(0)
    best = auc([pump.failed for pump in fleet.test], [pump.log_odds for pump in fleet.test])
    assert len(pumps.leaderboard) == TEAMS == len(set(pumps.leaderboard))
    assert min(pumps.leaderboard) > 0.6
    assert max(pumps.leaderboard) < best + 0.01
    assert statistics.stdev(pumps.leaderboard) > 0.03


def test_one_good_column_wins_no_medal(pumps: Competition, tmp_path: Path) -> None:
    test = pd.read_csv(pumps.public_dir / "test.csv")
    path = tmp_path / "submission.csv"
    pd.DataFrame({"id": test.id, "failed": test.load}).to_csv(path, index=False)
    report = grade_csv(path, pumps)
    assert report.score is not None
    assert (report.score > 0.55, report.any_medal) == (True, False)


def test_the_tables_are_as_described_and_the_test_rows_have_no_target(pumps: Competition) -> None:
    train, test, sample = (
        pd.read_csv(pumps.public_dir / f"{name}.csv") for name in ("train", "test", "sample_submission")
    )
    assert (len(train), len(test)) == (TRAIN, TEST)
    assert list(train) == [*test, "failed"]
    assert all(f"`{name}`" in pumps.description for name in train)
    assert not set(train.id) & set(test.id)
    assert list(sample.id) == list(test.id)
    assert set(sample.failed) == {0.5}
    assert test.vibration.isna().any()
