"""The Python evaluator of the original, RD-Agent's: a workspace in, a feedback with its fields and words out.

Unlike there, results that are missing or half there are a failure, and an adapter is looked at before it is run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gradeflow import adapter as adapters
from gradeflow.errors import TIMED_OUT, AdapterError, EvaluationError
from gradeflow.evaluation import results
from gradeflow.evaluation.report import TaskResult

ADAPTER, RESULTS = "output", "benchmark_results"
LAST_CHARACTERS = 2000


class Workspace(Protocol):
    """A folder with the adapter in output/ and, once they are there, the results in benchmark_results/."""

    @property
    def workspace_path(self) -> Path: ...


class Ended(Protocol):
    """How an evaluation ended: its exit status, 124 for a time-out, and what it printed."""

    @property
    def status(self) -> int: ...

    @property
    def output(self) -> str: ...


Run = Callable[[Path, Sequence[str], int | None], Ended]
"""Evaluates a workspace's adapter on tasks, with at most so many questions of each, into its benchmark_results."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """`code` is the average score or, after a failure, the end of what was printed; `raw_execution` is all of it."""

    execution: str
    return_checking: str
    code: str
    final_decision: bool
    raw_execution: str = ""
    source_feedback: dict[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.final_decision


class BenchmarkEvaluator:
    """`tasks` go by lm-eval's names. `scen`, the original's scenario, is not needed."""

    def __init__(
        self, scen: object = None, tasks: Sequence[str] | None = None, limit: int | None = None, *, run: Run
    ) -> None:
        if not tasks:
            raise EvaluationError("no tasks to evaluate; name at least one, such as gsm8k")
        self.scen = scen
        self.tasks = list(dict.fromkeys(tasks))
        self.limit = limit
        self._run = run

    def evaluate(
        self,
        target_task: object = None,  # noqa: ARG002 - the original's arguments
        implementation: Workspace | None = None,
        gt_implementation: Workspace | None = None,  # noqa: ARG002
        queried_knowledge: object = None,  # noqa: ARG002
    ) -> Feedback:
        """Evaluate the adapter in `implementation`; no other argument changes anything.

        What is wrong with the adapter or its results is in the feedback; what keeps `run` from starting is raised.
        """
        if implementation is None:
            raise EvaluationError("nothing to evaluate: `implementation` is no workspace")
        workspace = Path(implementation.workspace_path)
        folder = workspace / ADAPTER
        try:
            digest = adapters.validate(folder).digest
        except AdapterError as error:
            return _feedback(f"Adapter validation failed: {str(error).removeprefix(f'{folder}: ')}")
        started = time.time()
        ended = self._run(workspace, self.tasks, self.limit)
        try:
            found = results.read(workspace / RESULTS, self.tasks, adapter=digest, since=started)
        except EvaluationError as error:
            return self._without(ended, str(error), [task for task in self.tasks if task in error.done])
        if ended.status:
            return self._without(ended, "all results are there", self.tasks)
        return _feedback(
            f"Benchmark completed: {len(self.tasks)}/{len(self.tasks)} tasks evaluated",
            "\n".join(["Benchmark Results:", *(f"  {one.task}: {_shown(one)}" for one in found.tasks)]),
            "Average Score: n/a" if found.average is None else f"Average Score: {100 * found.average:.2f}",
            ended.output,
            good=True,
        )

    def _without(self, ended: Ended, why: str, done: Sequence[str]) -> Feedback:
        """The feedback on an evaluation that failed, or whose results cannot be used."""
        left = [task for task in self.tasks if task not in done]
        tasks = f"done: {', '.join(done) or 'nothing'}; without results: {', '.join(left) or 'nothing'}"
        execution, checking = f"Benchmark execution failed (exit_code={ended.status})", "lm-evaluation-harness error"
        if ended.status == TIMED_OUT:
            checking = f"lm-evaluation-harness ran out of time; {tasks}"
        elif not ended.status:
            execution = f"Benchmark results unusable: {len(done)}/{len(self.tasks)} tasks evaluated"
            checking = f"{why}; {tasks}"
        return _feedback(execution, checking, ended.output[-LAST_CHARACTERS:], ended.output)


FTBenchmarkEvaluator = BenchmarkEvaluator


def _feedback(execution: str, checking: str = "", code: str = "", output: str = "", *, good: bool = False) -> Feedback:
    return Feedback(execution, checking, code, good, output, {BenchmarkEvaluator.__name__: good})


def _shown(task: TaskResult) -> str:
    """A share as a percentage; any other metric as it is, and by its name."""
    return f"{100 * task.value:.2f}%" if task.is_share else f"{task.value:.4g} ({task.metric})"
