"""The original's mixed rows, as its own script makes them, with the script's defects."""

from pathlib import Path
from typing import Any

import pytest

from gradeflow import __main__ as cli
from gradeflow import jsonl, sources
from gradeflow.commands import import_mixed
from gradeflow.errors import DataError
from gradeflow.types import Example
from support import tiny
from support.raw_rows import RAW

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "source": "gsm8k",
        "problem_type": "math",
        "problem": RAW["gsm8k"]["original"]["question"],
        "ground_truth": "1,234",
        "solution": RAW["gsm8k"]["original"]["answer"],
    },
    "humaneval": {
        "source": "humaneval",
        "problem_type": "code",
        "problem": RAW["humaneval"]["original"]["prompt"],
        "ground_truth": RAW["humaneval"]["original"]["canonical_solution"],
        **{name: RAW["humaneval"]["original"][name] for name in ("entry_point", "test", "task_id")},
    },
    "mbpp": {
        "source": "mbpp",
        "problem_type": "code",
        "problem": RAW["mbpp"]["aflow"]["prompt"],
        "ground_truth": RAW["mbpp"]["aflow"]["code"],
        "test_list": RAW["mbpp"]["aflow"]["test_list"],
        "task_id": 2003,
    },
    "commonsenseqa": {
        "source": "commonsenseqa",
        "problem_type": "qa",
        "problem": "Where is a boat? Choices: A. roof B. lake",
        "ground_truth": "B",
        "choices": {"label": ["A", "B"], "text": ["roof", "lake"]},
    },
    "hotpotqa": {
        "source": "hotpotqa",
        "problem_type": "qa",
        "problem": RAW["hotpotqa"]["original"]["question"],
        "ground_truth": "Corvo",
        "supporting_facts": RAW["hotpotqa"]["original"]["supporting_facts"],
        "context": RAW["hotpotqa"]["original"]["context"],
    },
    "mmlu": {
        "source": "mmlu",
        "problem_type": "mixed",
        "problem": "Which is a prime? Choices: A. 4 B. 6 C. 7 D. 9",
        "ground_truth": "C",
        "subject": "elementary_mathematics",
        "choices": ["4", "6", "7", "9"],
    },
}


def run(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jsonl.write(folder / "train_mixed.jsonl", rows)
    given = ["--out", str(folder / "out.jsonl"), "--params", str(tiny.ROOT / "params.yaml")]
    cli.run(["import", str(folder / "train_mixed.jsonl"), *given])
    return list(jsonl.read(folder / "out.jsonl"))


@pytest.mark.parametrize("name", ROWS)
def test_a_whole_row_is_the_same_example_as_the_dataset_s_own(name: str) -> None:
    form = {"mbpp": "aflow", "mmlu": "hub"}.get(name, "original")
    own = sources.load(name).example(RAW[name][form])
    imported = import_mixed.example(ROWS[name])
    assert imported.extra.items() <= {**own.extra, **imported.extra}.items()
    assert (imported.id, imported.problem, imported.ground_truth) == (own.id, own.problem, own.ground_truth)
    assert (imported.kind, imported.problem_type) == (own.kind, own.problem_type)


def test_the_rows_are_written_as_mixed_rows_of_our_own(tmp_path: Path) -> None:
    written = run(tmp_path, list(ROWS.values()))
    assert [Example.from_row(row).source for row in written] == list(ROWS)


def test_what_rows_lack_is_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed_book = {name: value for name, value in ROWS["hotpotqa"].items() if name != "context"}
    hub = {**ROWS["commonsenseqa"], "problem": "Where is a boat? Choices: ", "choices": {}}
    untested = {**ROWS["mbpp"], "test_list": []}
    assert len(run(tmp_path, [closed_book, ROWS["gsm8k"], closed_book, hub, untested, {"source": "squad"}])) == 1
    told = capsys.readouterr().out.splitlines()
    begin = [line.partition(":")[0] for line in told[:-1]]
    assert begin == ["commonsenseqa", "hotpotqa", "mbpp", "squad"]
    assert told[0].endswith("1 rows set aside, the first in line 4: field choices: empty; expected two or more")
    assert "2 rows set aside, the first in line 1: field context: empty; without it" in told[1]
    assert "field test_list: missing or empty" in told[2]
    assert "expected one of gsm8k, humaneval" in told[3]
    assert told[-1].endswith("out.jsonl: 1 rows")


def test_a_question_without_its_choices_is_set_aside(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_mixed\.jsonl: no row to grade by"):
        run(tmp_path, [{**ROWS["mmlu"], "problem": "Which is a prime?"}])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("value", [None, "", 3.5, [], [None], {}, {"label": 1}, {"label": ["A", "B"], "text": [1, 2]}])
def test_a_field_of_another_type_is_named(name: str, value: object) -> None:
    read = set(ROWS[name]) - {"problem_type", "subject", "supporting_facts"}
    for field in read - ({"ground_truth"} if name == "gsm8k" else set()):  # its solution holds the answer
        with pytest.raises(DataError, match=r"^field "):
            import_mixed.example({**ROWS[name], field: value})


def test_help_says_how_aflow_s_files_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["import", "--help"])
    assert "mbpp: {files: {validation: data/datasets/mbpp_validate.jsonl" in capsys.readouterr().out
