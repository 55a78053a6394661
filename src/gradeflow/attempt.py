"""One attempt at a competition: workspace, agent, grade, and the record of it on disk.

Whoever runs the agent, the stage that solves or a training loop, runs it through here, so that both leave
the same files and are graded alike.
"""

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gradeflow import agent, params
from gradeflow.agent import Episode
from gradeflow.benchmarks import Competition, TaskDefinition
from gradeflow.benchmarks.report import CompetitionReport, grade_csv
from gradeflow.errors import DataError, GradeflowError
from gradeflow.handlers import TaskInput, handler_of
from gradeflow.llm import ChatClient
from gradeflow.prompt import Message
from gradeflow.sandbox import Sandbox
from gradeflow.types import Example, Rollout, Sample
from gradeflow.workspace import Record, Workspace, submission_name, timestamp


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

    @property
    def failure(self) -> str | None:
        """What the submission lacks to be scored."""
        if self.report.valid_submission:
            return None
        return "invalid" if self.report.submission_exists else "no_submission"

    def rollout(self) -> Rollout:
        """The attempt as an episode of a policy on one example; without a valid submission there is no score."""
        example = example_of(self.competition, "modeling")
        return Rollout(example, (), self.sample(example), self.episode.events, self.failure or "")

    def sample(self, example: Example) -> Sample:
        report = self.report
        return Sample(
            example_id=example.id,
            example_digest="",
            source=example.source,
            kind=example.kind,
            completion=next(one["content"] for one in reversed(self.episode.messages) if one["role"] == "assistant"),
            answer=None if self.submission is None else self.submission.name,
            score=report.score,
            by=self.competition.grader.name,
            valid=report.valid_submission,
            failure=self.failure,
        )


def example_of(competition: Competition, source: str) -> Example:
    """The task as a question; its answer is nowhere but with the grader."""
    return Example(competition.id, source, "mixed", competition.description, "", {"competition": competition.id})


def limits(settings: params.Params) -> params.Sandbox:
    """The sandbox's settings, with processor time and places for the experiments that run side by side."""
    solve, sandbox = settings.solve, settings.sandbox
    cpu_s = max(sandbox.cpu_s, math.ceil(solve.sandbox_timeout_s))
    return sandbox.model_copy(update={"cpu_s": cpu_s, "parallel": max(sandbox.parallel, solve.parallel)})


async def solve_task(
    competition: Competition,
    client: ChatClient,
    sandbox: Sandbox,
    settings: params.Solve,
    *,
    seed: int | None = None,
    snapshot: Mapping[str, Any] | None = None,
    secrets: Collection[str] = (),
    concluded: Callable[[], None] = lambda: None,
) -> Attempt:
    """Let the agent work on a competition and grade what it submits.

    `seed` is that of the model's replies, `snapshot` the settings tree to keep beside the run; `secrets` are blanked
    out in all that is kept. `concluded` is called when the model is asked no more, before the grade.

    Raises:
        Fault: provider, sandbox or grader broke down. The workspace keeps what happened, and the cause.
    """
    started = time.time()
    task = task_of(competition, settings)
    workspace = Workspace(settings.log_path, competition.id, secrets=secrets)
    with handler_of(task) as handler:
        try:
            given = await asyncio.to_thread(handler.prepare_input, task)
        except (ValueError, FileNotFoundError) as error:
            raise DataError(str(error)) from None
        about = _about(task, given, workspace, settings, snapshot or {})
        try:
            episode = await agent.solve(given, workspace, client, sandbox, settings, seed)
            concluded()
            submission = _take(episode, given.output_path)
            report = await asyncio.to_thread(grade_csv, submission, competition)
        except GradeflowError as error:
            workspace.write_metadata(about | _timeline(started) | _failed(error))
            raise
    workspace.record("grade_reports", report.to_dict())
    workspace.write_conversation(episode.messages)
    workspace.write_metadata(about | _timeline(started) | _summary(episode, report))
    return Attempt(competition, workspace, episode, submission, report, client.model, time.time() - started)


def opening(competition: Competition, settings: params.Solve) -> list[Message]:
    """What a model is asked first."""
    task = task_of(competition, settings)
    with handler_of(task) as handler:
        return agent.opening(handler.prepare_input(task), settings)


def task_of(competition: Competition, settings: params.Solve) -> TaskDefinition:
    """The competition as a task; its submission has the format of the sample."""
    suffix = competition.sample_submission.suffix or ".csv"
    return TaskDefinition(
        competition.id,
        "science" if settings.benchmark == "science" else "kaggle",
        {
            "description": competition.description,
            "public_data_dir": str(competition.public_dir),
            "output_submission_path": str(settings.log_path / submission_name(competition.id, suffix)),
        },
    )


def _take(episode: Episode, target: Path) -> Path | None:
    return Path(shutil.copyfile(episode.submission, target)) if episode.submission else None


def _about(
    task: TaskDefinition,
    given: TaskInput,
    workspace: Workspace,
    settings: params.Solve,
    snapshot: Mapping[str, Any],
) -> dict[str, Any]:
    """What is known before the first turn."""
    data_dir = str(given.data_dir)
    asked = {"task_id": task.task_id, "task_type": task.task_type, "payload": task.payload}
    return {
        "run_name": workspace.run_name,
        "workspace_dir": str(workspace.run_dir),
        "workflow": settings.workflow,
        "parameters": settings.model_dump(mode="json"),
        "benchmark": {"name": settings.benchmark, "data_dir": data_dir, "config": None},
        "task": asked | {"benchmark": settings.benchmark, "prompt": given.description},
        "task_context": {
            "description": given.description,
            "io_instructions": given.io_instructions,
            "data_dir": data_dir,
            "expected_output_path": str(workspace.sandbox / given.output_path.name),
        },
        "config_snapshot": dict(snapshot),
        "search_tree": None,
        "detail_files": {name: f"artifacts/telemetry/{name}.jsonl" for name in get_args(Record)}
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
