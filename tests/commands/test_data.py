import json
from pathlib import Path

import pytest

from gradeflow import __main__ as cli
from gradeflow.errors import DataError, SettingsError
from support import tiny


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    tiny.project(tmp_path, rows=8)
    return tmp_path


def run(*argv: str) -> None:
    cli.run(["data", *argv, "--params", str(tiny.ROOT / "params.yaml")])


def test_rows_are_counted_by_source_and_split_and_some_are_shown(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = project.rglob("train_mixed.jsonl")
    reasons = {"train": {"duplicate": 0, "contaminated": 6}}
    path.with_name("dataset_stats.json").write_text(json.dumps({"removed": reasons}))
    run("show", "--source", "places", "--count", "2")
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if "│ places" in line]
    assert [cell.strip() for cell in line.split("│")[1:7]] == ["places", "qa", "text", "8", "8", "8"]
    assert told.count("(text)") == 2
    assert "places-" in told
    assert "removed: 6 train (contaminated)" in told


def test_the_seed_chooses_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("0", "0", "1"):
        run("show", "--seed", seed)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_a_source_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(DataError, match=r"no row of gsm8k; there are: functions, places, turns, word_problems"):
        run("show", "--source", "gsm8k")


@pytest.mark.parametrize("argv", [["hide"], ["show", "--split", "dev"], ["show", "--count", "-1"]])
def test_a_wrong_command_line_says_how_it_goes(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match="usage: gradeflow data show"):
        run(*argv)
