"""Tasks in folders of others: found, read as they are, and refused with the file named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gradeflow.benchmarks.folders import listed
from gradeflow.errors import DataError, SettingsError
from support.competitions import PACKAGES, opened, write


@pytest.mark.parametrize("family", sorted(PACKAGES))
def test_a_task_of_each_family_is_read_from_its_folder(tmp_path: Path, family: str) -> None:
    data = write(tmp_path, family)
    with opened(data, family) as benchmark:
        assert benchmark.tasks() == ("plant-7",)
        read = benchmark.competition("plant-7")
    own = data / "competitions" / "plant-7"
    assert (read.id, read.name, read.competition_type) == ("plant-7", "The task plant-7", "modeling")
    assert read.description == "What is the lowest cost of plant-7?\n"
    assert (read.raw_dir, read.public_dir) == (own / "raw", own / "prepared" / "public")
    assert read.answers == read.gold_submission == own / "prepared" / "private" / "answer.csv"
    assert read.sample_submission == own / "prepared" / "public" / "sample_submission.csv"
    assert (read.leaderboard, read.checksums, read.grader.name) == ((1.0, 0.0), {"zip": ""}, "within")


@pytest.mark.parametrize("spelling", ["engineeringbench", "engineering"])
def test_both_spellings_of_a_family_and_both_forms_of_its_data_folder_are_the_same(
    tmp_path: Path, spelling: str
) -> None:
    data = write(tmp_path)
    for form in (data, data / "competitions"):
        with opened(form, spelling) as benchmark:
            assert benchmark.tasks() == ("plant-7",)


def test_tasks_may_lie_with_their_data(tmp_path: Path) -> None:
    data = write(tmp_path)
    for file in (tmp_path / "benchmarks/engineeringbench/competitions/plant-7").iterdir():
        file.rename(data / "competitions" / "plant-7" / file.name)
    with opened(data) as benchmark:
        assert benchmark.competition("plant-7").leaderboard == (1.0, 0.0)


def test_a_copy_of_one_task_s_files_beside_the_data_does_not_hide_the_others(tmp_path: Path) -> None:
    write(tmp_path, task="plant-8")
    data = write(tmp_path)
    tasks = tmp_path / "benchmarks/engineeringbench/competitions"
    shutil.copy(tasks / "plant-7" / "config.yaml", data / "competitions" / "plant-7")
    with opened(data) as benchmark:
        assert benchmark.tasks() == ("plant-7", "plant-8")


def test_tasks_may_lie_anywhere_that_is_named(tmp_path: Path) -> None:
    data = write(tmp_path)
    moved = (tmp_path / "benchmarks").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"no tasks belong to it.*solve\.tasks_dir"), opened(data):
        pass
    benchmark = opened(data)
    benchmark._settings = benchmark._settings.model_copy(update={"tasks_dir": str(moved / "engineeringbench")})
    with benchmark:
        assert benchmark.tasks() == ("plant-7",)


def test_without_a_data_folder_there_are_the_built_in_tasks() -> None:
    with opened(None) as benchmark:
        assert benchmark.tasks()[0].startswith("builtin-")


def test_built_in_tasks_can_be_had_beside_those_of_a_folder(tmp_path: Path) -> None:
    with opened(write(tmp_path)) as benchmark:
        assert benchmark.competition("builtin-blending").answers is None


@pytest.mark.parametrize("task", ["../plant-7", "plant-7/../plant-7", "", ".", "no-such"])
def test_a_task_is_one_of_those_there_are(tmp_path: Path, task: str) -> None:
    with opened(write(tmp_path)) as benchmark, pytest.raises(SettingsError, match="engineering has plant-7"):
        benchmark.competition(task)


@pytest.mark.parametrize(
    ("mode", "module", "public", "private"),
    [
        ("test", "prepare", "public", "private"),
        ("prepare", "prepare_val", "public", "private"),
        ("validation", "prepare_val", "public_val", "private_val"),
    ],
)
def test_a_mode_says_which_files_are_meant_and_what_makes_them(
    tmp_path: Path, mode: str, module: str, public: str, private: str
) -> None:
    with opened(write(tmp_path), mode=mode) as benchmark:
        read = benchmark.competition("plant-7")
    assert (read.public_dir.name, read.private_dir.name) == (public, private)
    assert read.answers is not None
    assert (read.answers.parent.name, read.sample_submission.parent.name) == (private, public)
    assert read.prepare_fn.args[0].function.endswith(f".{module}:prepare")


def test_a_gold_submission_may_differ_from_the_answers(tmp_path: Path) -> None:
    data = write(
        tmp_path,
        config="dataset: {answers: plant-7/prepared/private/answer.csv, "
        "gold_submission: plant-7/prepared/private/gold.csv, sample_submission: plant-7/prepared/public/s.csv}",
    )
    with opened(data) as benchmark:
        read = benchmark.competition("plant-7")
    assert read.gold_submission == data / "competitions/plant-7/prepared/private/gold.csv"


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("scoreNullable,teamId,hasTeamName,submissionDate,score,hasScore", ["0.9,1,True,2024,0.9,True", "x,2,,,0.5,"]),
        ("submission_id,score,username,date", ["a,0.9,b,2024", "c,0.5,d,2024"]),
        ("team_name,score,submission_date", ["a,0.9,2024", "b,0.5,2024"]),
        ("\ufeffscore", ["0.9", "0.5"]),
    ],
)
def test_leaderboards_have_many_headers_and_one_score(tmp_path: Path, header: str, rows: list[str]) -> None:
    with opened(write(tmp_path, leaderboard="\n".join([header, *rows]))) as benchmark:
        read = benchmark.competition("plant-7")
    assert (read.leaderboard, read.grader.is_lower_better) == ((0.9, 0.5), False)


@pytest.mark.parametrize(
    ("scores", "stated", "lower"),
    [
        ((0.9, 0.5, 0.5), "", False),
        ((0.5, 0.5, 0.9), "", True),
        ((0.5,), "", False),
        ((0.5, 0.5), "", False),
        ((0.9, 0.5), "true", True),
        ((0.5, 0.9, 0.7), "false", False),
        ((0.5, 0.9, 0.7), "true", True),
    ],
)
def test_whether_lower_is_better_is_stated_or_told_by_a_sorted_leaderboard(
    tmp_path: Path, scores: tuple[float, ...], stated: str, lower: bool
) -> None:
    board = "\n".join(["score", *map(str, scores)])
    function = "benchmarks.engineeringbench.competitions.plant-7.grade:grade"
    extra = f", is_lower_better: {stated}" if stated else ""
    config = f"grader: {{name: rmse, grade_fn: '{function}'{extra}}}"
    with opened(write(tmp_path, leaderboard=board, config=config)) as benchmark:
        assert benchmark.competition("plant-7").grader.is_lower_better is lower


def test_a_leaderboard_in_no_order_does_not_decide_which_scores_are_good(tmp_path: Path) -> None:
    with (
        opened(write(tmp_path, leaderboard="score\n0.5\n0.9\n0.7\n")) as benchmark,
        pytest.raises(DataError, match=r"leaderboard\.csv: sorted neither up nor down.*grader\.is_lower_better"),
    ):
        benchmark.competition("plant-7")


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda task: (task / name).write_text(text) and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda task: (task / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_remove("description.md"), r"description\.md: the description cannot be read"),
        (_remove("leaderboard.csv"), r"leaderboard\.csv: the leaderboard cannot be read"),
        (_write("leaderboard.csv", "version https://git-lfs.github.com/spec/v1\noid x"), "git lfs pull"),
        (_write("leaderboard.csv", "points\n1\n"), "expected a column `score`"),
        (_write("leaderboard.csv", "score\nfirst\n"), "expected a column `score`"),
        (_write("leaderboard.csv", "competition_id,score\n"), "at least one team"),
        (_write("leaderboard.csv", "score\nnan\n"), "expected a score for each team"),
        (_write("config.yaml", "dataset: [1"), r"config\.yaml: cannot be read as YAML"),
        (_write("config.yaml", "- 1"), r"config\.yaml: expected a mapping, found list"),
        (_write("config.yaml", ""), r"config\.yaml: dataset: expected a mapping, found nothing"),
        (_write("config.yaml", "{dataset: {}, grader: {}, preparer: 3}"), "preparer: expected text, found 3"),
        (
            _write(
                "config.yaml",
                "{dataset: {answers: ../../../secret.csv, sample_submission: s.csv}, grader: {}, preparer: 'p:p'}",
            ),
            r"dataset\.answers is '\.\./\.\./\.\./secret\.csv', which leads out of",
        ),
    ],
)
def test_a_file_that_is_missing_or_wrong_is_named(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    data = write(tmp_path)
    spoil(tmp_path / "benchmarks/engineeringbench/competitions/plant-7")
    with opened(data) as benchmark, pytest.raises(DataError, match=message):
        benchmark.competition("plant-7")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "competitions: [other]\nengineering_competitions: [plant-7, plant-8]\n"),
        ("list.yml", "competitions: [plant-7, plant-8]\n"),
        ("tasks.txt", "plant-7\n# a note\n\nplant-8\nplant-7\n"),
        ("tasks.jsonl", '{"competition_id": "plant-7"}\n// a note\n{"competition_id": "plant-8", "x": 1}\n'),
    ],
)
def test_a_list_of_tasks_has_many_forms(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert listed(tmp_path / name, "engineering") == ("plant-7", "plant-8")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "mathmodeling_competitions: [a]\n", "lists no tasks; expected engineering_competitions"),
        ("config.yaml", "competitions: [1]\n", "lists no tasks"),
        ("empty.txt", "\n", "lists no tasks"),
        ("bad.jsonl", "{nothing\n", "not JSON Lines"),
        ("other.jsonl", '{"task": "a"}\n', "lists no tasks"),
    ],
)
def test_a_list_without_tasks_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        listed(tmp_path / name, "engineering")


def test_tasks_are_those_named_else_those_listed_else_all_that_have_data(tmp_path: Path) -> None:
    write(tmp_path, task="plant-7")
    write(tmp_path, task="plant-9")
    shutil.rmtree(tmp_path / "data" / "competitions" / "plant-9")
    data = write(tmp_path, task="plant-8")
    (tmp_path / "tasks.txt").write_text("plant-8\n")
    with opened(data) as benchmark:
        assert benchmark.chosen("plant-8, plant-7", tmp_path / "tasks.txt") == ("plant-8", "plant-7")
        assert benchmark.chosen("", tmp_path / "tasks.txt") == ("plant-8",)
        assert benchmark.chosen("", None) == ("plant-7", "plant-8")
        assert benchmark.tasks() == ("plant-7", "plant-8", "plant-9")
