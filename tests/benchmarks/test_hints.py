"""What gives answers away: each published pattern on a small task, and what looks like one and is none."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeflow import benchmarks
from gradeflow.benchmarks import Competition, gold, hints
from gradeflow.benchmarks.hints import is_ordered, tells
from support import toy_tasks
from support.toy_tasks import FEATURES, LABELS, write

IDS = [f"a{100 + place}" for place in range(60)]


def found(competition: Competition) -> list[str]:
    assert competition.answers is not None
    return hints.find(competition, gold.read(competition.answers))


@pytest.fixture
def number(tmp_path: Path) -> Competition:
    return toy_tasks.number(tmp_path)


@pytest.fixture
def table(tmp_path: Path) -> Competition:
    return toy_tasks.table(tmp_path)


def test_sound_tasks_give_nothing_away(number: Competition, table: Competition) -> None:
    assert found(number) == found(table) == []


# One number


@pytest.mark.parametrize("value", ["308.649", 308.649, "@value[308.649]", " 308.6490 "])
def test_a_raw_problem_copied_with_its_answer_is_found(value: object, number: Competition) -> None:
    raw = {"id": 1, "Question": "How many?", "more": [{"expected_answer": value}]}
    (number.public_dir / "problem.json").write_text(json.dumps(raw))
    assert found(number) == ["problem.json holds the answer 308.649 as expected_answer"]


def test_short_answers_are_found_under_a_key_and_not_as_an_id(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, answer="7")
    (task.public_dir / "problem.json").write_text('{"id": 7, "difficulty": "7", "days": "7 days"}')
    assert found(task) == []
    (task.public_dir / "problem.json").write_text('{"id": 7, "result": 7}')
    assert found(task) == ["problem.json holds the answer 7 as result"]


@pytest.mark.parametrize("name", ["notes.txt", "check.log", "solve.py", "extra/readme.md", "left.csv"])
def test_a_file_beside_the_problem_that_tells_is_found(name: str, number: Competition) -> None:
    path = number.public_dir / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("solver said 308.649, all well\n")
    assert found(number) == [f"{path.name} holds the answer 308.649"]


def test_answers_in_words_are_found_too(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, answer="No Best Solution")
    (task.public_dir / "problem.json").write_text('{"status": "No Best Solution"}')
    assert found(task) == ["problem.json holds the answer 'No Best Solution' as status".replace("'", "")]


def test_a_copy_of_the_answers_is_found_under_any_name(number: Competition) -> None:
    assert number.answers is not None
    (number.public_dir / "x.bin").write_bytes(number.answers.read_bytes())
    assert found(number) == ["the public file x.bin is the answers"]


def test_a_file_name_that_tells_is_found(number: Competition) -> None:
    (number.public_dir / "run_308.649.png").write_bytes(b"")
    assert found(number) == ["the file name run_308.649.png holds the answer 308.649"]


def test_a_number_of_the_question_gives_nothing_away(tmp_path: Path) -> None:
    task = toy_tasks.number(tmp_path, answer="102.883")
    assert found(task) == []
    assert found(replace(task, description=task.description + " @value[102.883]")) == [
        "the description holds the answer 102.883"
    ]


def test_an_array_in_another_file_is_found(tmp_path: Path) -> None:
    task = benchmarks.load("science").competition("builtin-ringdown", tmp_path)
    task.prepare()
    assert task.gold_submission is not None
    array = np.load(task.gold_submission)
    known = gold.read(task.gold_submission)
    assert hints.find(task, known) == []
    (task.public_dir / "modes.json").write_text(json.dumps({"modes": array[:, 0].round(6).tolist()}))
    assert hints.find(task, known) == ["modes.json holds the numbers of the gold submission"]
    (task.public_dir / "modes.json").unlink()
    np.save(task.public_dir / "setup.npy", array.T)
    assert hints.find(task, known) == ["setup.npy holds the numbers of the gold submission"]


# Rows


@pytest.mark.parametrize(
    ("header", "cell"),
    [("label", lambda label: label), ("code", lambda label: str(len(label) + (label == "cat"))), ("p", None)],
)
def test_a_column_beside_the_ids_that_tells_is_found(
    header: str, cell: Callable[[str], str] | None, table: Competition
) -> None:
    def score(row: int) -> str:
        return f"{0.5 + row / 1000 if LABELS[row] == 'dog' else 0.4 - row / 1000:.3f}"

    rows = [(identifier, cell(LABELS[row]) if cell else score(row)) for row, identifier in enumerate(IDS)]
    write(table.public_dir / "meta.csv", [("image", header), *random.Random(0).sample(rows, 60)])
    assert found(table) == [f"the column {header} of meta.csv tells label"]


def test_the_target_left_in_the_test_table_is_found(table: Competition) -> None:
    rows = [(identifier, *FEATURES[row], LABELS[row]) for row, identifier in enumerate(IDS)]
    write(table.public_dir / "test.csv", [("id", "weight", "height", "label"), *rows])
    assert found(table) == ["the column label of test.csv tells label"]


@pytest.mark.parametrize("name", ["images/{label}/{id}.png", "images/{id}_{label}.png", "{label}-{id}.txt"])
def test_file_names_that_tell_are_found(name: str, table: Competition) -> None:
    for row, identifier in enumerate(IDS):
        path = table.public_dir / name.format(id=identifier, label=LABELS[row])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (said,) = found(table)
    assert said.startswith("file names such as ")
    assert said.endswith(" tell label")


def test_file_names_that_tell_nothing_are_none(table: Competition) -> None:
    (table.public_dir / "images").mkdir()
    for row, identifier in enumerate(IDS):
        (table.public_dir / "images" / f"{identifier}_{row % 3}.png").touch()
    assert found(table) == []


@pytest.mark.parametrize("way", ["sorted", "alternating"])
def test_an_order_of_rows_that_tells_is_found(way: str, tmp_path: Path) -> None:
    cats, dogs = ([row for row in range(60) if LABELS[row] == label] for label in ("cat", "dog"))
    if way == "sorted":
        order = cats + dogs
    else:
        pairs = min(len(cats), len(dogs))
        order = [row for pair in zip(cats, dogs, strict=False) for row in pair] + (cats + dogs)[2 * pairs :][:0]
        order += [row for row in cats + dogs if row not in order]
    task = toy_tasks.table(tmp_path, order=order)
    assert found(task) == [
        "the order of ids tells label",
        "the order of rows in sample_submission.csv tells label",
        "the order of rows in test.csv tells label",
    ]


def test_shuffled_rows_with_ids_in_the_order_of_the_answers_are_found(tmp_path: Path) -> None:
    task = toy_tasks.table(tmp_path, order=sorted(range(60), key=lambda row: LABELS[row]))
    for name in ("test.csv", "sample_submission.csv"):
        header, *rows = (task.public_dir / name).read_text().splitlines()
        shuffled = random.Random(1).sample(rows, len(rows))
        (task.public_dir / name).write_text("\n".join([header, *shuffled]))
    assert found(task) == ["the order of ids tells label"]


def test_a_derived_table_with_the_test_rows_is_found(table: Competition) -> None:
    rows = [(*FEATURES[row], LABELS[row]) for row in range(0, 60, 4)]
    noise = [(1000 + row, row, "cat") for row in range(50)]
    write(table.public_dir / "clean.csv", [("weight", "height", "kind"), *noise, *rows])
    assert found(table) == ["clean.csv has 15 of the 60 test rows, and its column kind tells their label"]


def test_a_derived_table_in_the_order_of_the_test_rows_is_found(table: Competition) -> None:
    write(table.public_dir / "embedded.csv", [("x", "y"), *((row, LABELS[row] == "cat") for row in range(60))])
    assert found(table) == ["the column y of embedded.csv tells label in the order of the test rows"]


def test_a_few_equal_rows_are_chance(table: Competition) -> None:
    rows = [(*FEATURES[row], LABELS[row]) for row in range(2)]
    write(table.public_dir / "clean.csv", [("weight", "height", "kind"), *rows])
    assert found(table) == []


# Parts


@pytest.mark.parametrize(
    ("values", "truth", "expected"),
    [
        ("aaabbb", "xxxyyy", True),
        ("aaabbb", "xyxyxy", False),
        ("abcdef", "xxxyyy", False),
        ("abaaab", "xyxxxx", False),
        ("abcd", "abcd", True),
        ("1234", "4321", True),
        ("1234", "xxyy", True),
        ("1324", "xxyy", False),
        ("aaaa", "xxxx", False),
        ("aabb", "xxxx", False),
    ],
)
def test_what_tells(values: str, truth: str, expected: bool) -> None:
    assert tells(list(values), list(truth)) == expected


@given(st.lists(st.sampled_from("ab"), min_size=30, max_size=60), st.randoms())
def test_relabelling_always_tells_and_a_shuffle_of_a_balanced_target_is_in_no_order(
    truth: list[str], rng: random.Random
) -> None:
    many = len(set(truth)) == 2 and max(truth.count("a"), truth.count("b")) / len(truth) <= hints.SURE
    assert tells(["x" if value == "a" else "y" for value in truth], truth) == many


def test_random_orders_are_none() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        assert not is_ordered([rng.choice("abc") for _ in range(40)])
        assert not is_ordered([str(rng.random()) for _ in range(40)])


@pytest.mark.parametrize(
    "truth", [["a"] * 20 + ["b"] * 20, ["a", "b", "c"] * 10, [str(number) for number in range(40)], ["9", "1"] * 15]
)
def test_orders_are_seen(truth: Sequence[str]) -> None:
    assert is_ordered(truth)


def test_large_and_broken_files_are_passed_over(table: Competition, monkeypatch: pytest.MonkeyPatch) -> None:
    (table.public_dir / "broken.csv").write_bytes(b'"\xff\x00')
    (table.public_dir / "empty.csv").write_bytes(b"")
    (table.public_dir / "broken.json").write_text("{")
    rows = [(identifier, LABELS[row]) for row, identifier in enumerate(IDS)]
    write(table.public_dir / "huge.csv", [("id", "kind"), *rows])
    monkeypatch.setattr(hints, "LARGEST", (table.public_dir / "huge.csv").stat().st_size - 1)
    assert "the column kind of huge.csv tells label" not in found(table)


def test_pandas_reads_what_the_tables_are(table: Competition) -> None:
    assert len(pd.read_csv(table.public_dir / "test.csv")) == len(IDS)
