"""Workflows as a task of lm-evaluation-harness: it asks the policy, and the environment grades what was written."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import dataset, gate, jsonl, models, params
from gradeflow.errors import TooManyFaults
from gradeflow.evaluation import looks
from gradeflow.evaluation.earlier import Earlier
from gradeflow.evaluation.looks import Looked
from gradeflow.evaluation.plan import WORKFLOW, Plan, Subject
from gradeflow.gate import Look
from gradeflow.grpo.environment import Graded, Grader, WorkflowEnvironment
from gradeflow.types import Example, Sample
from gradeflow.workflow import fixed
from gradeflow.workflow.program import policy_messages

if TYPE_CHECKING:
    from gradeflow.evaluation.engine import Engine

NAME = "gradeflow_workflow"
SAMPLES = "samples.jsonl"
FACTS = "workflow.json"
"""In the plan's folder: which scorer and judge graded, what the gate's looks said, what asking the models has taken."""

Whole = Callable[[str, Callable[[Path], None]], None]


class WorkflowTask:
    """The task and, after a run, its samples in the order of the examples."""

    def __init__(
        self,
        examples: Sequence[Example],
        settings: params.Params,
        environment: WorkflowEnvironment,
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self.examples = examples
        self.samples: list[Sample] = []
        self._settings = settings
        self._environment = environment
        self._wait = wait

    def grade(self, completions: Sequence[str]) -> list[Graded]:
        pairs = list(zip(completions, self.examples, strict=True))
        graded: list[Graded] = self._wait(self._environment.grade_all(pairs))
        self.samples = [one.sample for one in graded]
        return graded

    def harness_task(self) -> Any:
        """The task object that lm-eval's evaluator takes."""
        from datasets import Dataset
        from lm_eval.api.task import ConfigurableTask

        owner, workflow = self, self._settings.workflow

        class Task(ConfigurableTask):  # type: ignore[misc]
            def download(self, *_: Any, **__: Any) -> None:
                rows = [
                    {"index": index, "id": example.id, "ground_truth": example.ground_truth}
                    for index, example in enumerate(owner.examples)
                ]
                self.dataset = {"test": Dataset.from_list(rows)}

            def apply_filters(self) -> Any:
                """Filter, then grade all answers at once: process_results comes for one at a time."""
                done = super().apply_filters()
                answers = {one.doc["index"]: one.filtered_resps[self._filters[0].name] for one in self.instances}
                owner.grade([answers[index] for index in range(len(owner.examples))])
                return done

        return Task(
            config={
                "task": NAME,
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": lambda doc: policy_messages(owner.examples[doc["index"]], workflow)[-1]["content"],
                "doc_to_target": "{{ground_truth}}",
                "process_results": lambda doc, _: owner.metrics_of(doc["index"]),
                "generation_kwargs": {
                    "until": [],
                    "do_sample": False,
                    "max_gen_toks": self._settings.evaluate.max_gen_tokens,
                },
                "metric_list": [
                    {"metric": name, "aggregation": "nanmean", "higher_is_better": True} for name in ("score", "valid")
                ],
                "metadata": {"version": 1},
            }
        )

    def metrics_of(self, index: int) -> dict[str, float]:
        """The score of a sample, NaN where it has none: nanmean leaves it out, as everywhere else."""
        sample = self.samples[index]
        return {"score": float("nan") if sample.score is None else sample.score, "valid": float(sample.valid)}


def measure(plan: Plan, engine: "Engine", whole: Whole) -> None:
    """Samples of every subject and of each fixed operator on the same questions, each in a folder that `whole` gives.

    Raises:
        TooManyFaults: something has no score at all; what had scores stays.
    """
    settings = plan.params
    examples: Sequence[Example] = dataset.read(plan.settings.split).examples[: plan.settings.limit or None]
    looked: Looked | None = None
    with models.leaving_room(), asyncio.Runner() as runner:
        environment = WorkflowEnvironment(settings)

        def ask(subject: Subject, examples: Sequence[Example], folder: Path) -> None:
            task = WorkflowTask(examples, settings, environment, runner.run)
            raw = run_harness(engine.of(subject), task)
            (folder / "results.json").write_text(json.dumps(raw, indent=2, default=str) + "\n", encoding="utf-8")
            jsonl.write(folder / SAMPLES, (sample.to_row() for sample in task.samples))
            if not plan.judged:
                require_scores(subject.name, task.samples, environment.needs)

        def fix(operator: str, folder: Path) -> None:
            pairs = [(fixed.program(operator), example) for example in examples]
            keep(f"fixed_{operator}", [one.sample for one in runner.run(environment.grade_all(pairs))], folder)

        keep = partial(_keep, environment)
        try:
            if plan.judged:
                looked, examples = _ask_until_decided(plan, looks.shuffled(examples), ask, whole, environment.needs)
            else:
                for subject in plan.subjects:
                    whole(subject.name, partial(ask, subject, examples))
            for operator in fixed.OPERATORS:
                whole(f"fixed_{operator}", partial(fix, operator))
            _tell(plan, environment, looked)
        finally:
            runner.run(environment.close())


def _ask_until_decided(
    plan: Plan,
    examples: Sequence[Example],
    ask: Callable[[Subject, Sequence[Example], Path], None],
    whole: Whole,
    needs: str,
) -> tuple[Looked, Sequence[Example]]:
    """Ask all subjects one block of questions after the other, and look at what the gate says after each.

    Each subject's folder has the samples of all blocks, and what lm-eval says of each as look_NUMBER.json.
    """
    assert plan.judged is not None
    policy = plan.params.promote
    shares = gate.even(min(policy.looks, len(examples)))
    asked: list[Example] = []
    for at, block in enumerate(looks.blocks(examples, shares)):
        asked += block
        for subject in plan.subjects:
            whole(f"look_{at + 1}/{subject.name}", partial(ask, subject, block))
        ours, theirs = (_so_far(plan, name, at) for name in plan.judged)
        if looked := looks.look(plan.judged, ours, theirs, policy, Look(shares, at), len(examples)):
            break
        print(f"look {at + 1} of {len(shares)}: {len(asked)} of {len(examples)} questions do not decide it", flush=True)
    else:
        raise AssertionError("the last look decides")

    def join(name: str, folder: Path) -> None:
        jsonl.write(folder / SAMPLES, (sample.to_row() for sample in _so_far(plan, name, looked.at)))
        for number in range(1, looked.at + 2):
            there = plan.folder(f"look_{number}/{name}", WORKFLOW) / "results.json"
            shutil.copyfile(there, folder / f"look_{number}.json")

    for subject in plan.subjects:
        require_scores(subject.name, _so_far(plan, subject.name, looked.at), needs)
        whole(subject.name, partial(join, subject.name))
    return looked, asked


def _so_far(plan: Plan, name: str, at: int) -> list[Sample]:
    places = (plan.folder(f"look_{number}/{name}", WORKFLOW) for number in range(1, at + 2))
    return [Sample.from_row(row) for place in places for row in jsonl.read(place / SAMPLES)]


def score_again(plan: Plan, whole: Whole) -> None:
    """The samples of an earlier evaluation with the answers scored anew; no workflow is written or run again.

    Raises:
        EvaluationError: samples are missing, or a question has changed.
        TooManyFaults: something has no score at all.
    """
    earlier = Earlier.read(Path(plan.replies))
    examples = {example.id: example for example in dataset.read(plan.settings.split).examples}
    with asyncio.Runner() as runner:
        grader = Grader(plan.params)

        async def score_all(name: str) -> list[Sample]:
            pairs = earlier.samples(name, examples)
            return list(await asyncio.gather(*(grader.score_again(sample, example) for sample, example in pairs)))

        def fill(name: str, folder: Path) -> None:
            _keep(grader, name, runner.run(score_all(name)), folder)

        try:
            for name in writers(plan):
                whole(name, partial(fill, name))
            _tell(plan, grader, earlier.looked)
        finally:
            runner.run(grader.close())


def _keep(grader: Grader, name: str, samples: Sequence[Sample], folder: Path) -> None:
    require_scores(name, samples, grader.needs)
    jsonl.write(folder / SAMPLES, (sample.to_row() for sample in samples))


def _tell(plan: Plan, grader: Grader, looked: Looked | None) -> None:
    judge = grader.judge
    told = {
        "scorer": grader.scorer.version,
        "judge": {"model": judge.model, "prompt": judge.prompt_version} if judge else {},
        "looked": looked.to_dict() if looked else None,
        "figures": grader.clients.figures(),
    }
    (Path(plan.out) / FACTS).write_text(json.dumps(told), encoding="utf-8")


def writers(plan: Plan) -> list[str]:
    """What wrote workflows: every subject, and each operator alone."""
    return [subject.name for subject in plan.subjects] + [f"fixed_{operator}" for operator in fixed.OPERATORS]


def differences(
    base: Sequence[Sample], adapter: Sequence[Sample], examples: Iterable[Example]
) -> Iterator[dict[str, Any]]:
    """Rows for a table: the questions that base or adapter alone has right, from half a point on.

    What has no score is neither right nor wrong.
    """
    asked = {example.id: example for example in examples}
    others = {(sample.example_id, sample.repeat): sample for sample in adapter}
    for ours in base:
        theirs = others[ours.example_id, ours.repeat]
        if ours.score is None or theirs.score is None or (ours.score >= 0.5) == (theirs.score >= 0.5):
            continue
        yield {
            "doc_id": ours.example_id,
            "right": "base" if ours.score >= 0.5 else "adapter",
            "question": asked[ours.example_id].question,
            "target": asked[ours.example_id].ground_truth,
            "base": _answered(ours),
            "adapter": _answered(theirs),
        }


def _answered(sample: Sample) -> str:
    """The answer and by which operators, or what the workflow failed with."""
    said = sample.failure if sample.failure is not None else sample.answer or "no answer"
    return f"{said} ({', '.join(sample.operators)})" if sample.operators else said


def read(plan: Plan) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """Samples by the name of what wrote the workflows, and which scorer and judge graded them."""
    samples = {
        name: [Sample.from_row(row) for row in jsonl.read(plan.folder(name, WORKFLOW) / SAMPLES)]
        for name in writers(plan)
    }
    return samples, json.loads((Path(plan.out) / FACTS).read_text(encoding="utf-8"))


def require_scores(name: str, samples: Sequence[Sample], needs: str) -> None:
    """An evaluation in which something has no score at all is none.

    Raises:
        TooManyFaults: saying which, and why.
    """
    if all(sample.score is None for sample in samples):
        faults = dict(Counter(sample.fault for sample in samples))
        raise TooManyFaults(
            f"{name}: no question has a score ({faults}); when {needs} answer again, the same command goes on",
            cause="evaluation",
        )


def run_harness(model: Mapping[str, Any], task: WorkflowTask) -> dict[str, Any]:
    """Evaluate what `Engine.of` gives; returns its results without the samples."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = simple_evaluate(
        **model,
        tasks=[task.harness_task()],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
        log_samples=False,
    )
    return results
