import time
from pathlib import Path

import pytest

from gradeflow import params, tracking
from gradeflow.errors import TrackingError
from support.tracked import client

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


def test_a_run_is_known_where_the_store_has_it(store: Path) -> None:
    with tracking.start_run("evaluate", {}) as run:
        assert tracking.is_known(run.id)
    assert not tracking.is_known("0" * 32)
    assert not tracking.is_known("")


def test_a_deleted_run_is_not_used_again(store: Path) -> None:
    with tracking.start_run("gone", {}, fingerprint="f") as run:
        pass
    client().delete_run(run.id)
    assert tracking.find_run("gone", "f") is None


def test_the_newest_run_of_a_stage_is_sought_in_its_chain(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking.start_run("evaluate-x", {}, chain="one") as first:
        pass
    time.sleep(0.01)
    with tracking.start_run("evaluate-x", {}, chain="two") as second:
        pass
    assert tracking.find_stage("evaluate-x") == second.id
    assert tracking.find_stage("evaluate-x", chain="one") == first.id
    monkeypatch.setenv("GRADEFLOW_CHAIN", "three")
    assert tracking.find_stage("evaluate-x") is None
    tracking.note_reuse("evaluate-x", first.id)
    assert tracking.find_stage("evaluate-x") == first.id


def test_runs_of_mlflow_run_and_of_the_command_line_find_each_other(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = params.Tracking(uri="", experiment="gradeflow")
    monkeypatch.setenv("MLFLOW_RUN_ID", client().create_run("0").info.run_id)
    tracking.connect(settings, store)
    with tracking.start_run("meet", {}) as joined:
        pass
    assert joined.experiment == "0"
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    tracking.connect(settings, store)
    assert tracking.find_stage("meet") == joined.id
    time.sleep(0.01)
    with tracking.start_run("meet", {}) as own:
        pass
    assert own.experiment != "0"
    monkeypatch.setenv("MLFLOW_RUN_ID", client().create_run("0").info.run_id)
    tracking.connect(settings, store)
    assert tracking.find_stage("meet") == own.id
    monkeypatch.delenv("MLFLOW_RUN_ID")
    tracking.connect(params.Tracking(uri="", experiment="another project"), store)
    assert tracking.find_stage("meet") == joined.id, "the other experiment is not searched"


def test_what_is_not_there_is_named(store: Path) -> None:
    with tracking.start_run("missing", {}) as run:
        pass
    with pytest.raises(TrackingError, match=f"run {run.id}: no artifact results.json"):
        tracking.read_text(run.id, "results.json")
    with pytest.raises(TrackingError, match="no run 0123"):
        tracking.read_tags("0123")
