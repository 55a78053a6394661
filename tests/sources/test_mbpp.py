from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import DataError
from gradeflow.sandbox import Sandbox
from gradeflow.scorer import Scorer
from gradeflow.sources import mbpp
from gradeflow.types import Example
from support.raw_rows import RAW
from support.sandboxes import in_sandbox

FULL, SANITIZED = RAW["mbpp"]["full"], RAW["mbpp"]["sanitized"]
GRADED = params.Scorer(number_tolerance=0.0, tests_wall_s=10.0, judge="never")


def score(example: Example, answer: str) -> Any:
    async def work(sandbox: Sandbox) -> Any:
        return await Scorer(GRADED, sandbox, None).score(example, answer)

    return in_sandbox(work)


@pytest.mark.parametrize("form", RAW["mbpp"])
def test_the_reference_passes_its_tests_and_another_function_does_not(form: str) -> None:
    example = mbpp.example(RAW["mbpp"][form])
    assert score(example, example.ground_truth).value == 1
    name = example.extra["entry_point"]
    outcome = score(example, f"def {name}(*_):\n    return 'something else'")
    assert (outcome.value, outcome.reason.partition(":")[0]) in {(0.0, "AssertionError"), (0.0, "TypeError")}


def test_an_answer_need_not_bring_what_the_tests_use_of_the_reference() -> None:
    answer = "def area(boxes):\n    return sum(box.a * box.b for box in boxes)"
    assert score(mbpp.example(FULL), answer).value == 1


def test_the_problem_names_the_function_and_shows_its_first_test_alone() -> None:
    problem = mbpp.example(FULL).problem
    assert problem.startswith("Write a function to add up the areas of boxes.\n\nThe function is called area.")
    assert problem.endswith("assert area([Box(2, 3)]) == 6")
    assert "class Box:" in problem
    assert "SOME = [Box(2, 3), Box(2, 2)]" in problem
    for hidden in ("area(SOME)", "fsum", "def area", "area([]) == 0"):
        assert hidden not in problem


def test_challenge_tests_are_kept_and_not_run() -> None:
    example = mbpp.example({**FULL, "challenge_test_list": ["assert area([]) == 'never'"]})
    assert example.extra["challenge_test_list"] == ["assert area([]) == 'never'"]
    assert "never" not in example.extra["test"]


def test_the_function_is_found_among_helpers_and_builtins() -> None:
    code = "def helper(x):\n    return x\ndef pair(x):\n    return [helper(x)] * 2"
    row = {"task_id": 1, "text": "Pair.", "code": code, "test_list": ["assert set(pair(1)) == set([1])"]}
    assert mbpp.example(row).extra["entry_point"] == "pair"


def test_what_the_tests_use_brings_what_it_uses_itself() -> None:
    code = (
        "import math\nclass Disc:\n    def area(self):\n        return math.pi\ndef size(disc):\n    return disc.area()"
    )
    row = {"task_id": 1, "text": "Size.", "code": code, "test_list": ["assert size(Disc()) > 3"]}
    assert score(mbpp.example(row), "def size(disc):\n    return disc.area()").value == 1


def test_assertions_over_several_lines_stay_whole() -> None:
    row = {**RAW["mbpp"]["aflow"], "test_list": ["assert triple(\n    1\n) == 3\nassert triple(2) == 6"]}
    assert score(mbpp.example(row), row["code"]).value == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"test_list": []}, "field test_list: missing or empty"),
        ({"test_list": None}, "field test_list: missing or empty"),
        ({"test_list": "assert area([]) == 0"}, "field test_list: .*expected a list of texts"),
        ({"test_list": ["assert area([]) =="]}, "field test_list: .*expected Python"),
        ({"test_list": ["assert volume([]) == 0"]}, "field test_list: calls volume; the code defines area"),
        ({"test_list": ["assert area(OTHER) == 0"]}, "field test_list: uses OTHER, which neither the code nor"),
        ({"code": "def area(boxes) return 0"}, "field code: .*expected Python"),
        ({"entry_point": "Box2"}, "field entry_point: holds 'Box2', which the tests do not call"),
        ({"task_id": None}, "field task_id: holds nothing; expected a whole number or text"),
        ({"text": float("nan")}, "field text: holds nan; expected text"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        mbpp.example({**FULL, **changes})


def test_a_sanitized_row_comes_back_as_it_was() -> None:
    assert mbpp.original(mbpp.example(SANITIZED)) == SANITIZED
