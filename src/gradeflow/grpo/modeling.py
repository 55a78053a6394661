"""Modeling tasks as an environment: the policy is the agent, turn by turn, and its submission is graded.

The agent is that of `solve`: the same workspace, prompts, sandbox and grader, so that a policy is trained on what it
is used for. What the policy learns from are its own tokens; observations are part of its prompts.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradeflow import digest, params, types
from gradeflow.attempt import Attempt, example_of, limits, opening, solve_task
from gradeflow.benchmarks import Competition, splits
from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.benchmarks.splits import Split
from gradeflow.dataset import Dataset
from gradeflow.errors import Fault, SettingsError
from gradeflow.grpo.environment import Graded, Writer
from gradeflow.judge import Judge
from gradeflow.llm import Reply, Usage
from gradeflow.prompt import Message
from gradeflow.reward import MOST, reward
from gradeflow.sandbox import Sandbox
from gradeflow.types import Example, Sample

POLICY = "policy"


def tasks(settings: params.Params, benchmark: Benchmark) -> tuple[list[Competition], Split]:
    """All competitions to train on and to validate with, ready to be worked on, and which are which."""
    chosen = settings.train.tasks
    if chosen.split and not settings.solve.data_dir:
        raise SettingsError(
            f"train.tasks.split is {chosen.split!r}, which is of DeepModeling's tasks, and no data folder is named: "
            "--data-root FOLDER (solve.data_dir); docs/benchmarks.md says what it holds"
        )
    if chosen.split:
        named = splits.named(chosen.split, benchmark.name)
        split = Split(benchmark.usable(named.train), benchmark.usable(named.validation))
    else:
        ids = benchmark.chosen(settings.solve.task, None)
        split = splits.drawn(ids[: chosen.limit or None], chosen.val_ratio, settings.train.seed, chosen.min_train)
    found = [benchmark.competition(name) for name in dict.fromkeys([*split.train, *split.validation])]
    for competition in found:
        competition.prepare()
    return found, split


def datasets(found: Sequence[Competition], split: Split, benchmark: str) -> tuple[Dataset, Dataset]:
    """Both parts as datasets, named by the digest of what an agent is given."""
    by_id = {one.id: one for one in found}

    def part(name: types.Split, ids: Sequence[str]) -> Dataset:
        known = digest.of_json([[one, by_id[one].description, _files(by_id[one].public_dir)] for one in ids])
        examples = tuple(example_of(by_id[one], benchmark) for one in ids)
        return Dataset(name, Path(benchmark) / f"{name}_tasks", known[:32], examples)

    return part("train", split.train), part("validation", split.validation)


def _files(folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return digest.of_files(folder, names)


class PolicyClient:
    """The policy, asked as a chat model."""

    model = POLICY

    def __init__(self, writer: Writer) -> None:
        self.usage = Usage()
        self._writer = writer

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,  # noqa: ARG002 - the writer's
        max_tokens: int | None = None,  # noqa: ARG002
        seed: int | None = None,  # noqa: ARG002
        schema: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> Reply:
        text = await self._writer.write(messages)
        event = self._writer.events[-1]
        reply = Reply(text, event.prompt_tokens, event.completion_tokens, "stop", self.model, event.seconds, 0.0)
        self.usage.add(reply, shared=False)
        return reply

    async def close(self) -> None: ...


class ModelingEnvironment:
    """Lets the policy solve competitions. Workspaces stay where `train.tasks.workspaces` says, or go."""

    judge: Judge | None = None
    needs = "sandbox"

    def __init__(self, settings: params.Params, competitions: Sequence[Competition]) -> None:
        self.sandbox = Sandbox(limits(settings))
        keep = settings.train.tasks.workspaces
        folder = {"log_path": Path(keep)} if keep else {}
        self._solve = settings.solve.model_copy(update={"review": False, **folder})
        self._competitions = {one.id: one for one in competitions}
        self._keep = bool(keep)

    def tags(self) -> dict[str, str]:
        return {"gradeflow.solve.benchmark": self._solve.benchmark}

    def figures(self) -> dict[str, float]:
        return {}

    def opening(self, example: Example) -> Sequence[Message]:
        return opening(self._competitions[example.extra["competition"]], self._solve)

    async def episode(self, example: Example, writer: Writer) -> Graded:
        with ExitStack() as stack:
            settings = self._solve
            if not self._keep:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradeflow-"))
                settings = settings.model_copy(update={"log_path": Path(folder)})
            competition = self._competitions[example.extra["competition"]]
            try:
                client = PolicyClient(writer)
                attempt = await solve_task(competition, client, self.sandbox, settings, concluded=writer.done)
            except Fault as fault:
                return Graded(_unscored(example, writer, fault), writer.events, 0.0, str(fault))
            return Graded(_rewarded(attempt, example), attempt.episode.events, 0.0, _why(attempt))

    async def close(self) -> None:
        await self.sandbox.close()


def _rewarded(attempt: Attempt, example: Example) -> Sample:
    """The reward over the most that can be earned is the score: 1 is a submission that no other can beat."""
    episode = attempt.episode
    earned = reward(attempt.report, success=episode.success, experiments=episode.experiments)
    return replace(attempt.sample(example), answer=_said(attempt), score=earned / MOST)


def _unscored(example: Example, writer: Writer, fault: Fault) -> Sample:
    wrote = writer.events[-1].outputs["text"] if writer.events else ""
    return Sample(example.id, "", example.source, example.kind, wrote, None, None, "", valid=False, fault=fault.cause)


def _said(attempt: Attempt) -> str | None:
    """What was submitted, where it is a short text."""
    if attempt.submission is None:
        return None
    return attempt.submission.read_bytes()[:200].decode(errors="replace")


def _why(attempt: Attempt) -> str:
    found = "no valid submission" if attempt.report.score is None else f"score {attempt.report.score:g}"
    return f"{found}, {attempt.episode.experiments} experiments"
