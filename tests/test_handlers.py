"""What agents are given for tasks of each type."""

from pathlib import Path

import pytest

from gradeflow import data_report
from gradeflow.benchmarks import TaskDefinition
from gradeflow.handlers import CodeTaskHandler, KaggleTaskHandler, QATaskHandler, ScienceTaskHandler, handler_of


@pytest.fixture
def public(tmp_path: Path) -> Path:
    folder = tmp_path / "public"
    (folder / "images").mkdir(parents=True)
    (folder / "train.csv").write_text("id,size,name\n1,2.5,a\n2,,b\n")
    (folder / "sample_submission.csv").write_text("id,answer\n1,@cost[0.00]\n")
    (folder / "images" / "first.png").write_bytes(b"no image")
    return folder


def payload(public: Path, **more: object) -> dict[str, object]:
    return {"description": "Do it.", "public_data_dir": str(public), "output_submission_path": "out/s_1.csv", **more}


def test_a_kaggle_task_is_described_with_its_files(public: Path) -> None:
    description, told, data_dir, output = KaggleTaskHandler().prepare_input(
        TaskDefinition("t", "kaggle", payload(public))
    )
    assert (data_dir, output) == (public, Path("out/s_1.csv"))
    assert description.startswith("Do it.\n\n## Directory Structure (Current Working Directory)\n```text\n./\n")
    assert "  images/\n    first.png\n" in description
    assert "`train.csv`, 2 rows" in description
    assert "50.0%" in description
    assert "`id`, `answer`, in this order" in description
    assert told.startswith("--- CRITICAL I/O REQUIREMENTS ---")
    assert "always overwrite `./s_1.csv`" in told


@pytest.mark.parametrize(
    ("output", "metadata", "name", "note"),
    [
        ("s.csv", {"output_fname": "pred/model.pkl"}, "s.pkl", "to_pickle"),
        ("s.csv", {"output_fname": "plot.png"}, "s.csv", "image_base64"),
        ("s.csv", None, "s.csv", ""),
        ("s.npy", {}, "s.npy", "numpy.save"),
        ("s.json", {}, "s.json", "valid JSON"),
        ("s.txt", {}, "s.txt", "UTF-8"),
        ("s.png", {}, "s.png", "real image"),
    ],
)
def test_a_science_task_says_which_format(
    public: Path, output: str, metadata: dict[str, str] | None, name: str, note: str
) -> None:
    given = payload(public, output_submission_path=output, metadata=metadata)
    _, told, _, path = ScienceTaskHandler().prepare_input(TaskDefinition("t", "science", given))
    assert path.name == name
    assert f"`./{name}`" in told
    assert note in told


def test_an_answer_is_a_text(tmp_path: Path) -> None:
    with QATaskHandler() as handler:
        given = handler.prepare_input(TaskDefinition("t", "qa", {"question": "Why {not}?"}))
        assert (given.data_dir / "problem.txt").read_text() == "Why {not}?"
        assert given.output_path.name == "answer.txt"
        assert handler.parse_output(given.output_path).startswith("[ERROR]")
        given.output_path.write_text(" because \n")
        assert handler.parse_output(given.output_path) == "because"
        given.output_path.write_bytes(b"\xff")
        assert handler.parse_output(given.output_path).startswith("[ERROR]")
    assert not given.data_dir.exists()


def test_code_is_written_without_a_sight_of_its_tests() -> None:
    asked = {"prompt": "Double x.", "entry_point": "double", "test_cases": "assert double(2) == 4"}
    with CodeTaskHandler() as handler:
        given = handler.prepare_input(TaskDefinition("t", "code", asked))
        assert given.output_path.name == "solution.py"
        assert "`double`" in given.description
        shown = given.description + "".join(file.read_text() for file in given.data_dir.iterdir())
        assert "assert" not in shown


@pytest.mark.parametrize("kind", ["kaggle", "qa", "science", "code"])
def test_a_task_that_lacks_something_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"t: the payload of a {kind} task lacks"):
        handler_of(TaskDefinition("t", kind, {})).prepare_input(TaskDefinition("t", kind, {}))


def test_a_handler_takes_tasks_of_its_type(public: Path) -> None:
    with pytest.raises(ValueError, match="type science; expected kaggle"):
        KaggleTaskHandler().prepare_input(TaskDefinition("t", "science", payload(public)))


@pytest.mark.parametrize("kind", ["kaggle", "science"])
def test_a_folder_that_is_missing_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FileNotFoundError, match="gone: no such folder"):
        handler_of(TaskDefinition("t", kind, {})).prepare_input(TaskDefinition("t", kind, payload(tmp_path / "gone")))


def test_many_files_are_told_in_few_lines(tmp_path: Path) -> None:
    for folder in range(30):
        place = tmp_path / f"f{folder:02}"
        place.mkdir()
        for number in range(30):
            (place / f"{number:02}.txt").touch()
    said = data_report.tree(tmp_path)
    assert "... 10 more" in said
    assert said.count(".txt") == 100
    assert said.endswith("more than 100 files")


def test_a_deep_folder_is_named_and_not_entered(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefg")
    deep.mkdir(parents=True)
    assert data_report.tree(tmp_path).splitlines()[-1].strip() == "e/"


def test_of_a_long_table_the_first_rows_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("a\tb\n" + "1\tx\n" * 1001)
    assert "`test.tsv`, its first 1000 rows" in data_report.report(tmp_path)


def test_a_table_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"nothing of the kind")
    (tmp_path / "train.csv").touch()
    assert data_report.report(tmp_path).count("cannot be read as a table") == 2


def test_a_parquet_table_is_described(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"a": [1, 2], "b": ["x", None]}).to_parquet(tmp_path / "test.parquet")
    assert "`test.parquet`, 2 rows" in data_report.report(tmp_path)
