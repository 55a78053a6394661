import pytest

from gradeflow.errors import DataError
from gradeflow.sources import drop
from support.raw_rows import RAW

ROW, HUB, AFLOW = (RAW["drop"][form] for form in ("original", "hub", "aflow"))
PASSAGE = {
    "key": "ours_1",
    "passage": ROW["passage"],
    "qa_pairs": [
        {name: ROW[name] for name in ("question", "query_id", "answer", "validated_answers")},
        {"question": "When?", "query_id": "ours-2", "answer": {"date": {"day": "5", "month": "May", "year": "1990"}}},
    ],
}


def test_all_forms_ask_the_same_question_with_its_passage() -> None:
    examples = [drop.example(row) for row in RAW["drop"].values()]
    question = "From how many yards did the Reds kick?"
    assert {example.problem for example in examples} == {f"{ROW['passage']}\nQuestion: {question}"}
    assert {example.extra["question"] for example in examples} == {question}
    assert {example.ground_truth for example in examples} == {"31 and 44"}


def test_other_valid_answers_are_kept_beside_the_author_s() -> None:
    assert drop.example(ROW).extra["alternatives"] == ["75"]
    assert drop.example(AFLOW).extra["alternatives"] == ["75"]
    assert drop.example(HUB).extra["alternatives"] == []


def test_a_passage_of_the_original_file_becomes_a_row_of_each_question() -> None:
    first, second = map(drop.example, drop.rows(PASSAGE))
    assert (first.ground_truth, second.ground_truth) == ("31 and 44", "5 May 1990")
    assert first.extra["section_id"] == second.extra["section_id"] == "ours_1"
    assert list(drop.rows(ROW)) == [ROW]
    with pytest.raises(DataError, match=r"^field qa_pairs: a passage with several questions"):
        drop.example(PASSAGE)


@pytest.mark.parametrize(
    ("spans", "types", "answer", "alternatives"),
    [
        (["4", "5"], ["number", "number"], "4", ["5"]),
        (["5", "4", "4"], ["number"] * 3, "4", ["5"]),
        (["Reds", "Reds", "the Reds"], ["span"] * 3, "Reds", ["the Reds"]),
        (["Reds", "Blues", "Reds", "Blues"], ["span"] * 4, "Reds and Blues", []),
        (["5 May 1990"], ["date"], "5 May 1990", []),
    ],
)
def test_answers_that_the_hub_runs_together_are_told_apart_by_how_often_they_are_given(
    spans: list[str], types: list[str], answer: str, alternatives: list[str]
) -> None:
    example = drop.example({**HUB, "answers_spans": {"spans": spans, "types": types}})
    assert (example.ground_truth, example.extra["alternatives"]) == (answer, alternatives)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**ROW, "answer": None}, "field answer: holds nothing; expected an object"),
        ({**ROW, "answer": {"spans": []}, "validated_answers": []}, "field answer: the row has no answer"),
        ({**ROW, "answer": {"spans": "31"}}, "field answer.spans: holds '31'; expected a list of texts"),
        ({**ROW, "answer": {"number": 31}}, "field number: holds 31; expected text"),
        ({**HUB, "answers_spans": {"spans": [], "types": []}}, "field answer: the row has no answer"),
        ({**HUB, "passage": " "}, "field passage: holds ' '; expected text that is not empty"),
        ({**AFLOW, "context": "Passage: Reds."}, "field context: holds .*expected `Passage: ...`, `Question: ...`"),
        ({**AFLOW, "ref_text": ""}, "field ref_text: holds ''; expected text that is not empty"),
    ],
)
def test_a_row_without_answer_or_passage_is_refused(row: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        drop.example(row)
