"""What a worker is to measure: written by whoever starts it, as a file of JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gradeflow.params import Evaluate, Params, validate

Backend = Literal["vllm", "hf"]
BASE = "base"
WORKFLOW = "workflow"
"""The project's own task: the subject writes workflows, which are run and graded as in training."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The base alone, called `base` and with neither digest nor folder, or one of its adapters.

    An adapter is called by the first 12 digits of its digest, so that no two of them share a name.
    """

    name: str
    digest: str = ""
    folder: str = ""
    rank: int = 0


def folder_of(place: Path, subject: str, task: str) -> Path:
    """Where a subject's results in a task lie below `place`."""
    return place / subject / (Path(task).stem if task.endswith((".yaml", ".yml")) else task)


@dataclass(frozen=True, slots=True)
class Plan:
    """`base` is a folder or a hub id; `tasks` are lm-eval's own names, YAML files, or `workflow`.

    `replies` is the folder of an earlier evaluation, as `earlier` reads it: its replies are scored again, and neither
    base nor adapters nor the backend are asked. Empty: all are.

    `judged` are the names of a challenger and its rival, where workflows need be asked only until the gate can decide
    between the two; None: all questions are asked.

    Of each subject and task the worker writes `out`/SUBJECT/TASK/results.json and samples_TASK.jsonl beside what
    lm-eval writes, as soon as it has them; at last of each adapter `out`/SUBJECT/fingerprint.json.
    """

    base: str
    revision: str
    base_digest: str
    dtype: str
    subjects: Sequence[Subject]
    tasks: Sequence[str]
    backend: Backend
    params: Params
    out: str
    replies: str = ""
    judged: tuple[str, str] | None = None

    @property
    def settings(self) -> Evaluate:
        return self.params.evaluate

    def folder(self, subject: str, task: str) -> Path:
        """Where the results of a subject's task lie once they are whole."""
        return folder_of(Path(self.out), subject, task)

    def fingerprint(self, subject: str) -> Path:
        """The file with what an adapter did when it was loaded."""
        return Path(self.out) / subject / "fingerprint.json"

    def write(self, file: Path) -> None:
        """As JSON that `read` understands."""
        tree = asdict(self) | {"params": self.params.model_dump(mode="json")}
        file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "Plan":
        tree = json.loads(file.read_text(encoding="utf-8"))
        subjects = [Subject(**subject) for subject in tree.pop("subjects")]
        judged = tree.pop("judged")
        return cls(
            subjects=subjects,
            params=validate(tree.pop("params")),
            judged=(judged[0], judged[1]) if judged else None,
            **tree,
        )
