import pytest

from gradeflow.errors import DataError
from gradeflow.sources import hotpotqa
from support.raw_rows import RAW

ROW, HUB = RAW["hotpotqa"]["original"], RAW["hotpotqa"]["hub"]


def test_both_forms_give_the_same_example_and_keep_the_context() -> None:
    example = hotpotqa.example(ROW)
    assert hotpotqa.example(HUB) == example
    assert example.problem == (
        "Wide Water: Wide Water is a novel by Ida Farrow.\n"
        "Ida Farrow: Ida Farrow is a writer.  She was born in Corvo.\n"
        "Question: Where was the author of Wide Water born?"
    )
    assert example.extra["context"] == ROW["context"]


def test_a_number_for_an_id_is_kept_as_such() -> None:
    assert hotpotqa.example({**ROW, "_id": 37}).extra["_id"] == 37


@pytest.mark.parametrize("answer", [None, ""])
def test_a_row_of_the_test_split_is_refused_as_such(answer: object) -> None:
    with pytest.raises(DataError, match=r"^field answer: the row has no answer, as in splits published without"):
        hotpotqa.example({**ROW, "answer": answer})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": []}, "field context: empty; without it the question cannot be answered"),
        ({"context": None}, "field context: empty"),
        ({"context": [["Title"]]}, "field context: .*expected pairs of title and sentences"),
        ({"context": [["Title", "One."]]}, "field context: holds 'One.'; expected a list of texts"),
        ({"context": [[1, ["One."]]]}, r"field context: holds \[1\]; expected a list of texts"),
        ({"context": {"title": ["A", "B"], "sentences": [["One."]]}}, "field context: 2 of title and 1 of sentences"),
        ({"supporting_facts": [["Title", "0"]]}, "field supporting_facts: holds '0'; expected the index"),
        ({"type": ["bridge"]}, "field type: .*expected text"),
        ({"_id": 1.5}, "field _id: holds 1.5; expected a whole number or text"),
    ],
)
def test_a_row_of_another_shape_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        hotpotqa.example({**ROW, **changes})
