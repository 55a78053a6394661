import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet as reader

from gradeflow import jsonl
from gradeflow.errors import DataError
from gradeflow.mixing import parquet
from gradeflow.types import Example

CHOICE = Example(
    "turns-0", "turns", "qa", "Left or right? Choices: A. left B. right", "A", {"choices": {"label": ["A", "B"]}}
)
PLACE = Example(
    "places-1", "places", "qa", "Où est-ce ?", "東京", {"context": [["T", ["s", 1.5]], []], "level": 3, "none": None}
)
PLAIN = Example("gsm8k-2", "gsm8k", "math", "1 + 1?\nTell.", "2")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "train_mixed.jsonl"
    jsonl.write(path, [example.to_row() for example in [CHOICE, PLACE, PLAIN] * 3])
    return path


def written(rows: Path) -> Path:
    out = rows.parent / "parquet" / "train.parquet"
    parquet.write(rows, out)
    return out


def test_rows_are_the_same_in_the_same_order(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "AT_ONCE", 4)
    out = written(rows)
    found: list[dict[str, Any]] = pd.read_parquet(out).to_dict("records")
    assert [Example(**row | {"extra": json.loads(row["extra"])}) for row in found] == [CHOICE, PLACE, PLAIN] * 3
    assert reader.ParquetFile(out).num_row_groups == 3


def test_datasets_reads_splits_and_nested_fields(rows: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    out = written(rows)
    out.with_name("test.parquet").write_bytes(out.read_bytes())
    found = load_dataset("parquet", data_dir=str(out.parent), cache_dir=str(tmp_path / "cache"))
    assert set(found) == {"train", "test"}
    assert [Example(**row) for row in found["train"]] == [CHOICE, PLACE, PLAIN] * 3


def test_the_same_rows_give_the_same_bytes_with_nothing_of_the_machine_in_them(rows: Path) -> None:
    out = written(rows)
    content = out.read_bytes()
    assert str(rows.parent).encode() not in content
    assert written(rows).read_bytes() == content
    told = reader.ParquetFile(out).metadata
    assert (told.created_by, told.metadata) == (f"parquet-cpp-arrow version {pa.__version__}", None)
    assert {told.row_group(0).column(n).compression for n in range(told.num_columns)} == {"ZSTD"}


def test_no_rows_are_a_file_with_columns(tmp_path: Path) -> None:
    (tmp_path / "rows").touch()
    parquet.write(tmp_path / "rows", tmp_path / "none.parquet")
    assert list(pd.read_parquet(tmp_path / "none.parquet").columns) == [
        "id", "source", "problem_type", "problem", "ground_truth", "extra",
    ]  # fmt: skip


def test_what_cannot_be_written_leaves_what_was_there(rows: Path) -> None:
    out = written(rows)
    before = out.read_bytes()
    with rows.open("a") as file:
        file.write('{"id": "cut o')
    with pytest.raises(ValueError, match="unexpected end"):
        parquet.write(rows, out)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]
    (out.parent / "file").touch()
    with pytest.raises(DataError, match=r"b\.parquet: cannot be written"):
        parquet.write(rows, out.parent / "file" / "b.parquet")
