from pathlib import Path

import pytest

from gradeflow import params, promote, registry, tracking
from gradeflow.commands import leaderboard
from gradeflow.errors import TrackingError
from gradeflow.params import Params
from support.evaluated import SHIPPED, World

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


def settings(name: str) -> Params:
    return params.load(SHIPPED, {"tracking.experiment": name, "promote.model": name})


def test_versions_and_runs_are_ranked_with_their_intervals(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings("board")
    world = World(given, tmp_path)
    for seed, right in ((1, 60), (2, 90)):
        run_id = world.evaluation(30, (seed, right))
        promote.main(given)
        version = registry.get_alias("board", "champion")
        assert version
        values = {
            "board/score": right / 100,
            "board/score_low": right / 100 - 0.1,
            "board/score_high": right / 100 + 0.1,
        }
        registry.log_metrics(version.model_id, values, run_id)
    with tracking.start_run("evaluate", {}, name="by hand") as run:
        run.log_metrics({"board/score": 0.7, "board/score_stderr": 0.1})
    with tracking.start_run("evaluate", {}, name="plain") as run:
        run.log_metrics({"board/score": 0.1})
    found = leaderboard.frame("board/score", "board")
    models = found[found["what"].str.startswith("board version")]
    assert list(models["what"]) == ["board version 2 (champion)", "board version 1"]
    assert list(found["value"]) == sorted(found["value"], reverse=True)
    by_hand = found[found["what"] == "by hand"].iloc[0]
    assert (by_hand["low"], by_hand["high"]) == pytest.approx((0.504, 0.896), abs=1e-3)
    assert found[found["what"] == "plain"].iloc[0]["low"] != 0.1
    assert leaderboard.frame("board/score", "board", lower=True).iloc[0]["what"] == "plain"
    capsys.readouterr()
    leaderboard.main(given, metric="board/score", count=2)
    said = capsys.readouterr().out
    assert "champion" in said
    assert "more; --count shows them" in said


def test_a_metric_that_nothing_has_is_named(store: Path, tmp_path: Path) -> None:
    given = settings("no-board")
    World(given, tmp_path)
    with pytest.raises(TrackingError, match="has the metric nothing/at_all"):
        leaderboard.frame("nothing/at_all", given.promote.model)
