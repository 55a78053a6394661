"""The modeling agent: ask, run, look, review, submit.

A model is asked for an experiment, its code runs in the sandbox on copies of the public files, and what came
of it is shown to the model, until it concludes or a review finds the work done. A submission counts when an
experiment that ended without an error leaves it. Faults (the provider, the sandbox) pass through: they are neither
turns nor its failures.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import params, prompt, review
from gradeflow.errors import ProviderError
from gradeflow.handlers import TaskInput
from gradeflow.llm import ChatClient, Reply
from gradeflow.prompt import Message, user
from gradeflow.sandbox import Execution, RefusedOutputError, Sandbox, read_output
from gradeflow.types import Event
from gradeflow.workspace import Workspace, timestamp

PROMPTS = ("agent_task", "agent_continue", "agent_no_experiment", "agent_conclude", "agent_review")
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
    given: TaskInput,
    workspace: Workspace,
    client: ChatClient,
    sandbox: Sandbox,
    settings: params.Solve,
    seed: int | None = None,
) -> Episode:
    """Work on a task until the model concludes, or has used its experiments and one reply to conclude.

    Where the conversation becomes too long for the model, that ends it, too.

    Raises:
        Fault: the provider or the sandbox broke down.
    """
    await asyncio.to_thread(workspace.copy_public, given.data_dir)
    run = _Run(given, workspace, client, sandbox, settings, seed)
    for turn in range(1, settings.max_turns + 2):
        try:
            if not await run.take(turn):
                break
        except ProviderError as error:
            if error.cause != "too_long" or turn == 1:
                raise
            return run.episode(turn - 1)
    return run.episode(turn)


def opening(given: TaskInput, settings: params.Solve) -> list[Message]:
    """What a model is asked first."""
    return user(
        prompt.load("agent_task").render(
            description=given.description,
            io_instructions=given.io_instructions,
            experiments=str(settings.max_turns),
        )
    )


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
        given: TaskInput,
        workspace: Workspace,
        client: ChatClient,
        sandbox: Sandbox,
        settings: params.Solve,
        seed: int | None,
    ) -> None:
        self.given, self.workspace, self.client = given, workspace, client
        self.sandbox, self.settings, self.seed = sandbox, settings, seed
        self.name = given.output_path.name
        self.submission: Path | None = None
        self.code = ""
        self.finished = False
        self.events: list[Event] = []
        self.messages = opening(given, settings)

    def episode(self, turns: int) -> Episode:
        done = self.submission is not None
        return Episode(turns, tuple(self.messages), done, self.submission, tuple(self.events), self.code)

    async def take(self, turn: int) -> bool:
        """One reply and, unless it concludes, its experiment. Says whether there is a next turn."""
        started, index = time.time(), len(self.events)
        reply = await self._ask(turn, index)
        code = experiment_code(reply.text)
        last = self.finished or turn > self.settings.max_turns
        over = last or extract_tag_content(reply.text, "Conclusion") is not None
        if not over:
            self.messages += user(await self._look(turn, code, index))
        seconds = time.time() - started
        outputs = {"concluded": over, "submission": self.submission is not None}
        self.events.insert(index, Event("turn", f"turn {turn}", started, seconds, {"turn": turn}, outputs))
        return not over

    async def _ask(self, turn: int, parent: int) -> Reply:
        asked = [dict(message) for message in self.messages]
        payload = {"temperature": None, "max_tokens": LONGEST_REPLY, "messages": asked}
        self._tell("llm_call", turn, payload, model=self.client.model)
        reply = await self._chat(self.messages, parent)
        self._tell("llm_response", turn, {"content": reply.text}, model=self.client.model)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply

    async def _chat(self, messages: Sequence[Message], parent: int, schema: Mapping[str, Any] | None = None) -> Reply:
        started, asked = time.time(), [dict(message) for message in messages]
        reply = await self.client.chat(messages, max_tokens=LONGEST_REPLY, seed=self.seed, schema=schema)
        self.workspace.record("llm_calls", _call_row(reply, asked, started, "json" if schema else None))
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
        if code is None:
            return prompt.load("agent_no_experiment").render(advice=_advice(left))
        execution = await self._experiment(code, parent)
        observation = observe(execution)
        seen = {"execution_success": execution.status == "ok", "content": observation}
        self._tell("observation", turn, seen)
        lacking = self._collect() if execution.status == "ok" else None
        if self.settings.review and left:
            await self._review(turn, code, observation, parent)
        return "\n\n".join(part for part in (observation, lacking, _advice(0 if self.finished else left)) if part)

    async def _review(self, turn: int, code: str, observation: str, parent: int) -> None:
        """Let the model say whether the work is done. It is not where a submission or a review is lacking."""
        task = f"{self.given.description}\n\n{self.given.io_instructions}"
        asked, schema = review.messages(task, code, observation), review.ReviewResult.model_json_schema()
        found = review.parse((await self._chat(asked, parent, schema)).text)
        self.finished = found is not None and found.finished and self.submission is not None
        self.workspace.record(
            "experiment_reviews",
            {
                "iteration": turn,
                "timestamp_utc": timestamp(),
                "experiment_code": code,
                "observation": observation,
                "review": None if found is None else found.model_dump(mode="json"),
                "finalized": self.finished,
            },
        )

    async def _experiment(self, code: str, parent: int) -> Execution:
        started = time.time()
        script = self.workspace.keep_script(code)
        execution = await self.sandbox.run(
            code,
            inputs={"submission": self.name},
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
        try:
            content = read_output(self.workspace.sandbox, self.name, LARGEST_SUBMISSION)
        except RefusedOutputError as refusal:
            return f"There is no submission in ./{self.name} ({refusal})."
        self.submission = self.workspace.keep_candidate(self.name, content)
        return None

    def _tell(self, event: str, turn: int, payload: Mapping[str, Any], **more: Any) -> None:
        head = {"event": event, "turn": turn, "timestamp": timestamp()}
        self.workspace.record("conversation", head | more | {"payload": payload})


def _advice(left: int) -> str:
    """What to do next, with so many experiments left."""
    return prompt.load("agent_continue").render(left=str(left)) if left else prompt.load("agent_conclude").text


def _call_row(reply: Reply, asked: list[dict[str, Any]], started: float, response_format: str | None) -> dict[str, Any]:
    tokens = reply.prompt_tokens + reply.completion_tokens
    return {
        "call_id": uuid.uuid4().hex,
        "model": reply.model,
        "provider": reply.model.partition("/")[0] if "/" in reply.model else None,
        "timestamp_utc": timestamp(started),
        "duration_seconds": reply.seconds,
        "response_format": response_format,
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
