"""What a problem's own docstring says that calls of the function give."""

import gzip
import json
import os
from pathlib import Path

import pytest

from gradeflow.workflow.public_tests import as_text, read


def problem(said: str) -> str:
    return f'import math\n\n\ndef f(x, y=0):\n    """Do it.\n    {said}\n    """\n'


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (">>> f(1)\n    2", ["f(1) == 2"]),
        (">>> f(1)\n    2\n    >>> f(2)\n    3", ["f(1) == 2", "f(2) == 3"]),
        (">>> f([1,\n    ... 2])\n    'a'", ["f([1, 2]) == 'a'"]),
        (">>> round(f(1), 2)  # a comment\n    0.5", ["round(f(1), 2) == 0.5"]),
        ("f(1) == 2", ["f(1) == 2"]),
        ("f(1)==>2", ["f(1) == 2"]),
        ("* f(\"a => b\") => {'k': [1]}", ["f('a => b') == {'k': [1]}"]),
        ("for f(1, y=2) -> (1, 2)", ["f(1, y=2) == (1, 2)"]),
        ("f(1) should return True.", ["f(1) == True"]),
        ('f(1)   # returns "2"', ["f(1) == '2'"]),
        ("f(1) \u279e None", ["f(1) == None"]),
        ("f(1) == 2\n    f(1) == 2", ["f(1) == 2"]),
        ("f(x) = 1 + 2x", []),
        ("f(a) => False", []),
        ("f(1) => true", []),
        ("f(1) is not 2", []),
        ("say f(1) == 2", []),
        (">>> f(1)\n    <object>", []),
        (">>> x = 3\n    >>> print(x)", []),
        (">>> f(1)\n   2", []),
    ],
)
def test_examples_are_calls_with_literal_results(said: str, expected: list[str]) -> None:
    assert as_text(read(problem(said), "f")).splitlines() == [f"assert {line}" for line in expected]


@pytest.mark.parametrize("text", ["What is 6 times 7?", "", "x = (", "def g(): ...", "\0", "(" * 9999])
def test_a_problem_without_the_function_has_none(text: str) -> None:
    assert read(text, "f") == ()


def test_the_examples_of_humaneval_are_found() -> None:
    """138 of 164 problems have examples in a form that is read; a few of these are wrong in the original."""
    if not (folder := os.environ.get("GRADEFLOW_DATA")):
        pytest.skip("GRADEFLOW_DATA names no folder with the real GSM8K and HumanEval")
    with gzip.open(Path(folder) / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    found = {row["task_id"]: read(row["prompt"], row["entry_point"]) for row in rows}
    assert sum(map(bool, found.values())) == 138
    wrong = set()
    for row in rows:
        scope: dict[str, object] = {}
        exec(row["prompt"] + row["canonical_solution"], scope)
        wrong |= {row["task_id"] for one in found[row["task_id"]] if not eval(f"{one.call} == {one.expected}", scope)}
    assert wrong == {f"HumanEval/{number}" for number in (47, 116, 130, 148)}
