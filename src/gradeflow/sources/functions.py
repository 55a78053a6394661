"""Small functions to write, with unit tests: made here, in HumanEval's format."""

import random
from collections.abc import Mapping
from typing import Any

from gradeflow.sources import Row, humaneval
from gradeflow.types import Example

VERBS = ("adjust", "change", "convert", "derive", "encode", "modify", "scale", "shift", "transform", "update")
NOUNS = ("amount", "count", "level", "number", "price", "rate", "score", "size", "total", "value")

# What the docstring says, and the expression over `x` or `xs`.
NUMBER_STEPS = (
    ("multiply it by {n}", "({e}) * {n}"),
    ("add {n}", "({e}) + {n}"),
    ("subtract {n}", "({e}) - {n}"),
    ("take the remainder by {n}", "({e}) % {n}"),
    ("square it", "({e}) ** 2"),
    ("negate it", "-({e})"),
)
LIST_STEPS = (
    ("the sum of xs", "sum(xs)"),
    ("the largest of xs", "max(xs)"),
    ("the length of xs", "len(xs)"),
)


def make(rng: random.Random) -> Row:
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    argument = rng.choice(("x", "xs"))
    steps = rng.sample(NUMBER_STEPS, 2)
    if argument == "x":
        start, expression = "x", "x"
    else:
        start, expression = rng.choice(LIST_STEPS)
    said = []
    for words, formula in steps:
        n = rng.randint(2, 99)
        said.append(words.format(n=n))
        expression = formula.format(e=expression, n=n).replace("(x)", "x").replace(f"({start})", start)
    prompt = f'def {name}({argument}):\n    """Take {start}, {said[0]}, then {said[1]}."""\n'
    checks = "".join(
        f"    assert candidate({given!r}) == {_value(expression, argument, given)!r}\n"
        for given in _inputs(rng, argument)
    )
    return {
        "task_id": f"functions/{rng.getrandbits(48):012x}",
        "prompt": prompt,
        "entry_point": name,
        "canonical_solution": f"    return {expression}\n",
        "test": f"def check(candidate):\n{checks}",
    }


def _inputs(rng: random.Random, argument: str) -> list[Any]:
    if argument == "x":
        return rng.sample(range(-50, 200), 4)
    return [[rng.randint(-50, 99) for _ in range(rng.randint(2, 6))] for _ in range(4)]


def _value(expression: str, argument: str, given: Any) -> Any:
    known = {"__builtins__": {}, "sum": sum, "max": max, "min": min, "len": len}
    return eval(expression, known, {argument: given})  # noqa: S307 - our own expression


def example(row: Mapping[str, Any]) -> Example:
    return humaneval.example(row, source="functions")
