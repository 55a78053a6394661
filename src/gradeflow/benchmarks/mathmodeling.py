"""Mathematical modeling: a system in words, and a number that follows from its model.

The built-in tasks are fish stocks that grow logistically and are fished at a constant rate. The differential
equation has a solution in closed form, which is computed in decimals.
"""

import random
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from gradeflow.benchmarks import Competition, seed_of, seeds
from gradeflow.benchmarks.folders import Layout
from gradeflow.benchmarks.number import Problem

FOLDERS = Layout("mathmodelingbench")
SEEDS = seeds("builtin-fishery")


@dataclass(frozen=True, slots=True)
class Fishery:
    """dP/dt = growth P (1 - P / capacity) - catch, P(0) = start; P in thousand tonnes, time in years."""

    growth: Decimal
    capacity: Decimal
    catch: Decimal
    start: Decimal
    years: Decimal

    @classmethod
    def make(cls, seed: int) -> "Fishery":
        """A stock that is neither where it began nor at rest; of every fourth little is left, of none nothing."""
        rng = random.Random(f"fishery/{seed}")
        least, most = (Decimal("0.2"), 1) if seed % 4 == 3 else (1, 100)
        while True:
            drawn = cls._draw(rng)
            if drawn.lives() and least < drawn.stock() < most and drawn.moves():
                return drawn

    @classmethod
    def _draw(cls, rng: random.Random) -> "Fishery":
        growth, capacity = Decimal(rng.randint(20, 90)) / 100, Decimal(rng.randint(20, 90))
        most = growth * capacity / 4
        return cls(
            growth,
            capacity,
            catch=round(most * rng.randint(55, 95) / 100, 2),
            start=round(capacity * rng.randint(5, 90) / 100, 1),
            years=Decimal(rng.randint(2, 24)) / 2,
        )

    def rests(self) -> tuple[Decimal, Decimal]:
        """Where the stock would stay: below the lower one it dies out, above it tends to the upper one."""
        half = (1 - 4 * self.catch / (self.growth * self.capacity)).sqrt() / 2
        return self.capacity * (Decimal("0.5") - half), self.capacity * (Decimal("0.5") + half)

    def lives(self) -> bool:
        """Whether the solution goes on until then; a stock that dies out runs into a pole."""
        lowest = self.rests()[0]
        return self.start > lowest or (self.start < lowest and self._ratio() > 1)

    def moves(self) -> bool:
        still = [(self.start, rest) for rest in self.rests()]
        still += [(self.stock(), other) for other in (self.start, *self.rests())]
        return all(abs(stock - other) > other / 20 for stock, other in still)

    def stock(self) -> Decimal:
        """In the end: (P - high) / (P - low) shrinks exponentially."""
        low, high = self.rests()
        ratio = self._ratio()
        return (high - ratio * low) / (1 - ratio)

    def _ratio(self) -> Decimal:
        low, high = self.rests()
        rate = self.growth * (high - low) / self.capacity
        return (self.start - high) / (self.start - low) * (-rate * self.years).exp()

    def question(self) -> str:
        return (
            "The stock of herring in a bay grows logistically: alone and small it would grow by a rate of "
            f"{self.growth} a year, and the bay could feed {self.capacity} thousand tonnes. At first there are "
            f"{self.start} thousand tonnes. From then on {self.catch} thousand tonnes a year are caught, evenly over "
            f"the year and however many there are. How large is the stock after {self.years} years, in thousand "
            "tonnes?"
        )


def tasks() -> tuple[str, ...]:
    return tuple(SEEDS)


def competition(task_id: str, data_dir: Path) -> Competition:
    fishery = Fishery.make(seed_of(task_id, SEEDS, "mathmodeling"))
    return problem(fishery, task_id).competition(data_dir)


def problem(fishery: Fishery, task_id: str) -> Problem:
    return Problem(
        task_id,
        "A fished stock",
        fishery.question(),
        "value",
        "the stock",
        fishery.stock,
        {"Category": "ordinary_differential_equation", "Type": "first_order_equation"},
    )
