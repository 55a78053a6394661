"""Arithmetic word problems made here, in GSM8K's format. Easy to turn into Python, hard to do in one's head."""

import random
from collections.abc import Mapping
from typing import Any

from gradeflow.sources import Row, gsm8k
from gradeflow.types import Example

NAMES = (
    "Ana",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gia",
    "Hugo",
    "Iris",
    "Jon",
    "Kai",
    "Lena",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
)
THINGS = ("apples", "books", "coins", "eggs", "nuts", "pens", "shells", "stamps", "stones", "tickets")
BOXES = ("bags", "boxes", "crates", "jars", "packs", "sacks")

# Each problem: its sentences and the expression of its answer. a, b are large, m, n small.
PATTERNS = (
    (
        "{x} has {a} {t}. {x} buys {m} {s} with {b} {t} each. How many {t} does {x} have now?",
        "{a} + {m} * {b}",
    ),
    ("{x} has {m} {s} with {a} {t} each and gives {b} {t} to {y}. How many {t} are left?", "{m} * {a} - {b}"),
    ("{x} has {a} {t} and {y} has {n} times as many. How many {t} do they have together?", "{a} + {n} * {a}"),
    (
        "{x} fills {m} {s} with {a} {t} and {n} {s} with {b} {t} each. How many {t} is that?",
        "{m} * {a} + {n} * {b}",
    ),
    (
        "{x} sells {a} {t} for {m} dollars each and pays {b} dollars for rent. How many dollars are left?",
        "{a} * {m} - {b}",
    ),
    ("{x} had {c} {t}, lost {b} of them and then found {a}. How many {t} does {x} have?", "{c} - {b} + {a}"),
    (
        "Each day {x} finds {a} {t} and loses {m}. How many {t} does {x} have after {n} days?",
        "({a} - {m}) * {n}",
    ),
    (
        "{x} and {y} each have {a} {t}. {y} gets {b} more. How many {t} do they have together?",
        "2 * {a} + {b}",
    ),
)


def make(rng: random.Random) -> Row:
    said, formula = rng.choice(PATTERNS)
    x, y = rng.sample(NAMES, 2)
    numbers = {
        "a": rng.randint(21, 399),
        "b": rng.randint(11, 99),
        "c": rng.randint(400, 999),
        "m": rng.randint(3, 9),
        "n": rng.randint(3, 9),
    }
    if "- {b}" in formula and "{m}" in formula:
        numbers["a"] = max(numbers["a"], numbers["b"])
    expression = formula.format(**numbers)
    result = evaluate(expression)
    question = said.format(x=x, y=y, t=rng.choice(THINGS), s=rng.choice(BOXES), **numbers)
    return {
        "question": question,
        "answer": f"<<{expression}={result}>>{expression} = {result}\n#### {result}",
    }


def evaluate(expression: str) -> int:
    """The value of an expression made from PATTERNS."""
    return int(eval(expression, {"__builtins__": {}}))  # noqa: S307 - our own digits and operators


def expression_of(example: Example) -> str:
    """The expression in the reference solution's calculator mark."""
    return str(example.extra["solution"]).removeprefix("<<").partition("=")[0]


def example(row: Mapping[str, Any]) -> Example:
    return gsm8k.example(row, source="word_problems")
