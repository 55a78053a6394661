"""One attempt at a competition: workspace, agent, grade, and the record of it on disk.

Whoever runs the agent, the stage that solves or a training loop, runs it through here, so that both leave
the same files and are graded alike.
"""

import asyncio
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import agent, params
from gradeflow.agent import Episode
from gradeflow.benchmarks import Competition, TaskDefinition
from gradeflow.benchmarks.report import CompetitionReport, grade_csv
from gradeflow.errors import GradeflowError
from gradeflow.llm import ChatClient
from gradeflow.sandbox import Sandbox
from gradeflow.workspace import Workspace, submission_name, timestamp


@dataclass(frozen=True, slots=True)
class Attempt:
    """`submission` is the copy that was graded; None where no experiment left one."""

    competition: Competition
    workspace: Workspace
    episode: Episode
    submission: Path | None
    report: CompetitionReport
    model: str
    seconds: float


async def solve_task(
    competition: Competition,
    client: ChatClient,
    sandbox: Sandbox,
    settings: params.Solve,
    *,
    snapshot: Mapping[str, Any] | None = None,
    secrets: Collection[str] = (),
) -> Attempt:
    """Let the agent work on a competition and grade what it submits.

    `snapshot` is the settings tree to keep beside the run; `secrets` are blanked out in all that is kept.

    Raises:
        Fault: provider, sandbox or grader broke down. The workspace keeps what happened, and the cause.
    """
    started = time.time()
    task = task_of(competition, settings.log_path)
    workspace = Workspace(settings.log_path, competition.id, secrets=secrets)
    about = _about(task, competition, workspace, settings, snapshot or {})
    try:
        episode = await agent.solve(task, workspace, client, sandbox, settings)
        submission = _take(episode, Path(task.payload["output_submission_path"]))
        report = await asyncio.to_thread(grade_csv, submission, competition)
    except GradeflowError as error:
        workspace.write_metadata(about | _timeline(started) | _failed(error))
        raise
    workspace.record("grade_reports", report.to_dict())
    workspace.write_metadata(about | _timeline(started) | _summary(episode, report))
    return Attempt(competition, workspace, episode, submission, report, client.model, time.time() - started)


def task_of(competition: Competition, log_path: Path) -> TaskDefinition:
    return TaskDefinition(
        competition.id,
        "kaggle",
        {
            "description": competition.description,
            "public_data_dir": str(competition.public_dir),
            "output_submission_path": str(log_path / submission_name(competition.id)),
        },
    )


def _take(episode: Episode, target: Path) -> Path | None:
    return Path(shutil.copyfile(episode.submission, target)) if episode.submission else None


def _about(
    task: TaskDefinition,
    competition: Competition,
    workspace: Workspace,
    settings: params.Solve,
    snapshot: Mapping[str, Any],
) -> dict[str, Any]:
    """What is known before the first turn."""
    data_dir = str(competition.public_dir)
    description = task.payload["description"]
    asked = {"task_id": task.task_id, "task_type": task.task_type, "payload": task.payload}
    return {
        "run_name": workspace.run_name,
        "workspace_dir": str(workspace.run_dir),
        "workflow": settings.workflow,
        "parameters": settings.model_dump(mode="json"),
        "benchmark": {"name": settings.benchmark, "data_dir": data_dir, "config": None},
        "task": asked | {"benchmark": settings.benchmark, "prompt": description},
        "task_context": {
            "description": description,
            "io_instructions": agent.instructions(task),
            "data_dir": data_dir,
            "expected_output_path": str(workspace.sandbox / agent.submission_of(task)),
        },
        "config_snapshot": dict(snapshot),
        "search_tree": None,
        "detail_files": {
            name: f"artifacts/telemetry/{name}.jsonl"
            for name in ("conversation", "llm_calls", "sandbox_runs", "grade_reports")
        }
        | {"search_tree": None},
    }


def _timeline(started: float) -> dict[str, Any]:
    ended = time.time()
    return {
        "timeline": {
            "started_at_utc": timestamp(started),
            "ended_at_utc": timestamp(ended),
            "duration_seconds": ended - started,
        }
    }


def _failed(error: GradeflowError) -> dict[str, Any]:
    cause = getattr(error, "cause", type(error).__name__)
    summary = {"success": False, "grade_score": None, "result": None, "fault": cause}
    return {"summary": summary, "grading": {"error_message": str(error), "report": None}}


def _summary(episode: Episode, report: CompetitionReport) -> dict[str, Any]:
    chats = [event for event in episode.events if event.kind == "chat"]
    read, written = (
        sum(event.prompt_tokens for event in chats),
        sum(event.completion_tokens for event in chats),
    )
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {
        "summary": {
            "result": report.score,
            "success": episode.success,
            "total_cost": episode.cost,
            "usage": usage,
            "cost_per_token": episode.cost / (read + written) if read + written else None,
            "llm_call_count": len(chats),
            "sandbox_run_count": episode.experiments,
            "final_code": episode.code,
            "final_code_path": None,
            "best_node_id": None,
            "best_path_node_ids": None,
            "num_turns": episode.turns,
            "output_exists": report.submission_exists,
            "grade_score": report.score,
        },
        "grading": {
            "timestamp_utc": report.to_dict()["created_at"],
            "submission_path": report.submission_path,
            "error_message": None,
            "report": report.to_dict(),
        },
    }
