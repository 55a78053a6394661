"""An agent solves a modeling task: workspace -> agent <-> sandbox -> submission -> grade -> MLflow run."""

import asyncio
import csv
import json
import math
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gradeflow import benchmarks, prompt, readiness, registry, tracking
from gradeflow.attempt import Attempt, solve_task
from gradeflow.benchmarks import Competition
from gradeflow.errors import DataError, GradeflowError, SettingsError
from gradeflow.llm import ChatClient, ScriptedClient, connect
from gradeflow.params import Model, Params, Solve
from gradeflow.params import Sandbox as SandboxSettings
from gradeflow.redact import redact
from gradeflow.sandbox import Sandbox

COLUMNS = (
    "competition_id",
    "submission_path",
    "answers_path",
    "score",
    "cost",
    "gold_medal",
    "silver_medal",
    "bronze_medal",
    "above_median",
    "submission_exists",
    "valid_submission",
    "error_message",
)
PROMPTS = ("agent_task", "agent_continue", "agent_no_experiment", "agent_conclude")
BENCHMARK = "gradeflow.solve.benchmark"
TASK = "gradeflow.solve.task"
MODEL = "gradeflow.solve.model"


def main(params: Params, *, task: str = "", scripted: str = "") -> None:
    """Solve one task. `scripted` names a JSON file with a list of replies that stand in for the model's."""
    chosen = {"task": task or params.solve.task, "benchmark": benchmarks.canonical(params.solve.benchmark)}
    params = params.model_copy(update={"solve": params.solve.model_copy(update=chosen)})
    replies = _replies(Path(scripted)) if scripted else None
    if replies is None:
        _require_server(params.solve.model, params.models[params.solve.model])
    with tempfile.TemporaryDirectory(prefix="gradeflow-") as folder:
        competition = benchmarks.competition(params.solve.benchmark, params.solve.task, Path(folder))
        competition.prepare()
        tracking.connect(params.tracking, Path.cwd())
        with tracking.start_run("solve", redact(params.model_dump(mode="json"))) as run:
            run.set_tags({BENCHMARK: params.solve.benchmark, TASK: competition.id})
            registry.record_prompts(run, [prompt.load(name) for name in PROMPTS])
            attempt = asyncio.run(_attempt(competition, params, replies))
            run.set_tags({MODEL: attempt.model})
            run.log_metrics(metrics(attempt))
            run.log_artifacts(attempt.workspace.artifacts, "artifacts")
            if attempt.submission:
                run.log_artifact(attempt.submission, "submission")
    print(summary(attempt))


def metrics(attempt: Attempt) -> dict[str, float]:
    """What is compared between runs. Without a valid submission there is no score."""
    episode, report = attempt.episode, attempt.report
    values = {
        "cost": episode.cost,
        "prompt_tokens": sum(event.prompt_tokens for event in episode.events),
        "completion_tokens": sum(event.completion_tokens for event in episode.events),
        "turns": episode.turns,
        "experiments": episode.experiments,
        "seconds": attempt.seconds,
        "success": episode.success,
        "submission_exists": report.submission_exists,
        "valid_submission": report.valid_submission,
        "any_medal": report.any_medal,
        "above_median": report.above_median,
    }
    scored = values if report.score is None else values | {"score": report.score}
    return {f"solve/{name}": float(value) for name, value in scored.items()}


def summary(attempt: Attempt) -> str:
    """The outcome in one line."""
    report = attempt.report
    medals = [name for name in ("gold", "silver", "bronze") if getattr(report, f"{name}_medal")]
    if report.score is not None:
        outcome = f"score {report.score:g}" + "".join(f", {name} medal" for name in medals)
    else:
        outcome = "invalid submission" if report.submission_exists else "no submission"
    return f"{report.competition_id}: {outcome}, {attempt.episode.turns} turns -> {attempt.workspace.run_dir}"


async def _attempt(competition: Competition, params: Params, replies: list[str] | None) -> Attempt:
    await readiness.check(limits(params), {})  # the executor is asked at once anyway
    client: ChatClient = (
        connect(params.models[params.solve.model], None) if replies is None else ScriptedClient(replies)
    )
    sandbox = Sandbox(limits(params))
    try:
        attempt = await solve_task(
            competition,
            client,
            sandbox,
            params.solve,
            snapshot=params.model_dump(mode="json"),
            secrets=_secrets(params),
        )
    except GradeflowError as error:
        write_results(
            params.solve,
            redact({"competition_id": competition.id, "error_message": str(error)}, _secrets(params)),
        )
        raise
    finally:
        await sandbox.close()
        await client.close()
    write_results(params.solve, row(attempt))
    return attempt


def limits(params: Params) -> SandboxSettings:
    """The sandbox's settings, with as much processor time as an experiment may take on the clock."""
    cpu_s = max(params.sandbox.cpu_s, math.ceil(params.solve.sandbox_timeout_s))
    return params.sandbox.model_copy(update={"cpu_s": cpu_s})


def row(attempt: Attempt) -> dict[str, Any]:
    """The attempt's line of the results file."""
    report = attempt.report.to_dict()
    answers = attempt.competition.answers
    return {name: report.get(name) for name in COLUMNS} | {
        "submission_path": report["submission_path"],
        "answers_path": str(answers) if answers else "",
        "cost": attempt.episode.cost,
        "error_message": "" if attempt.episode.success else "no experiment that ended well left a submission",
    }


def write_results(settings: Solve, line: Mapping[str, Any]) -> Path:
    """Write `<workflow>_on_<benchmark>/<benchmark>_results_<UTC time>.csv`, never in place of another."""
    folder = settings.log_path / f"{settings.workflow}_on_{settings.benchmark}"
    folder.mkdir(parents=True, exist_ok=True)
    moment = datetime.now(UTC)
    while True:
        path = folder / f"{settings.benchmark}_results_{moment:%Y%m%d_%H%M%S}.csv"
        try:
            file = path.open("x", newline="", encoding="utf-8")
        except FileExistsError:
            moment += timedelta(seconds=1)
            continue
        with file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerow(line)
        return path


def _require_server(name: str, model: Model) -> None:
    if model.url == "local":
        raise SettingsError(
            f"models.{name}.url is 'local': the embedded model cannot do modeling tasks; expected the URL of an "
            f"OpenAI-compatible server, with the model's name in models.{name}.model"
        )


def _replies(path: Path) -> list[str]:
    try:
        replies = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
        raise DataError(f"{path}: expected a list of texts, the replies in order")
    return replies


def _secrets(params: Params) -> list[str]:
    names = [model.api_key_env for model in params.models.values()]
    return [value for name in names if name and (value := os.environ.get(name))]
