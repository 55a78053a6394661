"""Workflows as a task of lm-evaluation-harness: it asks the policy, and the environment grades what was written."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from gradeflow import params
from gradeflow.grpo.environment import Graded, WorkflowEnvironment
from gradeflow.types import Example, Sample
from gradeflow.workflow.program import policy_messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "gradeflow_workflow"


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


def run_harness(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    task: WorkflowTask,
    settings: params.Evaluate,
) -> dict[str, Any]:
    """Evaluate a loaded model with lm-eval; returns its results without the samples."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns that the model is already loaded
    results: dict[str, Any] = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size),
        tasks=[task.harness_task()],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
        log_samples=False,
    )
    return results
