"""Operations research: word problems whose answer is one number, the value of the best plan.

The built-in tasks are blending problems in whole sacks. The answer is found by going through every blend.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from gradeflow.benchmarks import Competition, seed_of, seeds
from gradeflow.benchmarks.folders import Layout
from gradeflow.benchmarks.number import Problem

FOLDERS = Layout("engineeringbench")
SEEDS = seeds("builtin-blending")
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
        *others, last = self.ingredients
        for plan in itertools.product(*(range(item.stock + 1) for item in others)):
            if 0 <= (rest := self.sacks - sum(plan)) <= last.stock:
                yield *plan, rest

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
    return tuple(SEEDS)


def competition(task_id: str, data_dir: Path) -> Competition:
    blend = Blend.make(seed_of(task_id, SEEDS, "engineering"))
    return problem(blend, task_id).competition(data_dir)


def problem(blend: Blend, task_id: str) -> Problem:
    return Problem(
        task_id,
        "Cheapest feed blend",
        blend.question(),
        "cost",
        "the lowest cost",
        functools.cache(blend.optimum),
        {"difficulty": "Easy"},
    )
