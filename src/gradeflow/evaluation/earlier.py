"""An earlier evaluation as it lies in a folder: whose it was, what was asked and how, and where the replies are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import dataset, jsonl
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import DataError, EvaluationError
from gradeflow.evaluation.looks import Looked
from gradeflow.evaluation.plan import BASE, folder_of
from gradeflow.params import Evaluate
from gradeflow.types import Example, Sample

ASKED = ("tasks", "split", "limit", "num_fewshot", "chat_template")
"""The settings of `evaluate` that say what was asked. A reply is one to that, whatever the settings are by now."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`training_run` is empty where the adapter came from a folder."""

    digest: str
    folder: Path
    training_run: str
    fingerprint: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Earlier:
    """`counts` are the samples of workflows by the name of what wrote them; `looked` how its looks ended, if any."""

    folder: Path
    base: BaseIdentity
    adapters: Mapping[str, Adapter]
    asked: Mapping[str, Any]
    counts: Mapping[str, int]
    looked: Looked | None

    @classmethod
    def read(cls, folder: Path) -> "Earlier":
        """What the stage has written there, or in an MLflow run whose files these are.

        Raises:
            EvaluationError: it is not an evaluation, or not a whole one.
        """
        file = folder / "results.json"
        try:
            written = json.loads(file.read_text(encoding="utf-8"))
            base, adapters = written["base"], written["adapters"]
            writers = {BASE: base} | adapters | written.get("fixed", {})
            return cls(
                folder,
                BaseIdentity(base["name"], base["revision"], base["digest"]),
                {
                    name: Adapter(
                        told["digest"], folder / told["path"], told["training_run"], told.get("fingerprint", {})
                    )
                    for name, told in adapters.items()
                },
                {name: written["asked"][name] for name in ASKED},
                {name: told["n"] + told["unscored"] for name, told in writers.items() if "n" in told},
                Looked.of(written["looked"]) if written.get("looked") else None,
            )
        except OSError as error:
            raise EvaluationError(f"{file}: cannot be read: {error.strerror}; expected an evaluation") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationError(f"{file}: not of an evaluation that can be scored again: {error!r}") from None

    def settings(self, now: Evaluate) -> Evaluate:
        """Today's settings, but for what was asked."""
        return now.model_copy(update=dict(self.asked))

    def replies(self, subject: str, task: str) -> Path:
        """The folder with what lm-eval kept of a subject's task.

        Raises:
            EvaluationError: the task was not among those of the evaluation.
        """
        folder = folder_of(self.folder / "tasks", subject, task)
        if not folder.is_dir():
            there = sorted(one.name for one in (self.folder / "tasks" / subject).glob("*"))
            raise EvaluationError(
                f"{self.folder}: {subject} was not asked {task}; there are {', '.join(there) or 'none'}"
            )
        return folder

    def samples(self, name: str, examples: Mapping[str, Example]) -> list[tuple[Sample, Example]]:
        """The workflows of `name` with their questions, which are looked for by their ids.

        Raises:
            EvaluationError: samples are missing, or a question is not the one that was asked.
        """
        file = self.folder / "samples" / f"{name}.jsonl"
        try:
            samples = [Sample.from_row(row) for row in jsonl.read(file)]
        except DataError as error:
            raise EvaluationError(f"workflow: {error}") from None
        if len(samples) != self.counts.get(name):
            raise EvaluationError(f"workflow: {file}: has {len(samples)} samples; {self.counts.get(name)} were graded")
        return [(sample, _question(sample, examples, file)) for sample in samples]


def _question(sample: Sample, examples: Mapping[str, Example], file: Path) -> Example:
    example = examples.get(sample.example_id)
    if example is None:
        raise EvaluationError(f"workflow: question {sample.example_id} of {file} is no longer among the held-out ones")
    if dataset.digest_of(example) != sample.example_digest:
        raise EvaluationError(f"workflow: question {sample.example_id} of {file} has changed since it was asked")
    return example
