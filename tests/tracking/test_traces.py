import random
from dataclasses import replace
from pathlib import Path

import pytest

from gradeflow import params, tracking
from support.tracked import client, judged

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


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


def test_a_rollout_that_is_logged_again_under_its_name_is_one_trace_with_one_score(store: Path) -> None:
    with tracking.start_run("named", {}) as run:
        named = {run.log_rollout_trace(judged(), 5, name=name) for name in ("5/0", "5/0", "5/1")}
        run.flush()
        named.add(run.log_rollout_trace(judged(), 5, name="5/0"))
    found = client().search_traces(locations=[run.experiment], run_id=run.id)
    assert sorted(trace.info.trace_id for trace in found) == sorted(named)
    assert [(len(trace.data.spans), len(trace.info.assessments)) for trace in found] == [(9, 1), (9, 1)]


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
