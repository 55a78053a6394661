import itertools
import json
import re
from urllib.parse import urlsplit

import pytest

from gradeflow import digest, sources
from gradeflow.errors import SettingsError
from gradeflow.sources import places, turns, word_problems
from gradeflow.types import Example
from support.raw_rows import ORIGINAL, RAW

MADE = ("word_problems", "turns", "places", "functions")
FORMS = [(name, form) for name, forms in RAW.items() for form in forms]


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


@pytest.mark.parametrize(
    ("name", "rows", "examples"),
    [
        ("word_problems", "28c3d441ae9a2be7", "25251ba80eeee8f8"),
        ("turns", "a884d7002b90c2a9", "97a6b2969fd2d496"),
        ("places", "a97ea3f298e86eca", "7a2e99bd23dcb4ae"),
        ("functions", "91af90ed3676b154", "1bfeedd52f70c7f0"),
    ],
)
def test_what_is_made_here_stays_byte_by_byte_since_bases_are_named_by_it(name: str, rows: str, examples: str) -> None:
    made = list(itertools.islice(sources.made_rows(name, "train", 7), 50))
    converted = [sources.load(name).example(row).to_row() for row in made]
    found = [digest.of_bytes("".join(map(json.dumps, written)).encode())[:16] for written in (made, converted)]
    assert found == [rows, examples]


def test_every_published_dataset_has_rows_of_ours_to_test_with() -> None:
    assert set(RAW) == {name for name in sources.known() if hasattr(sources.load(name), "PUBLISHED")}


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_row_of_every_form_comes_back_as_a_row_of_the_original_file(name: str, form: str) -> None:
    source = sources.load(name)
    example = source.example(RAW[name][form])
    row = source.original(example)  # type: ignore[attr-defined]
    if form == ORIGINAL.get(name, "original"):
        assert row == RAW[name][form]
    again = source.example(row)
    assert (again.id, again.problem, again.ground_truth) == (example.id, example.problem, example.ground_truth)
    assert Example.from_row(json.loads(json.dumps(example.to_row()))) == example


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gsm8k", "math"),
        ("humaneval", "code"),
        ("mbpp", "code"),
        ("math", "math"),
        ("mmlu", "choice"),
        ("hotpotqa", "text"),
        ("commonsenseqa", "choice"),
        ("drop", "text"),
    ],
)
def test_every_form_has_the_kind_of_answer_that_its_graders_need(name: str, kind: str) -> None:
    assert {sources.load(name).example(row).kind for row in RAW[name].values()} == {kind}


@pytest.mark.parametrize("name", RAW)
def test_where_a_dataset_is_published_is_pinned_and_its_splits_are_its_own(name: str) -> None:
    published = sources.load(name).PUBLISHED  # type: ignore[attr-defined]
    assert published.licence in {"MIT", "CC-BY-4.0", "CC-BY-SA-4.0"}
    assert "\n" not in published.attribution
    splits = [file.split for file in published.files]
    assert set(splits) <= {"train", "validation", "test"}
    assert name != "humaneval" or splits == ["test"]
    for file in published.files:
        assert file.urls
        for url, sha256 in file.urls.items():
            assert urlsplit(url).hostname
            assert re.fullmatch(r"([0-9a-f]{64})?", sha256)
            if "huggingface.co" in url or "githubusercontent.com" in url:
                assert re.search(r"/[0-9a-f]{40}/", url)


def test_no_address_is_said_to_hold_two_splits() -> None:
    for name in RAW:
        files = sources.load(name).PUBLISHED.files  # type: ignore[attr-defined]
        held = [(url, "" if url.endswith(".parquet") else file.member) for file in files for url in file.urls]
        assert len(set(held)) == len(held)
