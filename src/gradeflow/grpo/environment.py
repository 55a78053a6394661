"""What a policy acts in: its workflow is run, the answer is scored, and a fault is kept apart from a score.

The same environment grades in training, in validation and in evaluation.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gradeflow import audit, digest, llm, models, prompt, readiness
from gradeflow.errors import Fault
from gradeflow.judge import Judge, prompt_of
from gradeflow.params import Params
from gradeflow.prompt import Prompt
from gradeflow.sandbox import Sandbox
from gradeflow.scorer import Scorer
from gradeflow.trace import Trace
from gradeflow.types import Event, Example, Sample, Score
from gradeflow.workflow import operators
from gradeflow.workflow.run import run_workflow


@dataclass(frozen=True, slots=True)
class Graded:
    """`reason` is why the score is what it is, or is none; `cost` is what the executor took, in USD."""

    sample: Sample
    events: tuple[Event, ...]
    cost: float
    reason: str = ""


async def require_ready(settings: Params) -> None:
    """Raises what `readiness.check` does where the sandbox does not isolate, or executor or judges do not answer."""
    await readiness.check(settings.sandbox, {name: settings.models[name] for name in asked(settings)})


def asked(settings: Params) -> list[str]:
    """The names of the models that execute, and that judge if any does."""
    judges = settings.judge.models if _has_judge(settings) else []
    return list(dict.fromkeys([settings.workflow.executor, *judges]))


def _has_judge(settings: Params) -> bool:
    return settings.scorer.judge != "never" or settings.judge.audit_share > 0


def prompts(settings: Params) -> list[Prompt]:
    """What policy, judge and operators are asked by."""
    ours = ["policy", "judge", *operators.prompts(settings.workflow.operators)]
    return [*map(prompt.load, ours), *map(prompt_of, settings.judge.prompts.values())]


class WorkflowEnvironment:
    """Runs and grades workflows."""

    def __init__(self, settings: Params) -> None:
        urls = {name: settings.models[name].url for name in asked(settings)}
        base = models.base_folder(settings.base) if llm.LOCAL in urls.values() else None
        self.clients = llm.Clients(settings.models, base)
        self.executor = self.clients[settings.workflow.executor]
        self.sandbox = Sandbox(settings.sandbox)
        judges = [self.clients[name] for name in settings.judge.models] if _has_judge(settings) else []
        self.judge = Judge(judges, settings.judge) if judges else None
        self.scorer = Scorer(settings.scorer, self.sandbox, self.judge)
        self.needs = f"{', '.join(f'{name} ({url})' for name, url in urls.items())} and sandbox"
        self._workflow = settings.workflow
        self._tries = settings.train.fault_retries + 1
        self._seed = settings.train.seed

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
            example_digest=digest.of_json(example.to_row())[:16],
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
        outcome = await self.scorer.score(example, run.answer, trace, attempt)
        if isinstance(outcome, Score):
            judged = await self._judged(example, run.answer or "", outcome)
            sample = replace(sample, score=outcome.value, by=outcome.by, judged=judged)
        else:
            sample = replace(sample, fault=outcome.cause)
        return Graded(sample, trace.events, run.cost, outcome.reason)

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
