import gzip
import itertools
import json
import os
from pathlib import Path

import pytest

from gradeflow import sources
from gradeflow.errors import DataError, SettingsError
from gradeflow.sources import commonsenseqa, gsm8k, hotpotqa, humaneval, places, turns, word_problems

MADE = ("word_problems", "turns", "places", "functions")
DATA = os.environ.get("GRADEFLOW_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with the real GSM8K and HumanEval")


def some(name: str, count: int = 200, split: sources.Split = "train", seed: int = 0):
    return list(itertools.islice(sources.made(name, split, seed), count))


@pytest.mark.parametrize("name", MADE)
def test_the_same_seed_makes_the_same_problems(name: str) -> None:
    assert some(name, 20) == some(name, 20)
    assert some(name, 20) != some(name, 20, seed=1)


@pytest.mark.parametrize("name", MADE)
def test_no_problem_is_in_two_splits_whatever_the_seed(name: str) -> None:
    train = {example.id for seed in (0, 1) for example in some(name, seed=seed)}
    held_out = {example.id for split in ("validation", "test") for example in some(name, split=split, seed=2)}
    assert train & held_out == set()
    assert len(train) == 400


def test_each_kind_of_answer_is_made() -> None:
    assert [some(name, 1)[0].kind for name in MADE] == ["math", "choice", "text", "code"]


def test_a_word_problem_s_reference_is_the_value_of_its_expression() -> None:
    for example in some("word_problems"):
        assert word_problems.evaluate(word_problems.expression_of(example)) == int(example.ground_truth)
        assert int(example.ground_truth) > 0


def test_the_steps_of_turning_lead_to_the_answer() -> None:
    for example in some("turns"):
        way = turns.steps_of(example).rpartition(" ")[2]
        choices = example.extra["choices"]
        assert dict(zip(choices["label"], choices["text"], strict=True))[example.ground_truth] == way


def test_turning_right_goes_clockwise() -> None:
    assert turns.faced("north", ["right", "around", "left", "left"]) == ["east", "west", "south", "east"]


def test_the_answer_letters_of_turns_are_spread() -> None:
    letters = [example.ground_truth for example in some("turns", 500)]
    assert all(80 < letters.count(letter) < 170 for letter in "ABCD")


def test_the_sentence_about_a_place_holds_the_answer_and_is_in_the_context() -> None:
    for example in some("places"):
        sentence = places.sentence_of(example)
        assert example.ground_truth in sentence
        assert sentence.removesuffix(".") in example.problem


def test_a_function_s_reference_passes_its_tests_and_another_s_does_not() -> None:
    first, second = some("functions", 2)
    for example, solution, passes in ((first, first, True), (first, second, False)):
        scope: dict[str, object] = {}
        head = example.problem.partition("\n")[0]
        exec(f"{head}\n{solution.ground_truth}\n{example.extra['test']}", scope)
        try:
            scope["check"](scope[example.extra["entry_point"]])  # type: ignore[operator]
        except Exception:  # noqa: BLE001 - whatever the other solution raises
            assert not passes
        else:
            assert passes


def test_asking_for_more_than_can_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    question = "always the same?"
    monkeypatch.setattr(word_problems, "make", lambda _: {"question": question, "answer": "#### 1"})
    split = sources.split_of(question)
    with pytest.raises(SettingsError, match=f"1 distinct {split} rows are all that it can make"):
        some("word_problems", 2, split=split)


def test_an_unknown_source_names_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"fetch\.gsm9k: no such dataset; known: .*gsm8k"):
        sources.load("gsm9k")


def test_a_published_dataset_cannot_be_made() -> None:
    with pytest.raises(SettingsError, match="needs files"):
        sources.maker("gsm8k")


def test_gsm8k_keeps_the_solution_and_takes_the_number_without_commas() -> None:
    example = gsm8k.example({"question": "How many?", "answer": "<<1000+200=1,200>>\n#### 1,200"})
    assert example.ground_truth == "1200"
    assert example.extra["solution"].endswith("#### 1,200")


def test_gsm8k_without_an_answer_line_is_refused() -> None:
    with pytest.raises(DataError, match="field answer"):
        gsm8k.example({"question": "How many?", "answer": "many"})


FLAT = {
    "question": "Where?",
    "choices": {"label": ["A", "B"], "text": ["here", "there"]},
    "answerKey": "B",
}
NESTED = {
    "question": {"stem": "Where?", "choices": [{"label": "A", "text": "here"}, {"label": "B", "text": "there"}]},
    "answerKey": "B",
}


def test_both_forms_of_commonsenseqa_keep_their_choices() -> None:
    assert commonsenseqa.example(FLAT) == commonsenseqa.example(NESTED)
    assert commonsenseqa.example(FLAT).problem == "Where? Choices: A. here B. there"


@pytest.mark.parametrize("row", [{**FLAT, "answerKey": ""}, {**FLAT, "answerKey": "C"}])
def test_an_unlabelled_row_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(DataError, match="field answerKey"):
        commonsenseqa.example(row)


def test_choices_that_are_empty_are_refused() -> None:
    with pytest.raises(DataError, match="field choices: empty"):
        commonsenseqa.example({**FLAT, "choices": {"label": [], "text": []}})


def test_hotpotqa_keeps_its_context_in_both_forms() -> None:
    original = {
        "question": "Where?",
        "answer": "here",
        "context": [["Title", ["One.", "Two."]]],
        "supporting_facts": [["Title", 1]],
    }
    hub = {
        **original,
        "context": {"title": ["Title"], "sentences": [["One.", "Two."]]},
        "supporting_facts": {"title": ["Title"], "sent_id": [1]},
    }
    assert hotpotqa.example(original) == hotpotqa.example(hub)
    assert hotpotqa.example(original).problem == "Title: One. Two.\nQuestion: Where?"


def test_hotpotqa_without_context_is_refused() -> None:
    with pytest.raises(DataError, match="field context"):
        hotpotqa.example({"question": "Where?", "answer": "here", "context": []})


@needs_data
def test_every_row_of_the_real_gsm8k_converts() -> None:
    for name, count in (("train", 7473), ("test", 1319)):
        rows = [json.loads(line) for line in (Path(DATA) / "gsm8k" / f"{name}.jsonl").read_text().splitlines()]
        examples = [gsm8k.example(row) for row in rows]
        assert len(examples) == count
        assert all(
            example.problem == row["question"] and example.extra["solution"] == row["answer"]
            for example, row in zip(examples, rows, strict=True)
        )


@needs_data
def test_every_row_of_the_real_humaneval_converts() -> None:
    with gzip.open(Path(DATA) / "humaneval" / "HumanEval.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    examples = [humaneval.example(row) for row in rows]
    assert len(examples) == 164
    for example, row in zip(examples, rows, strict=True):
        assert {**example.extra, "canonical_solution": example.ground_truth} == row
