"""A preparer makes public and private files, in a sandbox, and gives no answer away."""

import hashlib
import json
from pathlib import Path
from textwrap import dedent

import pytest

from gradeflow.benchmarks import leaks
from gradeflow.benchmarks.folders import drift
from gradeflow.errors import DataError
from support.competitions import COPIES_ITS_PROBLEM, opened, write
from support.sandboxes import both


def unprepared(
    tmp_path: Path, prepare: str = COPIES_ITS_PROBLEM, config: str = "", family: str = "engineering"
) -> Path:
    data = write(tmp_path, family, prepare=prepare, config=config)
    for file in (data / "competitions/plant-7/prepared").rglob("*.csv"):
        file.unlink()
    for folder in ("public", "private", ""):
        (data / "competitions/plant-7/prepared" / folder).rmdir()
    return data


@both
def test_a_preparer_makes_the_files_and_the_raw_data_stays_as_it_was(tmp_path: Path, isolation: str) -> None:
    data = unprepared(tmp_path)
    before = (data / "competitions/plant-7/raw/problem.json").read_bytes()
    with opened(data, isolation=isolation) as benchmark:
        task = benchmark.competition("plant-7")
        task.prepare()
        assert sorted(path.name for path in task.public_dir.iterdir()) == ["problem.json", "sample_submission.csv"]
        assert [path.name for path in task.private_dir.iterdir()] == ["answer.csv"]
    assert (data / "competitions/plant-7/raw/problem.json").read_bytes() == before


def test_the_answer_that_a_preparer_copies_with_the_problem_is_taken_out(tmp_path: Path) -> None:
    with opened(unprepared(tmp_path)) as benchmark:
        task = benchmark.competition("plant-7")
        task.prepare()
    assert json.loads((task.raw_dir / "problem.json").read_text())["expected_answer"] == "12.5"
    assert json.loads((task.public_dir / "problem.json").read_text()) == {"id": 7, "en_question": "What is the cost?"}
    assert "12.5" in (task.private_dir / "answer.csv").read_text()


PREPARE = """
    import os, shutil

    def prepare(raw, public, private):
        (private / "answer.csv").write_text("id,answer\\n1,0.5\\n2,0.75\\n")
        (public / "sample_submission.csv").write_text("id,answer\\n1,\\n2,\\n")
        {more}
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("shutil.copy(private / 'answer.csv', public / 'x.csv')", r"x\.csv: a public file that is the same"),
        ("(public / 'x.txt').write_text('2,0.75\\nother,row\\n1,0.5')", r"x\.txt: a public file with every row"),
        ("os.symlink(private / 'answer.csv', public / 'x.csv')", "plain files and folders only"),
        ("os.mkfifo(public / 'x')", "plain files and folders only"),
        ("shutil.rmtree(public); os.symlink('/usr', public)", "public: a preparer may fill this folder"),
        ("shutil.rmtree(private)", "private: a preparer may fill this folder"),
        ("raise FileNotFoundError(raw / 'train.csv')", r"its preparer failed: FileNotFoundError.*prepare\.py, line 7"),
        ("(raw / 'problem.json').write_text('')", "its preparer failed: OSError"),
        ("os._exit(3)", "its preparer failed: its process ended with status 3"),
        ("import time; time.sleep(60)", r"it took more than 2 s \(grade\.prepare_s\)"),
    ],
)
def test_a_preparer_that_fails_or_gives_answers_away_leaves_nothing(tmp_path: Path, more: str, message: str) -> None:
    data = unprepared(tmp_path, PREPARE.format(more=more))
    with opened(data, prepare_s=2.0) as benchmark:
        task = benchmark.competition("plant-7")
        with pytest.raises(DataError, match=message):
            task.prepare()
    assert not task.public_dir.exists()
    assert not task.private_dir.exists()


def test_without_raw_data_the_folder_is_named(tmp_path: Path) -> None:
    data = unprepared(tmp_path)
    (data / "competitions/plant-7/raw/problem.json").unlink()
    (data / "competitions/plant-7/raw").rmdir()
    with opened(data) as benchmark, pytest.raises(DataError, match="raw: no such folder; put the raw data of plant-7"):
        benchmark.competition("plant-7").prepare()


def test_the_validation_split_has_a_preparer_and_folders_of_its_own(tmp_path: Path) -> None:
    data = unprepared(tmp_path, "def prepare(raw, public, private):\n    raise NotImplementedError\n")
    made = tmp_path / "benchmarks/engineeringbench/competitions/plant-7/prepare_val.py"
    made.write_text(dedent(COPIES_ITS_PROBLEM))
    with opened(data, mode="validation") as benchmark:
        task = benchmark.competition("plant-7")
        task.prepare()
        assert (data / "competitions/plant-7/prepared/private_val/answer.csv").is_file()
        assert task.answers == data / "competitions/plant-7/prepared/private_val/answer.csv"


def test_preparers_import_the_same_helpers_as_graders(tmp_path: Path) -> None:
    data = unprepared(tmp_path, "    from .utils import read_csv, extract\n" + PREPARE.format(more=""), family="mle")
    with opened(data, "mle") as benchmark:
        benchmark.competition("plant-7").prepare()


def test_files_that_are_not_as_the_checksums_say_are_named(tmp_path: Path) -> None:
    data = write(tmp_path)
    sums = tmp_path / "benchmarks/engineeringbench/competitions/plant-7/checksums.yaml"
    sums.write_text("public: {images: {a.png: x}, sample_submission.csv: x}\nprivate: {}\nzip: x\n")
    with opened(data) as benchmark:
        assert drift(benchmark.competition("plant-7")) == ["public/images/a.png", "public/sample_submission.csv"]
        md5 = hashlib.md5((data / "competitions/plant-7/prepared/public/sample_submission.csv").read_bytes())
        sums.write_text(f"public:\n  sample_submission.csv: {md5.hexdigest()}\n")
        assert drift(benchmark.competition("plant-7")) == []


@pytest.mark.parametrize("key", ["expected_answer", "expected_profit", "answer", "Answers", "solution", "ground_truth"])
def test_a_problem_says_its_answer_under_many_names(tmp_path: Path, key: str) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "problem.json").write_text(json.dumps({"Question": "?", key: 3, "answer_type": "number"}))
    leaks.strip(tmp_path / "public", tmp_path / "nothing.csv")
    assert set(json.loads((tmp_path / "public" / "problem.json").read_text())) == {"Question", "answer_type"}


@pytest.mark.parametrize(
    "text", ['[{"question": "?", "answer": 3}]', '{"question":   "?"}', "not JSON", '{"answer_type": 1}'], ids=str
)
def test_labelled_data_and_problems_without_an_answer_stay_as_they_are(tmp_path: Path, text: str) -> None:
    (tmp_path / "public").mkdir()
    file = tmp_path / "public" / "train.json"
    file.write_text(text)
    leaks.strip(tmp_path / "public", tmp_path / "nothing.csv")
    assert file.read_text() == text


def test_answers_that_tell_nothing_are_no_leak(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "answers.csv").write_text("id,y\n1,\n2,\n")
    (tmp_path / "public" / "sample.csv").write_text("id,label\n1,\n2,\n")
    leaks.strip(tmp_path / "public", tmp_path / "answers.csv")
