import os
import shutil
from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.commands import chain
from gradeflow.errors import DataError
from support import tiny


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_a_split_that_is_not_whole_is_told_before_any_stage_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.project(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = Path("data/mixed") / f"{name}_mixed.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match=rf"^{file}: MD5 is .*; run: dvc repro"):
        chain.main(params.load(tiny.ROOT / "params.yaml"))
    assert sorted(path.name for path in Path().iterdir()) == ["data", "dvc.lock"]


def test_a_clone_without_data_makes_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.project(tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("data")
    with pytest.raises(chain.StageError, match="dvc repro failed"):  # this folder is no DVC project
        chain.main(params.load(tiny.ROOT / "params.yaml"))


def test_the_chain_ends_with_the_status_of_the_stage_that_stopped_it(tmp_path: Path) -> None:
    with pytest.raises(chain.StageError, match="train_grpo failed") as caught:
        chain.call("train_grpo", tmp_path / "nowhere.yaml", os.environ)
    assert caught.value.status == 2
