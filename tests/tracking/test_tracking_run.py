import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from gradeflow import params, tracking
from gradeflow.errors import TrackingError
from support.tracked import client, status

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


def test_runs_go_below_the_given_folder_by_default(store: Path) -> None:
    with tracking.start_run("place", {}) as run:
        run.log_text("hello", "folder/placed.txt")
    assert (store / "mlflow.db").is_file()
    assert [file.read_text() for file in (store / "mlruns").rglob("placed.txt")] == ["hello"]
    assert tracking.read_text(run.id, "folder/placed.txt") == "hello"


def test_a_store_without_room_is_told_in_one_line(store: Path, small_disk: Path) -> None:
    settings = params.Tracking(uri=f"sqlite:///{small_disk}/mlflow.db", experiment="x")
    tracking.connect(settings, store)
    with (small_disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(TrackingError) as caught, tracking.start_run("full", {}):
        pass
    assert str(caught.value) == (
        f"{settings.uri}: (sqlite3.OperationalError) database or disk is full. "
        "Free some space, or set tracking.uri to a store elsewhere"
    )


def test_runs_of_one_stage_have_names_that_tell_them_apart(store: Path) -> None:
    with tracking.start_run("told-apart", {}) as run:
        pass
    tracking.note_reuse("told-apart", run.id, chain="later")
    names = [
        found.info.run_name for found in client().search_runs([run.experiment], "tags.`gradeflow.stage` = 'told-apart'")
    ]
    assert names == [f"told-apart {run.id[:8]} (reused)", f"told-apart {run.id[:8]}"]


def test_settings_become_flat_params(store: Path) -> None:
    tree = {
        "train": {
            "learning_rate": 1e-5,
            "lora": {"target_modules": ["q", "k"]},
            "dtype": "float32",
            "on": True,
        }
    }
    with tracking.start_run("params", tree) as run:
        pass
    assert client().get_run(run.id).data.params == {
        "train.learning_rate": "1e-05", "train.lora.target_modules": '["q", "k"]', "train.dtype": "float32",
        "train.on": "true",
    }  # fmt: skip


def test_a_run_carries_the_tags_that_find_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADEFLOW_PARENT_RUN", "1234")
    with tracking.start_run("tags", {}, fingerprint="f00d") as run:
        pass
    tags = tracking.read_tags(run.id)
    assert (tags["gradeflow.stage"], tags["gradeflow.fingerprint"]) == ("tags", "f00d")
    assert tags["gradeflow.chain"] == run.chain == run.id
    assert tags["mlflow.parentRunId"] == "1234"
    assert tags["gradeflow.version"]
    assert "gradeflow.git.commit" not in tags


def test_the_commit_and_uncommitted_changes_are_recorded(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    with tracking.start_run("git", {}) as clean:
        pass
    (tmp_path / "new.py").write_text("")
    with tracking.start_run("git", {}) as dirty:
        pass
    tags = tracking.read_tags(clean.id)
    assert len(tags["gradeflow.git.commit"]) == 40
    assert tags["gradeflow.git.dirty"] == "false"
    assert tracking.read_tags(dirty.id)["gradeflow.git.dirty"] == "true"


@pytest.mark.parametrize(
    ("error", "expected"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_how_the_stage_ended_is_how_its_run_ends(store: Path, error: type[BaseException] | None, expected: str) -> None:
    run = None
    try:
        with tracking.start_run("end", {}) as run:
            run.log_metrics({"x": 1.0}, step=1)
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert run
    assert status(run.id) == expected
    assert tracking.read_metrics(run.id) == {"x": 1.0}


def test_a_run_opened_by_mlflow_run_is_joined_once_and_keeps_its_spelling(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = client().create_run("0")
    client().log_param(theirs.info.run_id, "train.learning_rate", "1e-5")
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs.info.run_id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    tracking.connect(SETTINGS, store)
    with tracking.start_run("joined", {"train": {"learning_rate": 1e-5, "seed": 1}}) as run:
        assert run.id == theirs.info.run_id
    assert client().get_run(run.id).data.params == {"train.learning_rate": "1e-5", "train.seed": "1"}
    with tracking.start_run("joined", {}) as second:
        assert second.id != run.id
        assert second.experiment == "0"


def test_an_interrupted_run_goes_on_under_its_own_id(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ValueError, match="killed"),
        tracking.start_run("go", {"a": 1}, fingerprint="f") as first,
    ):
        raise ValueError("killed")
    assert tracking.find_run("go", "f") is None
    assert tracking.find_unfinished("go", "f") == first.id
    theirs = client().create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs)
    with tracking.start_run("go", {"a": 2, "b": 3}, resume=first.id, fingerprint="f") as again:
        assert (again.id, again.chain) == (first.id, first.chain)
        assert status(first.id) == "RUNNING"
    assert client().get_run(first.id).data.params == {"a": "1", "b": "3"}
    assert tracking.read_tags(theirs)["gradeflow.reused"] == first.id
    assert tracking.find_unfinished("go", "f") is None
    assert tracking.find_run("go", "f") == first.id


def test_a_subprocess_gets_its_place_in_the_chain_and_no_run_of_its_parent(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "gradeflow")
    with tracking.start_run("parent", {}) as run:
        monkeypatch.setenv("MLFLOW_RUN_ID", run.id)
        found = tracking.child_environment(run)
    assert not {"MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"} & found.keys()
    assert (found["GRADEFLOW_PARENT_RUN"], found["GRADEFLOW_CHAIN"]) == (run.id, run.chain)
    assert found["MLFLOW_TRACKING_URI"] == f"sqlite:///{store / 'mlflow.db'}"
    assert found["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("acc,none", "acc_none"), ("val/é b:c.d-e_f", "val/é b:c.d-e_f"), ("a@<b>(c)", "a__b__c_")],
)
def test_metric_names_are_made_legal(name: str, allowed: str) -> None:
    assert tracking.metric_name(name) == allowed
    assert len(tracking.metric_name("x" * 300)) == 250


def test_a_dataset_is_an_input_with_its_digest(store: Path) -> None:
    with tracking.start_run("data", {}) as run:
        for _ in range(2):
            run.log_dataset("train_mixed", Path("data/mixed/train_mixed.jsonl"), "a" * 32, "training", 200)
        with pytest.raises(TrackingError, match="longer than 36"):
            run.log_dataset("x", Path("x"), "a" * 64, "training", 1)
    assert tracking.read_datasets(run.id) == {"train_mixed": "a" * 32}
    (used,) = client().get_run(run.id).inputs.dataset_inputs
    assert {tag.key: tag.value for tag in used.tags} == {
        "mlflow.data.context": "training",
        "gradeflow.rows": "200",
    }


def test_a_table_is_found_by_mlflow_and_replaced_by_the_next_of_its_name(store: Path) -> None:
    with tracking.start_run("table", {}) as run:
        run.log_table("rollouts/step-1.json", [{"a": 9}])
        run.log_table("rollouts/step-1.json", [{"a": 1, "b": "x"}, {"a": 2, "c": None}])
    table = client().load_table(run.experiment, "rollouts/step-1.json", run_ids=[run.id])
    assert list(table.columns) == ["a", "b", "c"]
    assert list(table["a"]) == [1, 2]
    logged = json.loads(tracking.read_tags(run.id)["mlflow.loggedArtifacts"])
    assert logged == [{"path": "rollouts/step-1.json", "type": "table"}]
