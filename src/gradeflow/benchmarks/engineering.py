"""Operations research: word problems whose answer is one number, the value of the best plan.

The built-in task is a blending problem in whole sacks. Its answer is found by going through every blend, in
the grader, when it grades; no file holds it.
"""

import csv
import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError
from gradeflow.benchmarks.folders import Layout
from gradeflow.errors import SettingsError

if TYPE_CHECKING:
    import pandas as pd

FOLDERS = Layout("engineeringbench")
BLENDING = "builtin-blending"
TOLERANCE = Decimal("0.01")  # absolute; of an answer below 1 in size it is the relative tolerance
ANSWER = re.compile(r"@cost\[(?P<value>-?\d{1,15}(?:\.\d{1,15})?(?:e[-+]?\d{1,2})?)\]", re.IGNORECASE)
GRAINS = ("barley", "maize", "oats", "peas", "soybean meal", "sunflower cake", "wheat", "wheat bran")


@dataclass(frozen=True, slots=True)
class Ingredient:
    """Price in cents, protein and fibre in grams per kg; a sack weighs the same of each."""

    name: str
    cents: int
    protein: int
    fibre: int
    stock: int


@dataclass(frozen=True, slots=True)
class Blend:
    """So many sacks in all, with at least `protein` and at most `fibre` grams per kg on average."""

    ingredients: tuple[Ingredient, ...]
    sacks: int
    protein: int
    fibre: int

    @classmethod
    def make(cls, seed: int) -> "Blend":
        """A problem that has a solution, and where the cheapest sacks alone are not one."""
        rng = random.Random(f"blending/{seed}")
        while True:
            blend = cls._draw(rng)
            costs = [blend.cents(plan) for plan in blend.plans() if blend.allows(plan)]
            if costs and min(costs) > min(map(blend.cents, blend.plans())):
                return blend

    @classmethod
    def _draw(cls, rng: random.Random) -> "Blend":
        names = sorted(rng.sample(GRAINS, 4))
        draws = [(rng.randint(80, 420), rng.randint(20, 160), rng.randint(8, 16)) for _ in names]
        ingredients = tuple(
            Ingredient(name, 450 + 4 * protein + rng.randint(-150, 150), protein, fibre, stock)
            for name, (protein, fibre, stock) in zip(names, draws, strict=True)
        )
        return cls(ingredients, sacks=24, protein=rng.randint(180, 260), fibre=rng.randint(70, 100))

    def plans(self) -> Iterator[tuple[int, ...]]:
        for plan in itertools.product(*(range(item.stock + 1) for item in self.ingredients)):
            if sum(plan) == self.sacks:
                yield plan

    def allows(self, plan: tuple[int, ...]) -> bool:
        pairs = list(zip(plan, self.ingredients, strict=True))
        enough = sum(count * item.protein for count, item in pairs) >= self.protein * self.sacks
        return enough and sum(count * item.fibre for count, item in pairs) <= self.fibre * self.sacks

    def cents(self, plan: tuple[int, ...]) -> int:
        return sum(count * item.cents for count, item in zip(plan, self.ingredients, strict=True))

    def optimum(self) -> Decimal:
        """The lowest cost in dollars, exactly."""
        return Decimal(min(self.cents(plan) for plan in self.plans() if self.allows(plan))) / 100

    def question(self) -> str:
        rows = "\n".join(
            f"- {item.name}: {item.cents / 100:.2f} USD a sack, {item.protein} g protein and "
            f"{item.fibre} g fibre per kg, {item.stock} sacks in stock"
            for item in self.ingredients
        )
        return (
            f"A mill mixes an order of exactly {self.sacks} sacks of feed. All sacks weigh the same, and "
            f"only whole sacks can be taken:\n{rows}\n"
            f"On average the mixture must hold at least {self.protein} g protein and at most {self.fibre} g "
            "fibre per kg. What is the lowest cost of the order, in USD?"
        )


def tasks() -> tuple[str, ...]:
    return (BLENDING,)


def competition(task_id: str, data_dir: Path) -> Competition:
    if task_id != BLENDING:
        raise SettingsError(f"solve.task is {task_id!r}; engineering has {', '.join(tasks())}")
    problem = Blend.make(seed=0)
    folder = data_dir / task_id
    public = folder / "prepared" / "public"
    return Competition(
        id=task_id,
        name="Cheapest feed blend",
        description=describe(problem, task_id),
        grader=Grader("blending", partial(grade, problem, task_id)),
        answers=None,
        gold_submission=None,
        sample_submission=public / "sample_submission.csv",
        competition_type="modeling",
        prepare_fn=partial(_prepare, problem, task_id),
        raw_dir=folder / "raw",
        private_dir=folder / "prepared" / "private",
        public_dir=public,
        leaderboard=(1.0, 0.0),
    )


def describe(problem: Blend, task_id: str) -> str:
    return (
        f"{problem.question()}\n\n"
        f"Submit a CSV file with the header `id,answer` and one row: the id {task_id}, and the answer "
        "written as @cost[value], where value is a plain number such as 12.5. An answer within "
        f"{TOLERANCE} of the lowest cost scores 1, any other 0."
    )


def grade(problem: Blend, task_id: str, submission: "pd.DataFrame", _answers: "pd.DataFrame | None" = None) -> float:
    """1.0 for the lowest cost, 0.0 for another number; anything else is no valid submission."""
    value = _value(submission, task_id)
    optimum = problem.optimum()
    return float(abs(value - optimum) <= TOLERANCE * min(Decimal(1), abs(optimum)))


def _value(submission: "pd.DataFrame", task_id: str) -> Decimal:
    if list(submission.columns) != ["id", "answer"] or len(submission) != 1:
        raise InvalidSubmissionError("expected the columns id,answer and one row")
    identifier, answer = (str(cell).strip() for cell in submission.iloc[0])
    if identifier != task_id:
        raise InvalidSubmissionError(f"expected the id {task_id}, found {identifier}")
    if not (found := ANSWER.fullmatch(answer)):
        raise InvalidSubmissionError(f"expected @cost[number], found {answer}")
    return Decimal(found["value"])


def _prepare(problem: Blend, task_id: str, _raw: Path, public: Path, _private: Path) -> None:
    public.mkdir(parents=True)
    question = {"en_question": problem.question(), "difficulty": "Easy", "id": task_id}
    (public / "problem.json").write_text(json.dumps(question, indent=2, ensure_ascii=False), encoding="utf-8")
    with (public / "sample_submission.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "answer"), (task_id, "@cost[0.00]")])
