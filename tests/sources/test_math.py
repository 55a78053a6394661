import pytest

from gradeflow.errors import DataError
from gradeflow.sources import load, math
from support.raw_rows import RAW

ROW = RAW["math"]["original"]


def test_the_key_of_the_dataset_is_its_name() -> None:
    assert load("math") is math


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1}, no: \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \mid x>0 \right.}", r"\left\{ x \mid x>0 \right."),
        (r"\fbox{A}", "A"),
        (r"$\boxed 7$ or so", "7"),
        (r"\boxed{1} and then \boxed{2", ""),
        (r"no box", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_the_last_box_holds_to_its_own_brace(solution: str, answer: str) -> None:
    assert math.boxed(solution) == answer


def test_level_type_and_what_math_500_adds_are_kept() -> None:
    assert math.example(ROW).ground_truth == r"\frac{3}{2}"
    assert math.example(ROW).extra == {name: ROW[name] for name in ("solution", "level", "type")}
    extra = math.example(RAW["math"]["math-500"]).extra
    assert (extra["level"], extra["answer"], extra["unique_id"]) == (1, r"\frac{3}{2}", "test/prealgebra/1.json")


def test_a_row_of_math_500_comes_back_as_it_was() -> None:
    row = RAW["math"]["math-500"]
    assert math.original(math.example(row)) == row


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"solution": "It is 5."}, r"field solution: holds 'It is 5.'; expected a .boxed"),
        ({"solution": r"\boxed{5"}, "field solution: .*expected a .boxed"),
        ({"solution": r"\boxed{ }"}, "field solution: .*expected a .boxed"),
        ({"problem": ["Halve"]}, r"field problem: holds \['Halve'\]; expected text"),
        ({"level": 1.5}, "field level: holds 1.5; expected a whole number or text"),
        ({"type": 3}, "field type: holds 3; expected text"),
    ],
)
def test_a_row_without_an_answer_or_of_another_type_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        math.example({**ROW, **changes})
