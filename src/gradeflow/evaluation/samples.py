"""The samples that lm-eval keeps: a line for each question and filter, with what was asked, answered and scored."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradeflow import jsonl
from gradeflow.errors import DataError, EvaluationError
from gradeflow.evaluation.report import TaskResult

_TIME = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?"
_QUESTIONS = ("question", "problem", "query", "prompt", "text")

Row = dict[str, Any]


def require(results: Path, task: TaskResult) -> Path:
    """The samples of a task beside its results, if each question is there, once for each filter.

    Raises:
        EvaluationError: the file is missing, cut off, or not of these results.
    """
    file = find(results, task.task)
    counts = Counter((str(row.get("filter", "none")), row["doc_id"]) for row in read(file))
    if twice := [doc for (_, doc), count in counts.items() if count > 1]:
        raise EvaluationError(f"{file}: holds doc_id {twice[0]} more than once; expected the samples of one evaluation")
    of_filter = Counter(kind for kind, _ in counts)
    for kind in {key.partition(",")[2] for key in task.metrics}:
        if of_filter[kind] != task.n:
            raise EvaluationError(
                f"{file}: has {of_filter[kind]} samples with filter {kind}, but {task.task} was measured on {task.n}"
            )
    return file


def find(results: Path, task: str) -> Path:
    """Those written together with the results, else `samples_TASK.jsonl`, else the newest beside them."""
    plain = results.with_name(f"samples_{task}.jsonl")
    together = results.with_name(f"samples_{task}{results.stem.removeprefix('results')}.jsonl")
    timed = re.compile(rf"samples_{re.escape(task)}_{_TIME}\.jsonl")
    newest = sorted(file for file in results.parent.iterdir() if timed.fullmatch(file.name))[-1:]
    found = next((file for file in (together, plain, *newest) if file.is_file()), None)
    if found is None:
        raise EvaluationError(f"{results}: the samples of {task} are missing: no {plain.name}, nor one with its time")
    return found


def read(file: Path) -> list[Row]:
    """The rows of a file of samples.

    Raises:
        EvaluationError: naming the line that is cut off or not lm-eval's.
    """
    try:
        rows = list(jsonl.read(file))
    except DataError as error:
        raise EvaluationError(str(error)) from None
    for number, row in enumerate(rows, start=1):
        if "doc_id" not in row:
            raise EvaluationError(f"{file}, line {number}: not a sample of lm-eval's: it has no doc_id")
    return rows


def differences(first: Path, second: Path, key: str, names: tuple[str, str] = ("base", "adapter")) -> list[Row]:
    """Rows for a table: the questions that one of two subjects has right, as the column `right` says, and one wrong.

    `key` is a `metric,filter`; an answer is right from half a point on.

    Raises:
        EvaluationError: the two were not asked the same, or the metric does not score single questions.
    """
    ours, theirs = _by_question(first, key), _by_question(second, key)
    if odd := sorted(ours.keys() ^ theirs.keys()):
        raise EvaluationError(
            f"{first} and {second}: not the same questions: {len(ours)} and {len(theirs)}, "
            f"{len(odd)} in one alone, such as doc_id {odd[0][0]}. Evaluate both on the same data with one limit"
        )
    metric = key.partition(",")[0]
    return [
        {
            "doc_id": row["doc_id"],
            "right": names[0] if right else names[1],
            "question": _question(row),
            "target": row.get("target", ""),
            names[0]: _reply(row, metric),
            names[1]: _reply(theirs[question], metric),
        }
        for question, row in ours.items()
        if (right := _is_right(first, row, metric)) != _is_right(second, theirs[question], metric)
    ]


def scores_questions(file: Path, key: str) -> bool:
    """Whether a `metric,filter` has a number for single questions; some, such as perplexity, are of all of them."""
    metric = key.partition(",")[0]
    return any(isinstance(row.get(metric), int | float) for row in _by_question(file, key).values())


def scores(file: Path, key: str) -> dict[str, float | None]:
    """The `metric,filter` of each question, by its number and digest; None where a question has no number.

    Raises:
        EvaluationError: the metric does not score single questions.
    """
    metric = key.partition(",")[0]
    found = {f"{doc}-{digest}": _number(row.get(metric)) for (doc, digest), row in _by_question(file, key).items()}
    if all(score is None for score in found.values()):
        raise EvaluationError(f"{file}: {metric} is not a number for single questions, which a paired test needs")
    return found


def _number(score: Any) -> float | None:
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else None


def _by_question(file: Path, key: str) -> dict[tuple[int, str], Row]:
    kind = key.partition(",")[2] or "none"
    rows = [row for row in read(file) if row.get("filter", "none") == kind]
    if not rows:
        raise EvaluationError(f"{file}: no samples with filter {kind}")
    return {(row["doc_id"], str(row.get("doc_hash", ""))): row for row in rows}


def _is_right(file: Path, row: Row, metric: str) -> bool:
    score = row.get(metric)
    if not isinstance(score, int | float):
        raise EvaluationError(f"{file}: {metric} of doc_id {row['doc_id']} is {score!r}; expected a number")
    return score >= 0.5


def _question(row: Row) -> str:
    """What a reader needs: the question without the examples before it, where its field has one of the usual names."""
    doc = row.get("doc")
    found = [doc[name] for name in _QUESTIONS if isinstance(doc.get(name), str)] if isinstance(doc, Mapping) else []
    return str(found[0] if found else row["arguments"]["gen_args_0"]["arg_0"])


def _reply(row: Row, metric: str) -> str:
    """What was written or, of choices, the likeliest one; by character, as lm-eval has it, for acc_norm."""
    replies = row["resps"]
    if not isinstance(replies[0][0], list):
        return str(replies[0][0])
    choices = [str(row["arguments"][f"gen_args_{number}"]["arg_1"]).strip() for number in range(len(replies))]
    lengths = [len(choice) if metric == "acc_norm" else 1 for choice in choices]
    scores = [float(reply[0][0]) / max(length, 1) for reply, length in zip(replies, lengths, strict=True)]
    return choices[scores.index(max(scores))]
