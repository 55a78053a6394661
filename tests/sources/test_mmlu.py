import pytest

from gradeflow.errors import DataError
from gradeflow.sources import mmlu
from support.raw_rows import RAW

CSV, HUB = RAW["mmlu"]["csv"], RAW["mmlu"]["hub"]


def test_all_forms_ask_the_same_question() -> None:
    examples = [mmlu.example(row) for row in RAW["mmlu"].values()]
    assert {example.problem for example in examples} == {"Which is a prime? Choices: A. 4 B. 6 C. 7 D. 9"}
    assert {example.ground_truth for example in examples} == {"C"}
    assert {example.problem_type for example in examples} == {"mixed"}


def test_the_four_choices_and_the_subject_are_kept() -> None:
    assert mmlu.example(HUB).extra == {"choices": ["4", "6", "7", "9"], "subject": "elementary_mathematics"}


@pytest.mark.parametrize("answer", [2, "2", "C"])
def test_the_answer_is_an_index_or_a_letter(answer: object) -> None:
    assert mmlu.example({**HUB, "answer": answer}).ground_truth == "C"


@pytest.mark.parametrize("answer", [4, "E", "AB", True, 1.0, [2], {"C": 1}])
def test_an_answer_out_of_range_is_refused(answer: object) -> None:
    with pytest.raises(DataError, match=r"^field answer: holds .*; expected "):
        mmlu.example({**HUB, "answer": answer})


@pytest.mark.parametrize("answer", [None, "", -1])
def test_a_row_without_an_answer_is_refused_as_such(answer: object) -> None:
    with pytest.raises(DataError, match=r"^field answer: the row has no answer, as in splits published without"):
        mmlu.example({**HUB, "answer": answer})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"choices": ["4", "6", "7"]}, "expected four"),
        ({"choices": ["4", "4", "7", "9"]}, "one of them twice"),
        ({"choices": ["4", " ", "7", "9"]}, "has an empty one"),
        ({"choices": ["4", None, "7", "9"]}, "expected a list of texts"),
        ({"choices": "4679"}, "expected a list of texts"),
    ],
)
def test_choices_that_are_not_four_different_texts_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"^field choices: .*{said}"):
        mmlu.example({**HUB, **changes})


def test_a_column_of_the_csv_that_is_empty_is_named() -> None:
    with pytest.raises(DataError, match=r"^field B: holds ''; expected text"):
        mmlu.example({**CSV, "B": ""})
