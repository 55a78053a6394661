"""The modeling agent: ask, run, look, submit.

A model is asked for an experiment, its code runs in the sandbox on copies of the public files, and what came
of it is shown to the model, until it concludes. A submission counts when an experiment that ended without an
error leaves it. Faults (the provider, the sandbox) pass through: they are neither turns nor its failures.
"""

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import params, prompt
from gradeflow.benchmarks import TaskDefinition
from gradeflow.errors import DataError
from gradeflow.llm import ChatClient, Reply
from gradeflow.prompt import Message, user
from gradeflow.sandbox import Execution, RefusedOutputError, Sandbox, read_output
from gradeflow.types import Event
from gradeflow.workspace import Workspace, timestamp

TAGS = ("Phenomenon", "Hypothesis", "Model", "Experiment", "Observation", "Inference", "Conclusion")
LONGEST_OBSERVATION = 16_000
LONGEST_REPLY = 4096
LARGEST_SUBMISSION = 64 * 1024 * 1024

FENCED = re.compile(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
OPENED = re.compile(r"\A\s*```[\w+-]*[ \t]*\n")


@dataclass(frozen=True, slots=True)
class Episode:
    """What an agent did. `submission` lies outside the sandbox; `code` is the last that ran."""

    turns: int
    messages: tuple[Message, ...]
    success: bool
    submission: Path | None
    events: tuple[Event, ...]
    code: str = ""

    @property
    def cost(self) -> float:
        return sum(event.cost for event in self.events)

    @property
    def experiments(self) -> int:
        return sum(event.kind == "sandbox" for event in self.events)


async def solve(
    task: TaskDefinition, workspace: Workspace, client: ChatClient, sandbox: Sandbox, settings: params.Solve
) -> Episode:
    """Work on a task until the model concludes, or has used its experiments and one reply to conclude.

    Raises:
        Fault: the provider or the sandbox broke down.
    """
    if task.task_type != "kaggle":
        raise DataError(f"{task.task_id}: tasks of type {task.task_type} cannot be solved; expected kaggle")
    workspace.copy_public(Path(task.payload["public_data_dir"]))
    run = _Run(task, workspace, client, sandbox, settings)
    for turn in range(1, settings.max_turns + 2):
        if not await run.take(turn):
            break
    return run.episode(turn)


def instructions(task: TaskDefinition) -> str:
    """Which files there are, and where the submission goes."""
    public = Path(task.payload["public_data_dir"])
    files = sorted(path.relative_to(public).as_posix() for path in public.rglob("*") if path.is_file())
    name = submission_of(task)
    return "\n".join(
        [
            "--- CRITICAL I/O REQUIREMENTS ---",
            "Your working folder `./` holds these input files:",
            *(f"- ./{file}" for file in files),
            f"Write your submission to `./{name}` (replace it when you have a better one).",
        ]
    )


def submission_of(task: TaskDefinition) -> str:
    return Path(task.payload["output_submission_path"]).name


def extract_tag_content(text: str, tag: str) -> str | None:
    """What the first pair of such tags holds, without surrounding space; None where there is no pair."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1].strip() if found else None


def experiment_code(text: str) -> str | None:
    """The script of a reply, freed of Markdown fences."""
    code = extract_tag_content(text, "Experiment")
    if not code:
        return None
    blocks = FENCED.findall(code)
    bare = "\n".join(blocks) if blocks else OPENED.sub("", code)
    return bare if bare.strip() else None


def shorten(text: str, limit: int = LONGEST_OBSERVATION) -> str:
    """Output as a model should read it: equal lines in a row told once, the middle left out if it is long."""
    text = _collapse(text)
    if len(text) <= limit:
        return text
    note = f"\n... ({len(text) - limit} characters left out) ...\n"
    head = (limit - len(note)) // 2
    tail = limit - len(note) - head
    return text[:head] + note + text[-tail:]


def _collapse(text: str) -> str:
    lines: list[tuple[str, int]] = []
    for line in text.split("\n"):
        if lines and lines[-1][0] == line:
            lines[-1] = (line, lines[-1][1] + 1)
        else:
            lines.append((line, 1))
    told = [[f"{line} (repeated {count} times)"] if count >= 3 else [line] * count for line, count in lines]
    return "\n".join(line for group in told for line in group)


def observe(execution: Execution) -> str:
    """What the model is told of an experiment."""
    ends = {
        "ok": "Execution succeeded.",
        "failed": "Execution failed.",
        "limit": "Execution was stopped at a limit.",
    }
    parts = [execution.stdout.rstrip(), execution.stderr.rstrip()]
    if execution.status != "ok":
        parts.append(f"{execution.error_type}: {execution.error}" if execution.error_type else execution.error)
    shown = shorten("\n".join(part for part in parts if part)) or "(no output)"
    return f"<Observation>\n{ends[execution.status]}\n{shown}\n</Observation>"


class _Run:
    """One episode in the making; used once."""

    def __init__(
        self,
        task: TaskDefinition,
        workspace: Workspace,
        client: ChatClient,
        sandbox: Sandbox,
        settings: params.Solve,
    ) -> None:
        self.task, self.workspace, self.client = task, workspace, client
        self.sandbox, self.settings = sandbox, settings
        self.submission: Path | None = None
        self.code = ""
        self.events: list[Event] = []
        first = prompt.load("agent_task").render(
            description=task.payload["description"],
            io_instructions=instructions(task),
            experiments=str(settings.max_turns),
        )
        self.messages: list[Message] = user(first)

    def episode(self, turns: int) -> Episode:
        done = self.submission is not None
        return Episode(turns, tuple(self.messages), done, self.submission, tuple(self.events), self.code)

    async def take(self, turn: int) -> bool:
        """One reply and, unless it concludes, its experiment. Says whether there is a next turn."""
        started, index = time.time(), len(self.events)
        reply = await self._ask(turn, index)
        code = experiment_code(reply.text)
        over = extract_tag_content(reply.text, "Conclusion") is not None or turn > self.settings.max_turns
        if not over:
            self.messages += user(await self._look(turn, code, index))
        seconds = time.time() - started
        outputs = {"concluded": over, "submission": self.submission is not None}
        self.events.insert(index, Event("turn", f"turn {turn}", started, seconds, {"turn": turn}, outputs))
        return not over

    async def _ask(self, turn: int, parent: int) -> Reply:
        started, asked = time.time(), [dict(message) for message in self.messages]
        payload = {"temperature": None, "max_tokens": LONGEST_REPLY, "messages": asked}
        self._tell("llm_call", turn, payload, model=self.client.model)
        reply = await self.client.chat(self.messages, max_tokens=LONGEST_REPLY)
        self._tell("llm_response", turn, {"content": reply.text}, model=self.client.model)
        self.workspace.record("llm_calls", _call_row(reply, asked, started))
        self.messages.append({"role": "assistant", "content": reply.text})
        self.events.append(
            Event(
                kind="chat",
                name=reply.model,
                started=started,
                seconds=reply.seconds,
                inputs={"messages": asked},
                outputs={"text": reply.text, "finish_reason": reply.finish_reason},
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
                cost=reply.cost,
                parent=parent,
            )
        )
        return reply

    async def _look(self, turn: int, code: str | None, parent: int) -> str:
        """Run the code and say what the model reads next."""
        left = self.settings.max_turns - turn
        advice = prompt.load("agent_continue").render(left=str(left)) if left else prompt.load("agent_conclude").text
        if code is None:
            return prompt.load("agent_no_experiment").render(advice=advice)
        execution = await self._experiment(code, parent)
        observation = observe(execution)
        seen = {"execution_success": execution.status == "ok", "content": observation}
        self._tell("observation", turn, seen)
        lacking = self._collect() if execution.status == "ok" else None
        return "\n\n".join(part for part in (observation, lacking, advice) if part)

    async def _experiment(self, code: str, parent: int) -> Execution:
        started = time.time()
        script = self.workspace.keep_script(code)
        execution = await self.sandbox.run(
            code,
            inputs={"submission": submission_of(self.task)},
            folder=self.workspace.sandbox,
            packages=True,
            wall_s=self.settings.sandbox_timeout_s,
            memory_mb=self.settings.memory_mb,
        )
        self.code = code
        self.workspace.record("sandbox_runs", _run_row(execution, script, self.workspace, code, started))
        outputs = {"status": execution.status, "stdout": execution.stdout, "error": execution.error}
        self.events.append(
            Event("sandbox", "experiment", started, execution.seconds, {"code": code}, outputs, parent=parent)
        )
        return execution

    def _collect(self) -> str | None:
        """Take the submission out of the sandbox; says why where there is none to take."""
        name = submission_of(self.task)
        try:
            content = read_output(self.workspace.sandbox, name, LARGEST_SUBMISSION)
        except RefusedOutputError as refusal:
            return f"There is no submission in ./{name} ({refusal})."
        self.submission = self.workspace.keep_candidate(name, content)
        return None

    def _tell(self, event: str, turn: int, payload: Mapping[str, Any], **more: Any) -> None:
        head = {"event": event, "turn": turn, "timestamp": timestamp()}
        self.workspace.record("conversation", head | more | {"payload": payload})


def _call_row(reply: Reply, asked: list[dict[str, Any]], started: float) -> dict[str, Any]:
    tokens = reply.prompt_tokens + reply.completion_tokens
    return {
        "call_id": uuid.uuid4().hex,
        "model": reply.model,
        "provider": reply.model.partition("/")[0] if "/" in reply.model else None,
        "timestamp_utc": timestamp(started),
        "duration_seconds": reply.seconds,
        "response_format": None,
        "messages": asked,
        "response": reply.text,
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": tokens,
        },
        "cost": reply.cost,
        "cost_per_token": reply.cost / tokens if tokens else None,
    }


def _run_row(execution: Execution, script: Path, workspace: Workspace, code: str, started: float) -> dict[str, Any]:
    return {
        "execution_id": script.stem.removeprefix("_sandbox_script_"),
        "script_filename": script.name,
        "original_script_path": None,
        "copied_script_path": str(script),
        "sandbox_cwd": str(workspace.sandbox),
        "started_at_utc": timestamp(started),
        "ended_at_utc": timestamp(started + execution.seconds),
        "duration_seconds": execution.seconds,
        "success": execution.status == "ok",
        "exc_type": execution.error_type or execution.limit,
        "stdout": execution.stdout,
        "stderr": execution.stderr,
        "code": code,
    }
