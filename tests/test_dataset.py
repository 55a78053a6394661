from pathlib import Path

import pytest

from gradeflow import dataset
from gradeflow.errors import DataError
from support import tiny


def test_a_split_is_found_through_dvc_lock(tmp_path: Path) -> None:
    tiny.project(tmp_path, rows=2)
    found = dataset.read("validation", tmp_path)
    assert found.path == Path("data/mixed/val_mixed.jsonl")
    assert len(found.examples) == 8
    assert len(found.md5) == 32


def test_without_dvc_repro_the_message_says_to_run_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_mixed\.jsonl: not made yet; run: dvc repro"):
        dataset.read("train", tmp_path)


def test_data_that_was_changed_behind_dvc_is_refused(tmp_path: Path) -> None:
    tiny.project(tmp_path, rows=2)
    with (tmp_path / "data/mixed/train_mixed.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match=r"train_mixed\.jsonl: MD5 is .*dvc\.lock says .*; run: dvc repro"):
        dataset.read("train", tmp_path)
