import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params, tracking
from gradeflow.errors import TrackingError
from gradeflow.types import Event, Example, Rollout, Sample

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


def client(uri: str | None = None) -> Any:
    import mlflow

    return mlflow.MlflowClient(uri)


def status(run_id: str) -> str:
    return str(client().get_run(run_id).info.status)


def test_a_run_is_known_where_the_store_has_it(store: Path) -> None:
    with tracking.start_run("evaluate", {}) as run:
        assert tracking.is_known(run.id)
    assert not tracking.is_known("0" * 32)
    assert not tracking.is_known("")


def test_importing_tracking_and_registry_does_not_import_mlflow() -> None:
    code = "import sys, gradeflow.tracking, gradeflow.registry; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_runs_go_below_the_given_folder_by_default(store: Path) -> None:
    with tracking.start_run("place", {}) as run:
        run.log_text("hello", "folder/note.txt")
    assert (store / "mlflow.db").is_file()
    assert [file.read_text() for file in (store / "mlruns").rglob("note.txt")] == ["hello"]
    assert tracking.read_text(run.id, "folder/note.txt") == "hello"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9: no MLflow server answers there. Start the server"),
        ("sqlite:////nowhere/at/all/mlflow.db", "unable to open database file. Check tracking.uri"),
        ("nonsense://x", "unsupported URI 'nonsense://x'"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_in_one_line(store: Path, uri: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(TrackingError, match=message) as caught:
        tracking.connect(params.Tracking(uri=uri, experiment="x"), store)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 15


def test_a_file_that_is_no_database_is_left_as_it_was(store: Path, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("plain text " * 500)
    with pytest.raises(TrackingError, match="file is not a database"):
        tracking.connect(params.Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="x"), store)
    assert (tmp_path / "mlflow.db").read_text() == "plain text " * 500


def test_a_password_in_the_address_of_a_store_is_not_printed(store: Path) -> None:
    with pytest.raises(TrackingError, match="no MLflow server answers") as caught:
        tracking.connect(params.Tracking(uri="http://user:geheim123@127.0.0.1:9", experiment="x"), store)
    assert "geheim123" not in str(caught.value)


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


def test_a_server_that_goes_away_is_told_in_one_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage() -> None:
        with tracking.start_run("gone", {}) as run:
            monkeypatch.setattr(run, "_client", client("http://127.0.0.1:9"))
            run.set_tags({"a": "b"})

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match="no MLflow server answers there"):
        stage()


def test_ctrl_c_is_not_held_up_by_a_server_that_is_gone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage() -> None:
        with tracking.start_run("gone", {}) as run:
            monkeypatch.setattr(run, "_client", client("http://127.0.0.1:9"))
            run.log_metrics({"a": 1.0})
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stage()
    assert time.monotonic() - started < 10


def test_a_server_that_is_gone_is_given_up_within_half_a_minute(store: Path) -> None:
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR as FACTOR
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_BACKOFF_JITTER as JITTER
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as RETRIES

    waits = [FACTOR.get() * 2**number + JITTER.get() for number in range(RETRIES.get())]
    assert RETRIES.get() > 0
    assert sum(waits) < 30


def test_a_deleted_experiment_is_named_with_the_way_back(store: Path) -> None:
    client().delete_experiment(client().create_experiment("deleted"))
    with pytest.raises(TrackingError, match=r"experiment deleted is deleted.*mlflow experiments restore -x"):
        tracking.connect(params.Tracking(uri="", experiment="deleted"), store)


def test_runs_of_one_stage_have_names_that_tell_them_apart(store: Path) -> None:
    with tracking.start_run("named", {}) as run:
        pass
    tracking.note_reuse("named", run.id, chain="later")
    names = [
        found.info.run_name for found in client().search_runs([run.experiment], "tags.`gradeflow.stage` = 'named'")
    ]
    assert names == [f"named {run.id[:8]} (reused)", f"named {run.id[:8]}"]


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


def test_thousands_of_metric_points_all_arrive(store: Path) -> None:
    with tracking.start_run("many", {}) as run:
        for step in range(500):
            run.log_metrics({f"train/m{number}": float(step) for number in range(5)}, step=step)
    points = client().get_metric_history(run.id, "train/m3")
    assert [(point.step, point.value) for point in points] == [(step, float(step)) for step in range(500)]


def test_a_metric_point_costs_microseconds_at_the_call(store: Path) -> None:
    with tracking.start_run("cheap", {}) as run:
        started = time.perf_counter()
        for step in range(100):
            run.log_metrics({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, step)
        assert (time.perf_counter() - started) / 400 < 100e-6


def test_metrics_that_the_store_refuses_are_not_lost_silently(store: Path) -> None:
    run = tracking.start_run("bad", {})
    opened = run.__enter__()
    opened.log_metrics({"good": 1.0, "/not/a/path/": 1.0})
    with pytest.raises(TrackingError, match="2 metric points were not taken"):
        run.__exit__(None, None, None)
    assert status(opened.id) == "FAILED"


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


def judged() -> Rollout:
    """A rollout as training records it: what the policy wrote comes last, the judge's calls are below the score."""
    example = Example("p1", "places", "qa", "Where does Ann live?", "Port Arden")
    sample = Sample("p1", "d", "places", "text", "code", "in Port Arden", 1.0, "judge", True, ("Custom",))
    asked, verdict = {"messages": [{"role": "user", "content": "the same?"}]}, {"text": "True", "finish_reason": "stop"}
    events = (
        Event("workflow", "workflow", 101.0, 2.0, {"completion": "code"}, {"answer": "in Port Arden"}),
        Event("operator", "Custom", 101.0, 1.0, {"input": "Where?"}, {"response": "in Port Arden"}, parent=0),
        Event("chat", "executor", 101.0, 0.5, asked, {"text": "in Port Arden"}, 10, 5, 0.25, parent=1),
        Event("sandbox", "run", 102.0, 0.5, {"code": "1"}, {"value": 1}, parent=1),
        Event("score", "score", 103.0, 1.0, {"answer": "in Port Arden"}, {"value": 1.0, "by": "judge"}),
        Event("chat", "gpt-oss", 103.0, 0.5, asked, verdict, 50, 4, 0.5, parent=4),
        Event("chat", "qwen", 103.0, 0.5, asked, {"error": "ProviderError: down"}, parent=4),
        Event("policy", "policy", 100.0, 1.0, asked, {"text": "code"}, 30, 20),
    )
    return Rollout(example, (), sample, events, "both name the port")


def test_a_rollout_becomes_a_trace_of_spans_with_its_score(store: Path) -> None:
    with tracking.start_run("trace", {}) as run:
        run.log_rollout_trace(judged(), 5, "gpt-oss+qwen")
    (trace,) = client().search_traces(locations=[run.experiment], run_id=run.id)
    spans = {span.name: span for span in trace.data.spans}
    above = {"workflow": "rollout", "Custom": "workflow", "executor": "Custom", "run": "Custom"}
    above |= {"score": "rollout", "gpt-oss": "score", "qwen": "score", "policy": "rollout"}
    assert {name: span.parent_id for name, span in spans.items()} == {
        "rollout": None,
        **{name: spans[parent].span_id for name, parent in above.items()},
    }
    assert {name: spans[name].span_type for name in ("policy", "Custom", "run", "score", "qwen")} == {
        "policy": "LLM", "Custom": "TOOL", "run": "TOOL", "score": "EVALUATOR", "qwen": "CHAT_MODEL",
    }  # fmt: skip
    for event in judged().events:
        assert (spans[event.name].inputs, spans[event.name].outputs) == (event.inputs, event.outputs)
    assert spans["executor"].end_time_ns - spans["executor"].start_time_ns == 500_000_000
    assert (spans["rollout"].start_time_ns, spans["rollout"].end_time_ns) == (100 * 10**9, 104 * 10**9)
    assert trace.info.token_usage == {"input_tokens": 90, "output_tokens": 29, "total_tokens": 119}
    assert trace.info.cost["total_cost"] == 0.75
    assert (trace.info.tags["kind"], trace.info.tags["step"]) == ("text", "5")


@pytest.mark.parametrize(
    ("by", "source"), [("judge", ("LLM_JUDGE", "gpt-oss+qwen")), ("unit_tests", ("CODE", "unit_tests"))]
)
def test_a_score_is_feedback_with_its_source_and_reason(store: Path, by: str, source: tuple[str, str]) -> None:
    scored = replace(judged(), sample=replace(judged().sample, by=by))
    with tracking.start_run("feedback", {}) as run:
        trace = run.log_rollout_trace(scored, 5, "gpt-oss+qwen")
    (score,) = client().get_trace(trace).info.assessments
    assert (score.name, score.value, score.rationale) == ("score", 1.0, "both name the port")
    assert (score.source.source_type, score.source.source_id) == source


def test_runs_with_the_same_seed_keep_their_own_traces_and_draw_the_same_numbers(store: Path) -> None:
    with tracking.start_run("seeded", {}) as run:
        traces, numbers = set(), set()
        for _ in range(2):
            random.seed(0)
            traces.add(run.log_rollout_trace(judged(), 5))
            numbers.add(random.random())
    assert (len(traces), len(numbers)) == (2, 1)


def test_an_abstention_is_no_score_in_a_trace(store: Path) -> None:
    sample = replace(judged().sample, score=None, by="", fault="judge_down")
    unscored = replace(judged(), sample=sample, reason="judge: no reply")
    with tracking.start_run("abstained", {}) as run:
        run.log_rollout_trace(unscored, 5)
        run.log_rollout_trace(replace(unscored, events=()), 5)
    traces = client().search_traces(locations=[run.experiment], run_id=run.id)
    assert [trace.info.assessments[0].value for trace in traces] == [None, None]
    errors = [trace.info.assessments[0].error for trace in traces]
    assert {(error.error_code, error.error_message) for error in errors} == {("judge_down", "judge: no reply")}


def test_what_is_not_there_is_named(store: Path) -> None:
    with tracking.start_run("missing", {}) as run:
        pass
    with pytest.raises(TrackingError, match=f"run {run.id}: no artifact results.json"):
        tracking.read_text(run.id, "results.json")
    with pytest.raises(TrackingError, match="no run 0123"):
        tracking.read_tags("0123")
