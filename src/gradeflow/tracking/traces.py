"""A rollout as a trace of MLflow: `record` makes plain JSON of it, `send` stores that, twice as well as once.

MLflow's own way to log spans draws ids from `random`, asks the server once a span, and keeps failures to itself.
"""

import base64
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from gradeflow import digest
from gradeflow.tracking import store
from gradeflow.types import Event, Rollout

_SPAN_TYPES: Mapping[str, str] = {
    "policy": "LLM",
    "workflow": "CHAIN",
    "operator": "TOOL",
    "chat": "CHAT_MODEL",
    "sandbox": "TOOL",
    "score": "EVALUATOR",
    "turn": "AGENT",
}
PREVIEW = 1000


def record(rollout: Rollout, step: int, judge: str, run: str, experiment: str, name: str = "") -> dict[str, Any]:
    """The rollout with events as spans, and the score as feedback, of which `judge` is the source for a verdict.

    The trace's id follows from run and `name`; without one it is drawn.
    """
    events, sample = rollout.events, rollout.sample
    started = min((event.started for event in events), default=time.time())
    ended = max((event.started + event.seconds for event in events), default=started)
    asked = {"problem": rollout.example.problem, "id": rollout.example.id}
    answered = {
        "answer": sample.answer,
        "score": sample.score,
        "failure": sample.failure,
        "fault": sample.fault,
        "reason": rollout.reason,
    }
    trace = digest.of_json([run, name])[:32] if name else uuid.uuid4().hex
    root = _span(trace, 0, None, "rollout", "AGENT", started, ended, asked, answered)
    return {
        "id": trace,
        "experiment": experiment,
        "started_ms": int(started * 1000),
        "duration_ms": int((ended - started) * 1000),
        "asked": json.dumps(asked)[:PREVIEW],
        "answered": json.dumps(answered)[:PREVIEW],
        "metadata": {"mlflow.sourceRun": run, "gradeflow.source": rollout.example.source},
        "tags": {"mlflow.traceName": "rollout", "kind": rollout.example.kind, "step": str(step)},
        "spans": [root, *(_span_of(trace, number, event) for number, event in enumerate(events, start=1))],
        "score": {
            "id": f"a-{trace}",
            "at_ms": int(time.time() * 1000),
            "value": sample.score,
            "fault": None if sample.score is not None else sample.fault or "unknown",
            "reason": rollout.reason or None,
            "by_judge": sample.by == "judge",
            "by": (judge if sample.by == "judge" else "") or sample.by or "gradeflow",
        },
    }


def _span_of(trace: str, number: int, event: Event) -> dict[str, Any]:
    parent = 0 if event.parent is None else event.parent + 1
    ended = event.started + event.seconds
    kind = _SPAN_TYPES[event.kind]
    made = _span(trace, number, parent, event.name, kind, event.started, ended, event.inputs, event.outputs)
    if event.kind in {"chat", "policy"}:
        read, written = event.prompt_tokens, event.completion_tokens
        usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        # Without a cost MLflow would put one there, from its own list of prices.
        cost = {"total_cost": event.cost}
        known = {"mlflow.chat.tokenUsage": usage, "mlflow.llm.model": event.name, "mlflow.llm.cost": cost}
        made["attributes"] |= {key: json.dumps(value) for key, value in known.items()}
    return made


def _span(
    trace: str,
    number: int,
    parent: int | None,
    name: str,
    kind: str,
    started: float,
    ended: float,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
) -> dict[str, Any]:
    """A span in the form of MLflow's `Span.to_dict`; 0 is the root's number."""
    attributes = {
        "mlflow.traceRequestId": f"tr-{trace}",
        "mlflow.spanType": kind,
        "mlflow.spanInputs": dict(inputs),
        "mlflow.spanOutputs": dict(outputs),
    }
    return {
        "trace_id": _base64(bytes.fromhex(trace)),
        "span_id": _base64((number + 1).to_bytes(8, "big")),
        "parent_span_id": None if parent is None else _base64((parent + 1).to_bytes(8, "big")),
        "name": name,
        "start_time_unix_nano": int(started * 1e9),
        "end_time_unix_nano": int(ended * 1e9),
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {key: json.dumps(value, default=str) for key, value in attributes.items()},
    }


def _base64(number: bytes) -> str:
    return base64.b64encode(number).decode()


def send(trace: Mapping[str, Any], uri: str) -> None:
    """Store what `record` made. Its ids are chosen there: a trace sent again is the same one."""
    from mlflow.entities import (
        Assessment,
        AssessmentError,
        AssessmentSource,
        Feedback,
        Span,
        TraceInfo,
        TraceLocation,
        TraceState,
    )
    from mlflow.tracing.client import TracingClient

    scores: list[Assessment] = []
    if said := trace.get("score"):
        score = Feedback(
            name="score",
            value=said["value"],
            error=AssessmentError(said["fault"], said["reason"]) if said["fault"] else None,
            rationale=None if said["fault"] else said["reason"],
            source=AssessmentSource("LLM_JUDGE" if said["by_judge"] else "CODE", said["by"]),
            trace_id=f"tr-{trace['id']}",
            create_time_ms=said["at_ms"],
            last_update_time_ms=said["at_ms"],
        )
        score.assessment_id = said["id"]
        scores.append(score)
    info = TraceInfo(
        f"tr-{trace['id']}",
        TraceLocation.from_experiment_id(trace["experiment"]),
        trace["started_ms"],
        TraceState.OK,
        request_preview=trace["asked"],
        response_preview=trace["answered"],
        execution_duration=trace["duration_ms"],
        trace_metadata={
            "mlflow.trace_schema.version": "3",
            "mlflow.traceInputs": trace["asked"],
            "mlflow.traceOutputs": trace["answered"],
            **trace["metadata"],
        },
        tags=trace["tags"],
        assessments=scores,
    )
    client = TracingClient(uri)
    client.start_trace(info)  # first: a store that finds it there has to merge it, which takes twice as long
    client.log_spans(trace["experiment"], [Span.from_dict(span) for span in trace["spans"]])


def record_call(
    name: str,
    asked: Mapping[str, Any],
    answered: Mapping[str, Any],
    *,
    seconds: float,
    run: str,
    tags: Mapping[str, str],
) -> None:
    """Store one request to a model that has just been answered as a trace, of a run if one is named."""
    import mlflow

    ended, trace, experiment = time.time(), uuid.uuid4().hex, store.in_use().experiment
    made = {
        "id": trace,
        "experiment": experiment,
        "started_ms": int((ended - seconds) * 1000),
        "duration_ms": int(seconds * 1000),
        "asked": json.dumps(asked, default=str)[:PREVIEW],
        "answered": json.dumps(answered, default=str)[:PREVIEW],
        "metadata": {"mlflow.sourceRun": run} if run else {},
        "tags": {"mlflow.traceName": name, **tags},
        "spans": [_span(trace, 0, None, name, "CHAT_MODEL", ended - seconds, ended, asked, answered)],
    }
    send(made, mlflow.get_tracking_uri())
