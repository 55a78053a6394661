import json
from pathlib import Path

import pytest

from gradeflow import jsonl, mix, params
from gradeflow.errors import DataError
from gradeflow.types import Example


def settings(**changes: object) -> params.Mix:
    values = {
        "weights": {"gsm8k": 1.0, "places": 1.0},
        "type_ratios": {"math": 0.5, "qa": 0.5},
        "target_train_size": 10,
        "target_val_size": 4,
        "target_test_size": 4,
        "keep_small_threshold": 0,
        "seed": 0,
    }
    return params.Mix.model_validate({**values, **changes})


def example(name: str, kind: str = "math") -> Example:
    return Example(name, "source", kind, f"problem {name}", "1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ({"a": 1, "b": 1}, 10, {"a": 5, "b": 5}),
        ({"a": 0.4, "b": 0.3, "c": 0.3}, 4, {"a": 2, "b": 1, "c": 1}),
        ({"a": 1, "b": 1, "c": 1}, 10, {"a": 4, "b": 3, "c": 3}),
        ({"a": 5, "b": 1}, 0, {"a": 0, "b": 0}),
        ({"a": 0.1, "b": 0.9}, 1, {"a": 0, "b": 1}),
    ],
)
def test_shares_are_exact_by_largest_remainder(weights: dict[str, float], total: int, expected: dict[str, int]) -> None:
    assert mix.shares(weights, total) == expected


def test_a_question_in_two_splits_stays_in_the_held_out_one() -> None:
    loaded = {"a": [("train", example("x")), ("test", example("x")), ("train", example("y"))]}
    pools, dropped = mix.separate(loaded)  # type: ignore[arg-type]
    assert [one.id for one in pools["test"]["a"]] == ["x"]
    assert [one.id for one in pools["train"]["a"]] == ["y"]
    assert dropped == {"train": 1}


def test_spaces_and_case_do_not_make_another_question() -> None:
    assert mix.normalised("How  many\n apples?") == mix.normalised("how many apples?")
    assert mix.normalised("How many apples?") != mix.normalised("How many pears?")


def test_every_type_gets_its_share_and_order_of_rows_does_not_matter() -> None:
    math = [example(f"m{number}") for number in range(20)]
    qa = [example(f"q{number}", "qa") for number in range(20)]
    drawn = mix.draw({"gsm8k": math, "places": qa}, 10, settings(), "train")
    again = mix.draw({"gsm8k": math[::-1], "places": qa[::-1]}, 10, settings(), "train")
    assert [one.problem_type for one in drawn].count("math") == 5
    assert drawn == again


def test_small_training_sets_are_kept_whole() -> None:
    small = [example(f"m{number}") for number in range(8)]
    large = [example(f"q{number}", "qa") for number in range(20)]
    drawn = mix.draw({"gsm8k": small, "places": large}, 10, settings(keep_small_threshold=10), "train")
    assert [one.problem_type for one in drawn].count("math") == 8


def test_a_type_without_rows_leaves_its_share_to_the_others() -> None:
    drawn = mix.draw({"gsm8k": [example(f"m{n}") for n in range(20)], "places": []}, 10, settings(), "train")
    assert len(drawn) == 10


def raw(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "gsm8k.jsonl"
    jsonl.write(path, rows)
    return path


def row(number: int, split: str = "train") -> dict[str, object]:
    return {"question": f"How many is {number}?", "answer": f"#### {number}", "split": split}


def test_a_source_without_validation_rows_lends_some_of_its_training_rows(tmp_path: Path) -> None:
    found = mix.load("gsm8k", raw(tmp_path, [row(number) for number in range(200)]))
    splits = [split for split, _ in found]
    assert 5 < splits.count("validation") < 40
    assert splits.count("train") == 200 - splits.count("validation")


def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path) -> None:
    path = raw(tmp_path, [row(1), {"question": "How many?", "answer": "many", "split": "train"}])
    with pytest.raises(DataError, match=r"gsm8k\.jsonl, line 2: field answer"):
        mix.load("gsm8k", path)


def test_a_row_without_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field split"):
        mix.load("gsm8k", raw(tmp_path, [{"question": "How many?", "answer": "#### 1"}]))


def project(**changes: object) -> params.Params:
    """Settings that mix 50 rows of gsm8k."""
    tree = params.load(Path(__file__).parents[1] / "params.yaml").model_dump()
    tree["mix"] |= {
        "weights": {"gsm8k": 1},
        "type_ratios": {"math": 1},
        "target_train_size": 50,
        "target_val_size": 5,
        "target_test_size": 5,
        **changes,
    }
    tree["fetch"] = {"gsm8k": {"files": {"train": "x"}}}
    return params.validate(tree)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"gsm8k\.jsonl: no such file; `dvc repro` makes it anew"),
        (b'{"question": "How many?", "ans', r"gsm8k\.jsonl, line 1: not JSON.*cut off.*; `dvc repro` makes it anew"),
        (b"", "no train rows to draw: mix.type_ratios names math; the train rows of gsm8k are none"),
    ],
)
def test_a_raw_file_that_is_missing_cut_off_or_empty_leaves_the_mixed_files_alone(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "gsm8k.jsonl").write_bytes(content)
    out = tmp_path / "mixed"
    jsonl.write(out / "train_mixed.jsonl", [{"good": True}])
    with pytest.raises(DataError, match=said):
        mix.main(project(), raw=tmp_path, out=out)
    assert {file.name: list(jsonl.read(file)) for file in out.iterdir()} == {"train_mixed.jsonl": [{"good": True}]}


def test_types_that_no_source_has_are_no_empty_set(tmp_path: Path) -> None:
    raw(tmp_path, [row(number) for number in range(100)])
    with pytest.raises(DataError, match="type_ratios names qa; the train rows of gsm8k are math"):
        mix.main(project(type_ratios={"qa": 1}), raw=tmp_path, out=tmp_path / "mixed")


def test_the_stage_writes_the_same_bytes_twice_and_statistics_in_the_original_s_form(tmp_path: Path) -> None:
    settings = project()
    rows = [row(number) for number in range(100)] + [row(1000 + number, "test") for number in range(10)]
    raw(tmp_path, rows)
    for name in ("one", "two"):
        mix.main(settings, raw=tmp_path, out=tmp_path / name)
    written = ["train_mixed.jsonl", "val_mixed.jsonl", "test_mixed.jsonl", "dataset_stats.json"]
    assert sorted(file.name for file in (tmp_path / "one").iterdir()) == sorted(written)
    for name in written:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    said = json.loads((tmp_path / "one" / "dataset_stats.json").read_text())
    assert {"train_size", "val_size", "train_distribution", "val_distribution", "train_ratios", "val_ratios"} <= set(
        said
    )
    assert said["config"]["target_train_size"] == 50
    first = next(jsonl.read(tmp_path / "one" / "train_mixed.jsonl"))
    assert {"source", "problem_type", "problem", "ground_truth", "solution"} <= set(first)
    assert Example.from_row(first).to_row() == first
