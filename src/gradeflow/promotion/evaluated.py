"""What evaluation runs have left of adapters, and two of them side by side."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import gate, jsonl, tracking
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import DataError, EvaluationError, PromotionError
from gradeflow.evaluation import looks, results, samples
from gradeflow.evaluation.looks import Looked
from gradeflow.evaluation.plan import BASE, WORKFLOW, folder_of
from gradeflow.gate import Look
from gradeflow.params import Promote
from gradeflow.types import Sample

NOT_HOW = frozenset({"tasks"})
"""What was asked for and says nothing of how a single task was asked."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The files of an evaluation run in `folder`; `adapters` by the names that they have there.

    `looked` says how the looks ended of one that might have stopped early.
    """

    run_id: str
    folder: Path
    scorer: str
    judge: Mapping[str, str]
    asked: Mapping[str, Any]
    base: BaseIdentity
    adapters: Mapping[str, Mapping[str, Any]]
    looked: Looked | None = None

    @classmethod
    def read(cls, run_id: str, into: Path) -> "Evaluation":
        """Fetch what the run has.

        Raises:
            PromotionError: it is no whole evaluation.
        """
        folder = tracking.download_artifact(run_id, "", into / run_id)
        try:
            written = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            base = written["base"]
            return cls(
                run_id,
                folder,
                written.get("scorer") or "",
                written.get("judge") or {},
                written.get("asked") or {},
                BaseIdentity(base["name"], base.get("revision") or "", base["digest"]),
                {name: {"digest": told["digest"], **told} for name, told in written["adapters"].items()},
                Looked.of(written["looked"]) if written.get("looked") else None,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PromotionError(f"evaluation run {run_id}: results.json lacks or garbles {error}") from None

    def subjects(self) -> list["Subject"]:
        """The adapters."""
        return [Subject(self, name) for name in self.adapters]


@dataclass(frozen=True, slots=True)
class Subject:
    """An adapter, or the base, in an evaluation."""

    evaluation: Evaluation
    name: str = BASE

    @property
    def _told(self) -> Mapping[str, Any]:
        return self.evaluation.adapters[self.name]

    @property
    def digest(self) -> str:
        return str(self._told["digest"])

    @property
    def folder(self) -> Path:
        return self.evaluation.folder / str(self._told["path"])

    @property
    def training_run(self) -> str:
        return str(self._told.get("training_run") or "")

    @property
    def fingerprint(self) -> str:
        """As JSON; empty where the evaluation has none."""
        told = self._told.get("fingerprint")
        return json.dumps(told) if told else ""

    @property
    def step(self) -> int:
        return int(self._told.get("step") or 0)

    def samples(self) -> list[Sample]:
        """The graded workflows.

        Raises:
            PromotionError: the evaluation has none.
        """
        file = self.evaluation.folder / "samples" / f"{self.name}.jsonl"
        if not self.evaluation.scorer or not file.is_file():
            raise PromotionError(
                f"evaluation run {self.evaluation.run_id} has no graded workflows, which promotion compares: name "
                "another with --evaluation, or evaluate with `workflow` among evaluate.tasks"
            )
        try:
            return [Sample.from_row(row) for row in jsonl.read(file)]
        except (DataError, TypeError, KeyError) as error:
            raise PromotionError(f"evaluation run {self.evaluation.run_id}: {error}") from None

    def mean(self, task: str) -> float:
        """Over what has a score."""
        found = [one for scores in self.scores(task).values() for one in scores if one is not None]
        return sum(found) / len(found) if found else 0.0

    def scores(self, task: str) -> dict[str, list[float | None]]:
        """Of each question the scores of its answers, of which more is better."""
        if task == WORKFLOW:
            by_question: dict[str, list[float | None]] = {}
            for sample in self.samples():
                by_question.setdefault(sample.example_id, []).append(sample.score)
            return by_question
        found = self._harness(task)
        (result,) = found.tasks
        return {
            f"{leaf.task}/{question}": [-score if score is not None and leaf.higher_is_better is False else score]
            for leaf in result.leaves()
            for question, score in samples.scores(found.samples[leaf.task], leaf.metric).items()
        }

    def _harness(self, task: str) -> results.Evaluation:
        folder = folder_of(self.evaluation.folder / "tasks", self.name, task)
        if not folder.is_dir():
            there = sorted(one.name for one in (self.evaluation.folder / "tasks" / self.name).glob("*"))
            raise PromotionError(
                f"not evaluated: {task}, which promote.targets or promote.guards name; evaluation run "
                f"{self.evaluation.run_id} has {', '.join(there) or 'none'}. Evaluate with it among evaluate.tasks"
            )
        try:
            return results.read(folder, [task])
        except EvaluationError as error:
            raise PromotionError(f"evaluation run {self.evaluation.run_id}: {error}") from None

    def conditions(self, task: str) -> dict[str, str]:
        """What must be the same of two that are compared on a task."""
        asked = {f"evaluate.{name}": value for name, value in self.evaluation.asked.items() if name not in NOT_HOW}
        if task == WORKFLOW:
            own: dict[str, Any] = {"scorer": self.evaluation.scorer, "judge": dict(self.evaluation.judge)}
        else:
            (found,) = self._harness(task).tasks
            own = {name: getattr(found, name) for name in ("metric", "version", "hash", "num_fewshot", "n")}
        return {name: json.dumps(value, sort_keys=True) for name, value in {**asked, **own}.items()}


def compare(task: str, challenger: Subject, rival: Subject) -> gate.Comparison:
    """Both on one task.

    Raises:
        PromotionError: it was not evaluated, or not alike.
    """
    if challenger.evaluation.run_id != rival.evaluation.run_id:
        ours, theirs = challenger.conditions(task), rival.conditions(task)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise PromotionError(
                    f"{task}: not measured alike: {name} is {ours.get(name)} for the challenger and {theirs.get(name)} "
                    f"for the champion (evaluation run {rival.evaluation.run_id}). Evaluate both in one run: "
                    "gradeflow evaluate --adapter runs:/...,models:/...@champion"
                )
    if task == WORKFLOW:
        return gate.compare(task, gate.pair(challenger.samples(), rival.samples()))
    return gate.compare_scores(task, challenger.scores(task), rival.scores(task))


def look(challenger: Subject, rival: Subject, policy: Promote) -> Look:
    """The look at which an evaluation ended, which says what p-values are held against.

    Raises:
        PromotionError: it was ended for others, or by another policy.
    """
    evaluation, looked = challenger.evaluation, challenger.evaluation.looked
    if looked is None:
        return Look()
    judged = (challenger.name, rival.name)
    if (looked.challenger, looked.rival) != judged or rival.evaluation.run_id != evaluation.run_id:
        raise PromotionError(
            f"evaluation run {evaluation.run_id} was looked at to decide on {looked.challenger} against "
            f"{looked.rival}, and nothing else can be decided on it. Evaluate again"
        )
    now = looks.terms(policy)
    if changed := [name for name, before in looked.terms.items() if now.get(name) != before]:
        before = ", ".join(f"promote.{name}: {looked.terms[name]}" for name in changed)
        raise PromotionError(
            f"evaluation run {evaluation.run_id} was looked at by another policy, and one is fixed before the first "
            f"look: {before}. Put that back, or evaluate again"
        )
    return looked.look
