"""Tasks whose answer is one number: a CSV file with the header `id,answer` and the answer as `@tag[number]`."""

import csv
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = Decimal("0.01")  # absolute; of an answer below 1 in size it is the relative tolerance
DIGITS = 12
"""As many of an answer that goes on are in the gold submission."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`asked` is what is sought, as in "the lowest cost"; `solve` finds it, when a submission is graded."""

    id: str
    name: str
    question: str
    tag: str
    asked: str
    solve: Callable[[], Decimal]
    more: Mapping[str, Any]

    def competition(self, data_dir: Path) -> Competition:
        folder = data_dir / self.id
        public, private = folder / "prepared" / "public", folder / "prepared" / "private"
        return Competition(
            id=self.id,
            name=self.name,
            description=describe(self),
            grader=Grader("one number", partial(grade, self)),
            answers=None,
            gold_submission=private / "gold_submission.csv",
            sample_submission=public / "sample_submission.csv",
            competition_type="modeling",
            prepare_fn=partial(_prepare, self),
            raw_dir=folder / "raw",
            private_dir=private,
            public_dir=public,
            leaderboard=(1.0, 0.0),
        )


def describe(problem: Problem) -> str:
    return (
        f"{problem.question}\n\n"
        f"Submit a CSV file with the header `id,answer` and one row: the id {problem.id}, and the answer "
        f"written as @{problem.tag}[value], where value is a plain number such as 12.5. An answer within "
        f"{TOLERANCE} of {problem.asked} scores 1, any other 0; where {problem.asked} is below 1 in size, an answer "
        f"has to be within {TOLERANCE:.0%} of it."
    )


def grade(problem: Problem, submission: "pd.DataFrame", _answers: "pd.DataFrame | None" = None) -> float:
    """1.0 for the answer, 0.0 for another number; anything else is no valid submission."""
    value, answer = _value(problem, submission), problem.solve()
    return float(abs(value - answer) <= TOLERANCE * min(Decimal(1), abs(answer)))


def _value(problem: Problem, submission: "pd.DataFrame") -> Decimal:
    if list(submission.columns) != ["id", "answer"] or len(submission) != 1:
        raise InvalidSubmissionError("expected the columns id,answer and one row")
    identifier, answer = (str(cell).strip() for cell in submission.iloc[0])
    if identifier != problem.id:
        raise InvalidSubmissionError(f"expected the id {problem.id}, found {identifier}")
    pattern = rf"@{problem.tag}\[(?P<value>-?\d{{1,15}}(?:\.\d{{1,15}})?(?:e[-+]?\d{{1,2}})?)\]"
    if not (found := re.fullmatch(pattern, answer, re.IGNORECASE)):
        raise InvalidSubmissionError(f"expected @{problem.tag}[number], found {answer}")
    return Decimal(found["value"])


def _prepare(problem: Problem, _raw: Path, public: Path, private: Path) -> None:
    private.mkdir(parents=True, exist_ok=True)
    answer = problem.solve()
    with localcontext(prec=DIGITS):
        _write_answer(private / "gold_submission.csv", problem, str(+answer))
    public.mkdir(parents=True)
    question = {"en_question": problem.question, **problem.more, "id": problem.id}
    (public / "problem.json").write_text(json.dumps(question, indent=2, ensure_ascii=False), encoding="utf-8")
    _write_answer(public / "sample_submission.csv", problem, "0.00")


def _write_answer(path: Path, problem: Problem, value: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "answer"), (problem.id, f"@{problem.tag}[{value}]")])
