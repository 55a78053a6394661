import json
import os
from pathlib import Path

import pytest

from gradeflow.errors import DataError
from gradeflow.sources import gsm8k
from support.raw_rows import RAW

DATA = os.environ.get("GRADEFLOW_DATA", "")
ROW = RAW["gsm8k"]["original"]


def test_the_solution_is_kept_and_the_number_taken_without_commas() -> None:
    example = gsm8k.example(ROW)
    assert example.ground_truth == "1234"
    assert example.extra == {"solution": ROW["answer"]}


def test_aflow_s_number_and_reasoning_are_put_together_again() -> None:
    assert gsm8k.example(RAW["gsm8k"]["aflow"]) == gsm8k.example(ROW)


@pytest.mark.parametrize("answer", ["many", "#### ,", "#### .", "#### -", "", None, ["#### 1"], float("nan")])
def test_an_answer_without_a_number_is_refused(answer: object) -> None:
    with pytest.raises(DataError, match="field answer: "):
        gsm8k.example({**ROW, "answer": answer})


@pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with the real GSM8K")
@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
def test_every_row_of_the_real_file_comes_back_as_it_was(name: str, count: int) -> None:
    with (Path(DATA) / "gsm8k" / f"{name}.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == count
    assert [gsm8k.original(gsm8k.example(row)) for row in rows] == rows
    assert all(gsm8k.example(row).ground_truth.lstrip("-").replace(".", "").isdigit() for row in rows)
