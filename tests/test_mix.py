import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gradeflow import jsonl, mix, params
from gradeflow.dataset import NAMES
from gradeflow.errors import DataError
from gradeflow.mixing import scan
from gradeflow.types import Example

Row = dict[str, Any]
WRITTEN = [
    "train_mixed.jsonl",
    "val_mixed.jsonl",
    "test_mixed.jsonl",
    "dataset_stats.json",
    "mixture.csv",
    "removed.jsonl",
    "README.md",
    "parquet",
]
SHIPPED = Path(__file__).parents[1] / "params.yaml"


def settings(**changes: object) -> params.Params:
    """Settings that mix 50 rows of gsm8k."""
    tree = params.load(SHIPPED).model_dump()
    tree["mix"] = {
        "weights": {"gsm8k": 1},
        "type_ratios": {"math": 1},
        "target_train_size": 50,
        "target_val_size": 5,
        "target_test_size": 5,
        "keep_small_threshold": 0,
        "seed": 0,
        "caps": {},
        "repeat": 1,
        "near_duplicates": 0.0,
        "decontaminate": True,
        "protect": [],
        "parquet_rows": 1000,
        **changes,
    }
    named = {*tree["mix"]["weights"], *tree["mix"].get("protect", [])}
    tree["fetch"] = {name: {"files": {"train": "x"}} for name in named}
    return params.validate(tree)


def number(n: int, split: str = "train", question: str = "How many is {n}?") -> Row:
    return {"question": question.format(n=n), "answer": f"So it is.\n#### {n}", "split": split}


def numbers(train: int = 100, validation: int = 20, test: int = 20) -> list[Row]:
    splits = ["train"] * train + ["validation"] * validation + ["test"] * test
    return [number(n, split) for n, split in enumerate(splits)]


def place(n: int, split: str = "train") -> Row:
    return {"question": f"Where is {n}?", "answer": "Rome", "context": [["T", [f"{n} is in Rome."]]], "split": split}


def mixed(folder: Path, rows: Mapping[str, Iterable[Row]], **changes: object) -> Path:
    """The folder of what is mixed out of these rows by source."""
    for name, some in rows.items():
        jsonl.write(folder / f"{name}.jsonl", some)
    weights = {name: 1 for name in rows if name not in changes.get("protect", [])}
    mix.main(settings(**{"weights": weights} | changes), raw=folder, out=folder / "mixed")
    return folder / "mixed"


def train(out: Path) -> list[Row]:
    return list(jsonl.read(out / "train_mixed.jsonl"))


def stats(out: Path) -> Row:
    found: Row = json.loads((out / "dataset_stats.json").read_text())
    return found


def removed(out: Path) -> list[Row]:
    return list(jsonl.read(out / "removed.jsonl"))


def test_the_same_rows_give_the_same_bytes_in_any_order_and_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = numbers(300)
    one = mixed(tmp_path / "one", {"gsm8k": rows})
    assert sorted(file.name for file in one.iterdir()) == sorted(WRITTEN)
    two = mixed(tmp_path / "two", {"gsm8k": random.Random(0).sample(rows, len(rows))})
    monkeypatch.setattr(scan, "PIECE_BYTES", 1 << 10)  # enough pieces for other processes
    three = mixed(tmp_path / "three", {"gsm8k": rows})
    for name in set(WRITTEN) - {"parquet"}:
        assert (one / name).read_bytes() == (two / name).read_bytes() == (three / name).read_bytes()


def test_another_seed_draws_other_rows(tmp_path: Path) -> None:
    first, second = (
        {row["id"] for row in train(mixed(tmp_path, {"gsm8k": numbers(300)}, seed=seed))} for seed in (0, 1)
    )
    assert len(first) == len(second) == 50
    assert len(first & second) < 25


def test_a_row_more_moves_no_other(tmp_path: Path) -> None:
    rows = numbers(300)
    before = {row["id"] for row in train(mixed(tmp_path, {"gsm8k": rows}))}
    after = {row["id"] for row in train(mixed(tmp_path, {"gsm8k": [*rows, number(1000)]}))}
    assert len(before & after) >= 49


def test_statistics_are_in_the_original_s_form(tmp_path: Path) -> None:
    rows = {"gsm8k": numbers(), "hotpotqa": [place(n, row["split"]) for n, row in enumerate(numbers())]}
    out = mixed(tmp_path, rows, type_ratios={"math": 0.4, "qa": 0.6})
    said = stats(out)
    assert (said["train_size"], said["train_distribution"]) == (50, {"math": 20, "qa": 30})
    assert said["val_ratios"] == {"math": 0.4, "qa": 0.6}
    assert said["dataset_stats"]["gsm8k"] == {"train": 100, "val": 20, "test": 20}
    assert said["config"]["target_train_size"] == 50
    first = train(out)[0]
    assert {"source", "problem_type", "problem", "ground_truth"} <= set(first)
    assert Example.from_row(first).to_row() == first
    assert (out / "mixture.csv").read_text().splitlines()[:3] == [
        "split,type,source,rows", "train,math,gsm8k,20", "train,qa,hotpotqa,30",
    ]  # fmt: skip


def test_the_card_names_licences_and_what_went(tmp_path: Path) -> None:
    out = mixed(tmp_path, {"gsm8k": [*numbers(), number(0)], "word_problems": numbers()}, decontaminate=False)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense:\n- mit\n---\n")
    assert "| word_problems | " in card
    assert "20 test, 20 validation, 101 train rows" in card  # all of the second dataset, and one of the first
    assert "| gsm8k | 50 | 5 | 5 |" in card


def test_a_type_too_short_is_told_of_and_repeated_by_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"gsm8k": numbers(10), "hotpotqa": [place(n, row["split"]) for n, row in enumerate(numbers())]}
    ratios = {"math": 0.5, "qa": 0.5}
    assert stats(mixed(tmp_path, rows, type_ratios=ratios))["train_distribution"] == {"math": 10, "qa": 25}
    said = "train: 10 rows of math, where its share is 25; name more datasets, or raise mix.repeat"
    assert said in capsys.readouterr().out
    out = mixed(tmp_path, rows, type_ratios=ratios, repeat=3)
    assert stats(out)["train_distribution"] == {"math": 25, "qa": 25}
    times = Counter(row["id"] for row in train(out) if row["source"] == "gsm8k")
    assert sorted(times.values()) == [2] * 5 + [3] * 5
    assert said not in capsys.readouterr().out


def test_a_source_s_rows_are_capped_and_the_others_make_up_for_it(tmp_path: Path) -> None:
    rows = {"gsm8k": numbers(), "word_problems": [number(5000 + n, r["split"]) for n, r in enumerate(numbers())]}
    assert stats(mixed(tmp_path, rows, caps={"gsm8k": 4}))["train_sources"] == {"gsm8k": 4, "word_problems": 46}


def test_small_training_sets_are_kept_whole(tmp_path: Path) -> None:
    rows = {"gsm8k": numbers(30), "word_problems": [number(5000 + n, r["split"]) for n, r in enumerate(numbers())]}
    out = mixed(tmp_path, rows, keep_small_threshold=31, weights={"gsm8k": 1, "word_problems": 9})
    assert stats(out)["train_sources"] == {"gsm8k": 30, "word_problems": 20}


def test_a_question_in_two_splits_stays_in_the_held_out_one(tmp_path: Path) -> None:
    again = number(0, "test", question="  how MANY\nis {n}? ")
    out = mixed(tmp_path, {"gsm8k": [*numbers(), again, number(1)]}, target_train_size=100)
    assert stats(out)["removed"]["train"] == {"duplicate": 2, "contaminated": 0, "near duplicate": 0}
    gone = removed(out)
    assert [(row["split"], row["why"]) for row in gone] == [("train", "duplicate")] * 2
    assert {row["id"] for row in train(out)}.isdisjoint({gone[0]["id"], gone[0]["because"]})
    assert gone[1]["id"] == gone[1]["because"]
    assert gone[1]["id"] in {row["id"] for row in train(out)}


QUESTION = "A shop sells {n} green lamps on Monday and twice as many blue lamps on Tuesday, which is how many in all?"


def test_a_training_row_that_holds_a_test_question_goes_and_the_report_says_why(tmp_path: Path) -> None:
    leak = number(7, question=f"Solve this. {QUESTION} Think first.")
    rows = [*numbers(), leak, number(7, "test", question=QUESTION)]
    out = mixed(tmp_path, {"gsm8k": rows}, target_train_size=200)
    (gone,) = removed(out)
    assert (gone["why"], gone["split"]) == ("contaminated", "train")
    assert gone["shared"] in QUESTION.lower().replace(",", "").format(n=7)
    assert len(gone["shared"].split()) == 13
    assert not any("Solve this" in row["problem"] for row in train(out))
    kept = mixed(tmp_path, {"gsm8k": rows}, target_train_size=200, decontaminate=False)
    assert any("Solve this" in row["problem"] for row in train(kept))


def test_questions_of_protected_datasets_are_kept_out_and_are_not_drawn(tmp_path: Path) -> None:
    rows = {
        "gsm8k": [*numbers(), number(7, question=QUESTION)],
        "word_problems": [number(7, "test", question=QUESTION)],
    }
    out = mixed(tmp_path, rows, protect=["word_problems"], target_train_size=200, target_test_size=100)
    assert [(row["why"], row["source"]) for row in removed(out)] == [("duplicate", "gsm8k")]
    assert stats(out)["test_sources"] == {"gsm8k": 20}


def test_paragraphs_that_questions_share_are_no_contamination(tmp_path: Path) -> None:
    told = [["Rome", ["The old city lies on seven hills by a river that flows on to the western sea."]]]
    rows = [place(n, row["split"]) | {"context": told} for n, row in enumerate(numbers())]
    assert removed(mixed(tmp_path, {"hotpotqa": rows}, type_ratios={"qa": 1})) == []


def test_rows_nearly_the_same_go_by_setting(tmp_path: Path) -> None:
    long = "There are {n} ships. " + " ".join(f"word{n}" for n in range(60)) + " How many ships?"
    rows = [*numbers(), *(number(1000 + n, question=long) for n in range(4))]
    assert removed(mixed(tmp_path, {"gsm8k": rows})) == []
    gone = removed(mixed(tmp_path, {"gsm8k": rows}, near_duplicates=0.8))
    assert [row["why"] for row in gone] == ["near duplicate"] * 3
    assert len({row["because"] for row in gone}) == 1
    assert all(0.8 < row["shared"] < 1 for row in gone)


def test_made_rows_are_alike_by_intent(tmp_path: Path) -> None:
    rows = [number(n, row["split"], QUESTION) for n, row in enumerate(numbers())]
    assert removed(mixed(tmp_path, {"word_problems": rows}, near_duplicates=0.5)) == []


def test_a_source_without_validation_rows_lends_some_of_its_training_rows(tmp_path: Path) -> None:
    there = stats(mixed(tmp_path, {"gsm8k": numbers(300, 0)}))["dataset_stats"]["gsm8k"]
    assert 15 < there["val"] < 50
    assert there["train"] + there["val"] == 300


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"gsm8k\.jsonl: no such file; `dvc repro` makes it"),
        ('{"question": "How many?", "ans', r"gsm8k\.jsonl, line 2: not JSON.*cut off.*; `dvc repro` makes it anew"),
        ('{"question": "?", "answer": "many", "split": "train"}\n', r"gsm8k\.jsonl, line 2: field answer"),
        ('{"question": "?", "answer": "#### 1"}\n', r"gsm8k\.jsonl, line 2: field split: None is none of train"),
        ("[1]\n", r"gsm8k\.jsonl, line 2: expected an object, found list"),
        ("", "no test rows to draw: mix.type_ratios names math; the test rows of gsm8k are none"),
    ],
)
def test_a_bad_file_is_named_with_line_and_field_and_leaves_the_mixed_files_alone(
    tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "gsm8k.jsonl").write_text(json.dumps(number(1)) + "\n" + content)
    out = tmp_path / "mixed"
    jsonl.write(out / "train_mixed.jsonl", [{"good": True}])
    with pytest.raises(DataError, match=said):
        mix.main(settings(), raw=tmp_path, out=out)
    assert {file.name: list(jsonl.read(file)) for file in out.iterdir()} == {"train_mixed.jsonl": [{"good": True}]}


def test_types_that_no_source_has_are_no_empty_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="type_ratios names qa; the test rows of gsm8k are math"):
        mixed(tmp_path, {"gsm8k": numbers()}, type_ratios={"qa": 1})


def test_a_large_mix_is_parquet_too_and_a_smaller_one_after_it_is_not(tmp_path: Path) -> None:
    rows = {"gsm8k": numbers(), "hotpotqa": [place(n, row["split"]) for n, row in enumerate(numbers())]}
    ratios = {"math": 0.5, "qa": 0.5}
    out = mixed(tmp_path, rows, type_ratios=ratios, parquet_rows=60)  # 50 and 5 and 5
    for split, name in NAMES.items():
        found = pd.read_parquet(out / "parquet" / f"{split}.parquet")
        assert found["id"].tolist() == [row["id"] for row in jsonl.read(out / name)]
    mixed(tmp_path, rows, type_ratios=ratios, parquet_rows=61)
    assert list((out / "parquet").iterdir()) == []
