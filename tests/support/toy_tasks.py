"""Small tasks as others publish them, sound unless a test spoils them."""

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError

QUESTION = "A tank drains at 3 litres a minute. How many litres has it lost after 102.883 minutes?"
TOLD = "### Evaluation\n- Checked with a small tolerance (±1e-2) on the reported value."
Row = Sequence[object]


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def competition(
    folder: Path, task_id: str, description: str, grade_fn: Callable[..., float], **more: Any
) -> Competition:
    """Its files are there: what `more` does not name lies where it always does."""
    public, private = folder / task_id / "public", folder / task_id / "private"
    public.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "id": task_id,
        "name": task_id,
        "description": description,
        "grader": Grader("toy", grade_fn),
        "answers": private / "answer.csv",
        "gold_submission": None,
        "sample_submission": public / "sample_submission.csv",
        "competition_type": "modeling",
        "prepare_fn": lambda _raw, _public, _private: None,
        "raw_dir": folder / task_id / "raw",
        "private_dir": private,
        "public_dir": public,
        "leaderboard": (1.0, 0.0),
    }
    return Competition(**values | more)


def by_pattern(
    tolerance: float = 0.01, *, pattern: str = r"@value\[(-?\d+(?:\.\d+)?)\]", relative: bool = False
) -> Callable[..., float]:
    """A grader that reads both answers by one pattern, as the original's do."""

    def value(table: pd.DataFrame) -> float | None:
        found = re.search(pattern, str(table["answer"].iloc[0])) if len(table) else None
        return float(found[1]) if found else None

    def grade(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        said, known = value(submission), value(answers)
        if said is None or known is None:
            return 0.0
        return float(abs(said - known) <= tolerance * (abs(known) if relative else 1))

    return grade


def number(
    folder: Path,
    task_id: str = "toy-1",
    *,
    answer: str = "308.649",
    question: str = QUESTION,
    told: str = TOLD,
    grade_fn: Callable[..., float] | None = None,
    sample: str = "0.00",
) -> Competition:
    made = competition(folder, task_id, f"# Toy {task_id}\n\n{question}\n\n{told}", grade_fn or by_pattern())
    write(folder / task_id / "private" / "answer.csv", [("id", "answer"), ("0", f"@value[{answer}]")])
    write(made.sample_submission, [("id", "answer"), ("0", f"@value[{sample}]")])
    (made.public_dir / "problem.json").write_text(f'{{"id": 1, "Question": "{question}"}}')
    return made


def accuracy(submission: pd.DataFrame, answers: pd.DataFrame) -> float:
    if list(submission.columns) != ["id", "label"] or sorted(submission["id"]) != sorted(answers["id"]):
        raise InvalidSubmissionError("expected id,label")
    both = submission.merge(answers, on="id")
    return float((both["label_x"] == both["label_y"]).mean())


LABELS = ["cat" if (7 * row * row + 3 * row) % 11 < 5 else "dog" for row in range(60)]
FEATURES = [(round(20 + (row * 37 % 59) / 7, 3), round((row * 53 % 61) / 3, 3)) for row in range(60)]


def table(folder: Path, task_id: str = "toy-2", *, order: Sequence[int] = range(60)) -> Competition:
    """Sixty animals with two features that tell nothing."""
    made = competition(
        folder, task_id, "Cat or dog?\n\nThe score is the accuracy.", accuracy, leaderboard=(0.9, 0.8, 0.7, 0.5)
    )
    ids = [f"a{100 + place}" for place in range(60)]
    labels, features = [LABELS[row] for row in order], [FEATURES[row] for row in order]
    write(folder / task_id / "private" / "answer.csv", [("id", "label"), *zip(ids, labels, strict=True)])
    write(made.sample_submission, [("id", "label"), *((identifier, "bird") for identifier in ids)])
    rows = [(identifier, *pair) for identifier, pair in zip(ids, features, strict=True)]
    write(made.public_dir / "test.csv", [("id", "weight", "height"), *rows])
    train = [(f"b{row}", row * 1.37, row * 0.77, LABELS[(row * 7) % 60]) for row in range(90)]
    write(made.public_dir / "train.csv", [("id", "weight", "height", "label"), *train])
    return made
