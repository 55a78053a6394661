"""A task from its definition to a graded submission, with and without MLflow."""

import contextlib
import csv
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradeflow import agent, attempt, benchmarks, outcomes, params, results_file, solve, tracking
from gradeflow.attempt import Attempt
from gradeflow.benchmarks import Competition
from gradeflow.benchmarks.engineering import Blend
from gradeflow.errors import DataError, Fault, GraderError, ProviderError, SettingsError, TooManyFaults
from gradeflow.params import Params
from gradeflow.redact import REDACTED
from support import attempts, competitions, solvers
from support.chat_server import ChatServer
from support.tracked import client

SHIPPED = Path(__file__).parents[1] / "params.yaml"
OPTIMUM = str(Blend.make(seed=0).optimum())
CONCLUDE = "<Inference>it is written</Inference><Conclusion>done</Conclusion>"


def experiment(code: str) -> str:
    return f"<Experiment>```python\n{code}\n```</Experiment>"


def submit(text: str) -> str:
    return experiment(f"import harness\nopen(harness.inputs['submission'], 'w').write({text!r})")


def settings(tmp_path: Path, **overrides: str) -> Params:
    return params.load(
        SHIPPED,
        {
            "solve.log_path": str(tmp_path / "results"),
            "solve.memory_mb": "1024",
            "solve.sandbox_timeout_s": "30",
            "solve.review": "false",
            "solve.task": "builtin-blending",
            "tracking.experiment": tmp_path.name,
            **overrides,
        },
    )


@pytest.fixture
def blending(tmp_path: Path) -> Competition:
    made = benchmarks.load("engineering").competition("builtin-blending", tmp_path / "data")
    made.prepare()
    return made


def attempted(tmp_path: Path, competition: Competition, replies: Sequence[str | Exception], **more: object) -> Attempt:
    return attempts.attempted(settings(tmp_path), competition, replies, **more)


def metadata(tmp_path: Path) -> dict:
    (path,) = (tmp_path / "results").glob("modeling_run_*/artifacts/telemetry/run_metadata.json")
    return json.loads(path.read_text())


def results(tmp_path: Path) -> dict[str, str]:
    (path,) = (tmp_path / "results" / "scientific_on_engineering").glob("*.csv")
    assert re.fullmatch(r"engineering_results_\d{8}_\d{6}\.csv", path.name)
    with path.open(newline="") as file:
        (line,) = csv.DictReader(file)
    return line


def test_a_scripted_solver_wins_the_built_in_task(tmp_path: Path, blending: Competition) -> None:
    attempt = attempted(tmp_path, blending, [experiment(solvers.BLENDING), CONCLUDE])
    assert (attempt.report.score, attempt.report.gold_medal, attempt.episode.success) == (1.0, True, True)
    assert attempt.submission is not None
    assert attempt.submission.parent == tmp_path / "results"
    assert re.fullmatch(r"submission_builtin-blending_[0-9a-f]{6}\.csv", attempt.submission.name)
    assert attempt.submission.read_bytes() == (attempt.workspace.sandbox / attempt.submission.name).read_bytes()


def test_a_solved_task_leaves_this_tree(tmp_path: Path, blending: Competition) -> None:
    attempt = attempted(tmp_path, blending, [experiment(solvers.BLENDING), CONCLUDE])
    found = (path.relative_to(tmp_path / "results").as_posix() for path in (tmp_path / "results").rglob("*"))
    assert sorted(re.sub(r"[0-9a-f]{32}|_[0-9a-f]{8}(?=/|$)|_[0-9a-f]{6}(?=\.)", "#", name) for name in found) == [
        "modeling_run_builtin_blending#",
        "modeling_run_builtin_blending#/artifacts",
        "modeling_run_builtin_blending#/artifacts/sandbox_scripts",
        "modeling_run_builtin_blending#/artifacts/sandbox_scripts/_sandbox_script_#.py",
        "modeling_run_builtin_blending#/artifacts/summary.json",
        "modeling_run_builtin_blending#/artifacts/summary_readable.txt",
        "modeling_run_builtin_blending#/artifacts/telemetry",
        "modeling_run_builtin_blending#/artifacts/telemetry/conversation.jsonl",
        "modeling_run_builtin_blending#/artifacts/telemetry/grade_reports.jsonl",
        "modeling_run_builtin_blending#/artifacts/telemetry/llm_calls.jsonl",
        "modeling_run_builtin_blending#/artifacts/telemetry/run_metadata.json",
        "modeling_run_builtin_blending#/artifacts/telemetry/sandbox_runs.jsonl",
        "modeling_run_builtin_blending#/candidates",
        "modeling_run_builtin_blending#/candidates/submission_builtin-blending#.csv",
        "modeling_run_builtin_blending#/logs",
        "modeling_run_builtin_blending#/sandbox",
        "modeling_run_builtin_blending#/sandbox/problem.json",
        "modeling_run_builtin_blending#/sandbox/sample_submission.csv",
        "modeling_run_builtin_blending#/sandbox/submission_builtin-blending#.csv",
        "modeling_run_builtin_blending#/state",
        "submission_builtin-blending#.csv",
    ]
    assert not any(path.is_symlink() for path in attempt.workspace.run_dir.rglob("*"))


def test_submitting_the_sample_loses(tmp_path: Path, blending: Competition) -> None:
    code = "import harness, shutil\nshutil.copy('sample_submission.csv', harness.inputs['submission'])"
    report = attempted(tmp_path, blending, [experiment(code), CONCLUDE]).report
    assert (report.score, report.any_medal, report.valid_submission) == (0.0, False, True)


def test_an_invalid_submission_has_no_score(tmp_path: Path, blending: Competition) -> None:
    attempt = attempted(tmp_path, blending, [submit("id,answer\nbuiltin-blending,about 300\n"), CONCLUDE])
    report = attempt.report
    assert (report.score, report.submission_exists, report.valid_submission) == (None, True, False)
    assert "solve/score" not in outcomes.metrics(attempt)
    assert "invalid submission" in solve.summary(attempt)


@pytest.mark.parametrize("reply", [CONCLUDE, experiment(solvers.BLENDING + "\n1 / 0")])
def test_nothing_is_graded_where_no_experiment_ended_well(tmp_path: Path, blending: Competition, reply: str) -> None:
    attempt = attempted(tmp_path, blending, [reply, CONCLUDE])
    assert (attempt.episode.success, attempt.submission) == (False, None)
    assert (attempt.report.score, attempt.report.submission_exists) == (None, False)


def test_the_metadata_holds_the_keys_of_both_originals(tmp_path: Path, blending: Competition) -> None:
    attempted(
        tmp_path, blending, [experiment(solvers.BLENDING), CONCLUDE], snapshot={"executor": {"api_key": "secret"}}
    )
    kept = metadata(tmp_path)
    assert set(kept) == {
        *(
            "schema_version",
            "run_name",
            "workspace_dir",
            "workflow",
            "parameters",
            "benchmark",
            "task",
            "task_context",
        ),
        *("timeline", "summary", "config_snapshot", "search_tree", "detail_files", "grading"),
    }
    assert set(kept["task"]) == {"task_id", "task_type", "payload", "benchmark", "prompt"}
    assert set(kept["task_context"]) == {"description", "io_instructions", "data_dir", "expected_output_path"}
    assert set(kept["summary"]) == {
        *(
            "result",
            "success",
            "total_cost",
            "usage",
            "cost_per_token",
            "llm_call_count",
            "sandbox_run_count",
        ),
        *("final_code", "final_code_path", "best_node_id", "best_path_node_ids"),
        *("num_turns", "output_exists", "grade_score"),
    }
    assert set(kept["timeline"]) == {"started_at_utc", "ended_at_utc", "duration_seconds"}
    assert kept["timeline"]["ended_at_utc"].endswith("Z")
    assert set(kept["grading"]) == {"timestamp_utc", "submission_path", "error_message", "report"}
    assert len(kept["grading"]["report"]) == 16
    assert (kept["summary"]["grade_score"], kept["summary"]["success"], kept["summary"]["num_turns"]) == (
        1.0,
        True,
        2,
    )
    assert kept["config_snapshot"] == {"executor": {"api_key": REDACTED}}


def test_no_file_that_is_kept_tells_a_secret(tmp_path: Path, blending: Competition) -> None:
    secret = "correct-horse-battery"
    attempted(tmp_path, blending, [f"my key is {secret}", CONCLUDE], secrets=[secret])
    kept = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert len(kept) > 3
    assert not any(secret in path.read_text() for path in kept)


def test_a_provider_that_breaks_down_is_a_fault_with_no_score(tmp_path: Path, blending: Competition) -> None:
    with pytest.raises(ProviderError):
        attempted(
            tmp_path, blending, [experiment(solvers.BLENDING), ProviderError("no connection", cause="unreachable")]
        )
    kept = metadata(tmp_path)
    assert (kept["summary"]["fault"], kept["summary"]["grade_score"]) == ("unreachable", None)
    assert kept["grading"] == {"error_message": "no connection", "report": None}


def test_a_grader_that_crashes_is_a_fault_with_no_score(tmp_path: Path, blending: Competition) -> None:
    broken = replace(blending, grader=replace(blending.grader, grade_fn=lambda _submission, _answers: 1 / 0))
    with pytest.raises(GraderError):
        attempted(tmp_path, broken, [experiment(solvers.BLENDING), CONCLUDE])
    assert metadata(tmp_path)["summary"]["fault"] == "grader_crashed"


def turns(*replies: str) -> Callable[[list[dict[str, str]]], str]:
    """Reply by the number of replies that the conversation holds."""
    return lambda messages: replies[sum(message["role"] == "assistant" for message in messages)]


def endpoint(url: str, **more: str) -> dict[str, str]:
    return {
        "models.base.url": url,
        "models.base.model": "stand-in",
        "models.base.no_proxy": "true",
        "models.base.retries": "0",
        "models.base.cache": "",
    } | more


def test_solve_runs_from_endpoint_to_tracked_grade(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatServer(turns(experiment(solvers.BLENDING), CONCLUDE)) as server:
        chosen = settings(
            tmp_path,
            **endpoint(server.url, **{"models.base.output_cost": "1000", "solve.benchmark": "engineeringbench"}),
        )
        solve.main(chosen, task=["builtin-blending"])
    assert "builtin-blending: score 1, gold medal, 2 turns" in capsys.readouterr().out
    run_id = tracking.find_stage("solve")
    assert run_id is not None
    measured = tracking.read_metrics(run_id)
    assert (measured["solve/score"], measured["solve/any_medal"], measured["solve/turns"]) == (1.0, 1.0, 2.0)
    assert measured["solve/cost"] == pytest.approx(measured["solve/completion_tokens"] / 1000)
    tags = tracking.read_tags(run_id)
    assert (tags[outcomes.TASK], tags[solve.BENCHMARK], tags[solve.MODEL]) == (
        "builtin-blending",
        "engineering",
        "stand-in",
    )
    assert set(json.loads(tags["gradeflow.prompts"])) == set(agent.PROMPTS)
    kept = tracking.download_artifact(run_id, "artifacts/telemetry/run_metadata.json", tmp_path / "kept")
    assert json.loads(kept.read_text())["summary"]["grade_score"] == 1.0
    line = results(tmp_path)
    assert tuple(line) == results_file.COLUMNS
    assert Path(line.pop("submission_path")).read_text().splitlines() == [
        "id,answer",
        f"builtin-blending,@cost[{OPTIMUM}]",
    ]
    assert line == {
        "competition_id": "builtin-blending",
        "answers_path": "",
        "score": "1.0",
        "cost": str(measured["solve/cost"]),
        "gold_medal": "True",
        "silver_medal": "False",
        "bronze_medal": "False",
        "above_median": "True",
        "submission_exists": "True",
        "valid_submission": "True",
        "error_message": "",
    }


def test_an_endpoint_that_breaks_down_leaves_a_row_without_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChatServer(faults=["503"]) as server, pytest.raises(Fault):
        solve.main(settings(tmp_path, **endpoint(server.url)))
    line = results(tmp_path)
    assert (line["score"], line["valid_submission"]) == ("", "")
    assert "stand-in" in line["error_message"]
    assert tracking.find_stage("solve") is None


def test_replies_in_a_file_stand_in_for_a_model(tmp_path: Path, store: Path) -> None:
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps([CONCLUDE]))
    solve.main(settings(tmp_path), scripted=str(replies))
    line = results(tmp_path)
    assert (line["score"], line["submission_exists"]) == ("", "False")
    assert line["error_message"]


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_a_script_must_be_a_list_of_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "replies.json").write_text(text)
    with pytest.raises(DataError, match=r"replies\.json"):
        solve.main(settings(tmp_path), scripted=str(tmp_path / "replies.json"))


def test_the_embedded_model_is_not_asked_to_model(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"models\.base\.url is 'local'.*--llm-model PROVIDER/NAME"):
        solve.main(settings(tmp_path))


@pytest.mark.parametrize("task", ["../x", "no-such", "builtin-blending/../../x"])
def test_an_unknown_task_is_named(tmp_path: Path, task: str) -> None:
    with pytest.raises(SettingsError, match=r"solve\.task is .* engineering has builtin-blending"):
        solve.main(settings(tmp_path, **endpoint("http://127.0.0.1:9/v1")), task=[task])
    assert not (tmp_path / "results").exists()


def test_a_place_that_cannot_be_written_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chosen = settings(
        tmp_path, **endpoint("http://127.0.0.1:9/v1"), **{"solve.log_path": str(tmp_path / "file" / "in")}
    )
    with pytest.raises(SettingsError, match=r"^solve\.log_path: .*/file/in cannot be written"):
        solve.main(chosen)


def test_a_temperature_that_is_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_TEMPERATURE", "warm")
    with pytest.raises(SettingsError, match=r"environment name: temperature: .*number.*'warm'"):
        solve.main(settings(tmp_path), llm_model="openai/mock")


def test_results_never_replace_others(tmp_path: Path) -> None:
    chosen = settings(tmp_path).solve
    files = [results_file.ResultsFile(chosen) for _ in range(4)]
    for number, file in enumerate(files):
        file.add({"competition_id": str(number)})
    written = {file.path for file in files}
    assert len(written) == 4
    assert sorted(path.read_text().splitlines()[1][0] for path in written) == ["0", "1", "2", "3"]


def test_an_experiment_has_processor_time_for_all_its_seconds(tmp_path: Path) -> None:
    assert attempt.limits(settings(tmp_path, **{"solve.sandbox_timeout_s": "600.5"})).cpu_s == 601
    assert attempt.limits(settings(tmp_path, **{"sandbox.cpu_s": "70"})).cpu_s == 70


def several(tmp_path: Path, url: str, **changes: str) -> Params:
    return settings(tmp_path, **endpoint(url), **{"solve.seeds": "3", "solve.parallel": "1"} | changes)


def rows(tmp_path: Path) -> list[dict[str, str]]:
    paths = sorted((tmp_path / "results" / "scientific_on_engineering").glob("*.csv"))
    return [line for path in paths for line in csv.DictReader(path.read_text().splitlines())]


def children(run_id: str) -> list[tuple[str, str]]:
    return sorted((one.tags[outcomes.SEED], one.status) for one in tracking.find_children(run_id))


def newest(tmp_path: Path) -> str:
    (run_id,) = [
        run.info.run_id
        for run in client().search_runs(
            [client().get_experiment_by_name(tmp_path.name).experiment_id],
            f"tags.`{tracking.STAGE}` = 'solve'",
        )
    ]
    return str(run_id)


def test_several_seeds_are_a_run_with_one_below_it_for_each(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatServer(turns(experiment(solvers.BLENDING), CONCLUDE)) as server:
        solve.main(several(tmp_path, server.url, **{"solve.parallel": "3"}))
        assert sorted({body["seed"] for body in server.bodies}) == [0, 1, 2]
    run_id = newest(tmp_path)
    assert children(run_id) == [("0", "FINISHED"), ("1", "FINISHED"), ("2", "FINISHED")]
    measured = tracking.read_metrics(run_id)
    assert measured["solve/tasks"] == 3
    assert (measured["solve/any_medal_rate"], measured["solve/any_medal_rate_stderr"]) == (1, 0)
    table = json.loads(tracking.read_text(run_id, "tasks.json"))
    assert [row[table["columns"].index("medal")] for row in table["data"]] == ["gold"] * 3
    assert "any medal: 100.0% ± 0.0%" in capsys.readouterr().out
    assert [(line["score"], line["gold_medal"]) for line in rows(tmp_path)] == [("1.0", "True")] * 3
    (_, child, _) = tracking.find_children(run_id)
    assert json.loads(tracking.read_text(child.id, "report.json"))["score"] == 1.0
    (trace,) = client().search_traces(
        locations=[client().get_run(run_id).info.experiment_id], filter_string=f"trace.run_id = '{child.id}'"
    )
    assert [span.span_type for span in trace.data.spans][1:] == ["AGENT", "CHAT_MODEL", "TOOL", "AGENT", "CHAT_MODEL"]


def test_no_trace_tells_a_key(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "correct-horse-battery"
    monkeypatch.setenv("API_KEY", key)
    replies = turns(experiment(f"print('{key}')"), f"{CONCLUDE} {key}")
    with ChatServer(replies) as server:
        monkeypatch.setenv("API_BASE", server.url)
        solve.main(several(tmp_path, server.url, **{"solve.seeds": "1"}), llm_model="mock")
    run_id = newest(tmp_path)
    experiment_id = client().get_run(run_id).info.experiment_id
    (trace,) = client().search_traces(locations=[experiment_id], filter_string=f"trace.run_id = '{run_id}'")
    told = trace.to_json()
    assert REDACTED in told
    assert key not in told


def test_what_no_further_try_mends_is_not_to_be_tried_again(tmp_path: Path, store: Path) -> None:
    with (
        ChatServer(turns(CONCLUDE), faults=["401"] * 9) as server,
        pytest.raises(TooManyFaults, match=r"HTTP 401.*Mend that") as caught,
    ):
        solve.main(several(tmp_path, server.url, **{"solve.seeds": "2", "solve.parallel": "2"}))
    assert caught.value.status == 1


def test_a_fault_in_one_task_leaves_the_others_and_is_tried_again(tmp_path: Path, store: Path) -> None:
    with ChatServer(turns(experiment(solvers.BLENDING), CONCLUDE), faults=[None, None, "503"]) as server:
        with pytest.raises(TooManyFaults, match=r"1 of 3 tasks have no score.*tries these again") as caught:
            solve.main(several(tmp_path, server.url))
        assert caught.value.status == 75
        run_id = newest(tmp_path)
        assert children(run_id) == [("0", "FINISHED"), ("1", "FAILED"), ("2", "FINISHED")]
        assert tracking.read_metrics(run_id)["solve/tasks"] == 2
        asked = len(server.bodies)
        solve.main(several(tmp_path, server.url))
        assert len(server.bodies) == asked + 2
    assert newest(tmp_path) == run_id
    assert children(run_id) == [("0", "FINISHED"), ("1", "FAILED"), ("1", "FINISHED"), ("2", "FINISHED")]
    assert tracking.read_metrics(run_id)["solve/tasks"] == 3
    assert [line["score"] for line in rows(tmp_path)] == ["1.0", "", "1.0", "1.0"]
    log = tmp_path / "results" / "scientific_on_engineering" / "engineering_mismatches.log"
    (mismatch,) = log.read_text().splitlines()
    assert json.loads(mismatch)["problem"] == "builtin-blending"


def test_a_task_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("plant-7", "plant-8"):
        data = competitions.write(tmp_path, task=task)
    broken = tmp_path / "benchmarks/engineeringbench/competitions/plant-7/config.yaml"
    broken.write_text("grader: [")
    with ChatServer(turns(CONCLUDE)) as server:
        folder = {"solve.data_dir": str(data), "solve.task": "", "solve.seeds": "1"}
        with pytest.raises(TooManyFaults, match=r"1 of 2 tasks have no score.*plant-7/config\.yaml"):
            solve.main(several(tmp_path, server.url, **folder))
    assert [line["competition_id"] for line in rows(tmp_path)] == ["plant-7", "plant-8"]
    assert "plant-7: no score" in capsys.readouterr().out


def test_an_interrupted_benchmark_has_what_was_finished_and_goes_on(tmp_path: Path, store: Path) -> None:
    reply, interrupted = turns(experiment(solvers.BLENDING), CONCLUDE), []

    def interrupting(messages: list[dict[str, str]]) -> str:
        if len(server.bodies) == 3 and not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return reply(messages)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with ChatServer(interrupting) as server, contextlib.ExitStack() as restored:
        restored.callback(signal.signal, signal.SIGINT, before)
        with pytest.raises(KeyboardInterrupt):
            solve.main(several(tmp_path, server.url))
        run_id = newest(tmp_path)
        assert client().get_run(run_id).info.status == "KILLED"
        assert children(run_id) == [("0", "FINISHED"), ("1", "KILLED")]
        assert tracking.read_metrics(run_id)["solve/tasks"] == 1
        solve.main(several(tmp_path, server.url))
    assert newest(tmp_path) == run_id
    assert children(run_id) == [("0", "FINISHED"), ("1", "FINISHED"), ("1", "KILLED"), ("2", "FINISHED")]


def test_a_benchmark_that_is_finished_is_solved_anew(tmp_path: Path, store: Path) -> None:
    with ChatServer(turns(CONCLUDE)) as server:
        for _ in range(2):
            solve.main(several(tmp_path, server.url))
        assert len(server.bodies) == 6


def test_nothing_but_faults_ends_a_benchmark_early(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve, "HOPELESS", 2)
    with ChatServer(faults=lambda _number, _body: "503") as server:
        with pytest.raises(TooManyFaults, match=r"2 tasks in a row have no score"):
            solve.main(several(tmp_path, server.url))
        assert len(server.bodies) == 2


def test_a_key_that_is_refused_ends_a_benchmark_at_once(tmp_path: Path, store: Path) -> None:
    with ChatServer(faults=lambda _number, _body: "401") as server:
        with pytest.raises(ProviderError):
            solve.main(several(tmp_path, server.url))
        assert len(server.bodies) == 1


def test_replies_may_be_given_for_each_task(tmp_path: Path, store: Path) -> None:
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps({"builtin-blending": [experiment(solvers.BLENDING), CONCLUDE]}))
    solve.main(settings(tmp_path), scripted=str(replies))
    assert [line["score"] for line in rows(tmp_path)] == ["1.0"]
    replies.write_text(json.dumps({"another": []}))
    with pytest.raises(DataError, match="no replies for builtin-blending"):
        solve.main(settings(tmp_path), scripted=str(replies))
