import pytest

from gradeflow.errors import DataError
from gradeflow.sources import commonsenseqa
from support.raw_rows import RAW

NESTED, FLAT = RAW["commonsenseqa"]["original"], RAW["commonsenseqa"]["hub"]


def test_both_forms_give_the_same_example_and_keep_their_choices() -> None:
    example = commonsenseqa.example(NESTED)
    assert commonsenseqa.example(FLAT) == example
    assert example.problem == "Where is a boat? Choices: A. roof B. lake"
    assert example.extra == {
        "choices": {"label": ["A", "B"], "text": ["roof", "lake"]},
        "original_id": "0a01",
        "question_concept": "boat",
    }


@pytest.mark.parametrize("key", [None, ""])
def test_a_row_of_the_test_split_is_refused_as_such(key: object) -> None:
    with pytest.raises(DataError, match=r"^field answerKey: the row has no answer, as in splits published without"):
        commonsenseqa.example({**FLAT, "answerKey": key})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answerKey": "C"}, "field answerKey: holds 'C'; expected one of A, B"),
        ({"choices": {"label": [], "text": []}}, "field choices: empty"),
        ({"choices": None}, "field choices: holds nothing; expected an object"),
        ({"choices": {"label": ["A", "B"], "text": ["roof"]}}, "field choices: 2 labels for 1 texts"),
        ({"choices": {"label": ["A", "A"], "text": ["roof", "lake"]}}, "field choices: .*one of them twice"),
        ({"choices": {"label": ["A", "B"], "text": ["lake", "lake"]}}, "field choices: .*one of them twice"),
        ({"choices": {"label": ["A", "B"], "text": ["roof", ""]}}, "field choices: .*an empty one"),
        ({"question": {"stem": "Where?", "choices": []}}, "field choices: empty"),
        ({"question": {"stem": "Where?", "choices": ["roof"]}}, "field choices: holds 'roof'; expected an object"),
        ({"question": 5}, "field question: holds 5; expected text"),
        ({"id": 7}, "field id: holds 7; expected text"),
    ],
)
def test_a_row_of_another_shape_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        commonsenseqa.example({**FLAT, **changes})
