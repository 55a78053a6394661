"""What a policy acts in: its workflow is run, the answer is scored, and a fault is kept apart from a score.

The same environment grades in training, in validation and in evaluation.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from gradeflow import audit, dataset, llm, models, prompt, readiness
from gradeflow.errors import Fault
from gradeflow.judge import Judge, prompt_of
from gradeflow.params import Params
from gradeflow.prompt import Message, Prompt
from gradeflow.sandbox import Sandbox
from gradeflow.scorer import Scorer
from gradeflow.trace import Trace
from gradeflow.types import Event, Example, Sample, Score
from gradeflow.workflow import operators
from gradeflow.workflow.program import policy_messages
from gradeflow.workflow.run import run_workflow


@dataclass(frozen=True, slots=True)
class Graded:
    """`reason` is why the score is what it is, or is none; `cost` is what the executor took, in USD."""

    sample: Sample
    events: tuple[Event, ...]
    cost: float
    reason: str = ""


class Writer(Protocol):
    """Writes as the policy, for one episode; `events` are what was asked of it and written."""

    @property
    def events(self) -> tuple[Event, ...]: ...

    async def write(self, messages: Sequence[Message]) -> str: ...

    def done(self) -> None:
        """Say that nothing more is asked: what was written can be looked at while it is graded."""


class Environment(Protocol):
    """What the loop needs to know of one. `needs` names what has to answer, for its user."""

    judge: Judge | None
    needs: str

    def tags(self) -> Mapping[str, str]:
        """What a run says of how it grades."""

    def figures(self) -> Mapping[str, float]:
        """What was asked of models so far, as metrics."""

    async def close(self) -> None: ...

    def opening(self, example: Example) -> Sequence[Message]:
        """What the policy is asked first."""

    async def episode(self, example: Example, writer: Writer) -> Graded:
        """Let the policy write, and grade it."""


async def require_ready(settings: Params, *, runs: bool = True) -> None:
    """Raises what `readiness.check` does where the sandbox does not isolate, or executor or judges do not answer."""
    await readiness.check(settings.sandbox, {name: settings.models[name] for name in asked(settings, runs=runs)})


def asked(settings: Params, *, runs: bool = True) -> list[str]:
    """The names of the models that execute, where workflows are run and not only scored, and that judge if any does."""
    executors = [settings.workflow.executor] if runs else []
    return list(dict.fromkeys([*executors, *(settings.judge.models if _has_judge(settings) else [])]))


def _has_judge(settings: Params) -> bool:
    return settings.scorer.judge != "never" or settings.judge.audit_share > 0


def prompts(settings: Params, *, runs: bool = True) -> list[Prompt]:
    """What policy, judge and operators are asked by."""
    ours = ["policy", "judge", *operators.prompts(settings.workflow.operators)] if runs else ["judge"]
    return [*map(prompt.load, ours), *map(prompt_of, settings.judge.prompts.values())]


class Grader:
    """Scores answers with all that the scorer asks, and keeps a fault apart from a score."""

    def __init__(self, settings: Params, *, runs: bool = False) -> None:
        urls = {name: settings.models[name].url for name in asked(settings, runs=runs)}
        base = models.base_folder(settings.base) if llm.LOCAL in urls.values() else None
        self.clients = llm.Clients(settings.models, base)
        self.sandbox = Sandbox(settings.sandbox)
        judges = [self.clients[name] for name in settings.judge.models] if _has_judge(settings) else []
        self.judge = Judge(judges, settings.judge) if judges else None
        self.scorer = Scorer(settings.scorer, self.sandbox, self.judge)
        self.needs = " and ".join(filter(None, (", ".join(f"{name} ({url})" for name, url in urls.items()), "sandbox")))
        self._tries = settings.train.fault_retries + 1
        self._seed = settings.train.seed

    def tags(self) -> dict[str, str]:
        return {"gradeflow.scorer.version": self.scorer.version}

    def figures(self) -> dict[str, float]:
        return self.clients.figures()

    async def score_again(self, sample: Sample, example: Example) -> Sample:
        """The sample with its answer scored anew; one that came to no answer, by a failure or a fault, as it is."""
        if sample.failure is not None or (sample.fault is not None and sample.answer is None):
            return sample
        for attempt in range(self._tries):
            scored, _ = await self._score(sample, example, Trace(), attempt)
            if scored.score is not None:
                break
        return scored

    async def _score(self, sample: Sample, example: Example, trace: Trace, attempt: int) -> tuple[Sample, str]:
        """The sample with the score of its answer, or with the fault that stood in the way; and why."""
        outcome = await self.scorer.score(example, sample.answer, trace, attempt)
        if isinstance(outcome, Score):
            judged = await self._judged(example, sample.answer or "", outcome)
            return replace(sample, score=outcome.value, by=outcome.by, judged=judged, fault=None), outcome.reason
        return replace(sample, score=None, by="", judged=None, fault=outcome.cause), outcome.reason

    async def _judged(self, example: Example, answer: str, score: Score) -> bool | None:
        """The verdict behind a score, or beside it: some verified answers are shown to the judge to check it."""
        if score.by == "judge":
            return score.value == 1
        if self.judge is None or score.by not in {"number", "math", "choice"}:
            return None
        if audit.is_drawn(self.judge.settings.audit_share, self._seed, example.id, answer):
            with suppress(Fault):
                asked = example.question, example.ground_truth, answer, example.source
                return (await self.judge.verdict(*asked)).correct
        return None

    async def close(self) -> None:
        await self.clients.close()
        await self.sandbox.close()


class WorkflowEnvironment(Grader):
    """Runs workflows, and grades what they answer."""

    def __init__(self, settings: Params) -> None:
        super().__init__(settings, runs=True)
        self.executor = self.clients[settings.workflow.executor]
        self._workflow = settings.workflow

    def opening(self, example: Example) -> Sequence[Message]:
        return policy_messages(example, self._workflow)

    async def episode(self, example: Example, writer: Writer) -> Graded:
        """The policy writes a workflow, which is run and whose answer is scored."""
        text = await writer.write(self.opening(example))
        writer.done()
        graded = await self.grade(text, example)
        return replace(graded, events=(*graded.events, *writer.events))

    async def grade(self, completion: str, example: Example, repeat: int = 0) -> Graded:
        """Grade one completion; a fault is tried again, and leaves the sample without a score at the end."""
        for attempt in range(self._tries):
            graded = await self._grade(completion, example, repeat, attempt)
            if graded.sample.score is not None:
                break
        return graded

    async def grade_all(self, pairs: Sequence[tuple[str, Example]]) -> list[Graded]:
        return list(await asyncio.gather(*(self.grade(completion, example) for completion, example in pairs)))

    async def _grade(self, completion: str, example: Example, repeat: int, attempt: int) -> Graded:
        sample = Sample(
            example_id=example.id,
            example_digest=dataset.digest_of(example),
            source=example.source,
            kind=example.kind,
            completion=completion,
            answer=None,
            score=None,
            by="",
            valid=False,
            repeat=repeat,
        )
        trace = Trace()
        try:
            run = await run_workflow(completion, example, self.executor, self.sandbox, self._workflow, trace)
        except Fault as fault:
            spent = trace.usage()["total_cost"]
            return Graded(replace(sample, fault=fault.cause), trace.events, spent, str(fault))
        sample = replace(sample, answer=run.answer, valid=run.valid, operators=run.operators, failure=run.failure)
        if run.failure is not None:
            reason = f"{run.failure}: {run.reason}"
            return Graded(replace(sample, score=0.0, by="failure"), run.events, run.cost, reason)
        sample, reason = await self._score(sample, example, trace, attempt)
        return Graded(sample, trace.events, run.cost, reason)
