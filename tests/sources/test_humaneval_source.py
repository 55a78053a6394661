import gzip
import json
import os
from pathlib import Path

import pytest

from gradeflow.errors import DataError
from gradeflow.sources import humaneval
from support.raw_rows import RAW

DATA = os.environ.get("GRADEFLOW_DATA", "")
ROW = RAW["humaneval"]["original"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("test", "assert double(2) == 4", "does not define check"),
        ("test", "def check(candidate) assert", "expected Python"),
        ("entry_point", "the double", "expected the name of a function"),
        ("canonical_solution", " ", "expected text that is not empty"),
        ("prompt", None, "missing; expected text"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(DataError, match=f"^field {field}: .*{said}"):
        humaneval.example({**ROW, field: value})


def test_aflow_s_file_of_public_tests_is_no_dataset() -> None:
    with pytest.raises(DataError, match="field prompt: missing"):
        humaneval.example({"problem_id": "Ours/1", "entry_point": "double", "test": ["assert candidate(2) == 4"]})


@pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with the real HumanEval")
def test_every_row_of_the_real_file_comes_back_as_it_was() -> None:
    with gzip.open(Path(DATA) / "humaneval" / "HumanEval.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164
    assert [humaneval.original(humaneval.example(row)) for row in rows] == rows
