"""What holds of every built-in task: it can be solved from its public files, and tells nothing that it must not."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradeflow import benchmarks, params, solve, tracking
from gradeflow.attempt import Attempt
from gradeflow.benchmarks import FAMILIES, Competition
from gradeflow.benchmarks.report import grade_csv
from gradeflow.errors import SettingsError
from support import attempts, solvers

SHIPPED = Path(__file__).parents[2] / "params.yaml"
EVERY = [(family, task) for family in FAMILIES for task in benchmarks.load(family).tasks()]
SOME = [(family, task) for family in FAMILIES for task in benchmarks.load(family).tasks()[:2]]


def made(family: str, task: str, folder: Path) -> Competition:
    competition = benchmarks.load(family).competition(task, folder)
    competition.prepare()
    return competition


def solved(competition: Competition, replies: list[str], tmp_path: Path) -> Attempt:
    given = {"solve.log_path": str(tmp_path / "results"), "solve.memory_mb": "1024", "solve.sandbox_timeout_s": "60"}
    chosen = params.load(SHIPPED, given | {"sandbox.cpu_s": "60", "solve.review": "false"})
    return attempts.attempted(chosen, competition, replies)


@pytest.mark.parametrize(("family", "task"), SOME)
def test_a_script_that_knows_the_method_solves_it_in_the_sandbox(family: str, task: str, tmp_path: Path) -> None:
    attempt = solved(made(family, task, tmp_path / "data"), solvers.replies(family), tmp_path)
    assert attempt.submission is not None
    assert attempt.submission.suffix == attempt.competition.sample_submission.suffix
    assert (attempt.report.valid_submission, attempt.report.any_medal) == (True, True)
    if family != "mle":
        assert (attempt.report.score, attempt.report.gold_medal) == (1.0, True)


@pytest.mark.parametrize(("family", "task"), EVERY)
def test_the_gold_submission_wins_gold_and_the_sample_nothing(family: str, task: str, tmp_path: Path) -> None:
    competition = made(family, task, tmp_path)
    assert competition.gold_submission is not None
    gold, sample = (
        grade_csv(path, competition) for path in (competition.gold_submission, competition.sample_submission)
    )
    assert gold.gold_medal
    assert sample.score is not None
    assert gold.score is not None
    assert sample.score < min(gold.score, sample.bronze_threshold)


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_of_a_family_differ_and_are_each_time_the_same(family: str, tmp_path: Path) -> None:
    tasks = benchmarks.load(family).tasks()
    assert len(set(tasks)) == len(tasks) == 20
    contents = [contents_of(made(family, task, tmp_path / "once")) for task in tasks[:4]]
    again = [contents_of(made(family, task, tmp_path / "again")) for task in tasks[:4]]
    assert contents == again
    assert all(one[name] != other[name] for one, other in pairs(contents) for name in one if "sample" not in name)


def contents_of(competition: Competition) -> dict[str, bytes]:
    folder = competition.public_dir.parent
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pairs(contents: list[dict[str, bytes]]) -> Iterator[tuple[dict[str, bytes], dict[str, bytes]]]:
    return ((one, other) for at, one in enumerate(contents) for other in contents[at + 1 :])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_private_is_in_a_folder_of_its_own(family: str, tmp_path: Path) -> None:
    competition = made(family, benchmarks.load(family).tasks()[0], tmp_path)
    private = [path for path in (competition.gold_submission, competition.answers) if path]
    assert all(path.parent == competition.private_dir and path.is_file() for path in private)
    assert not competition.private_dir.is_relative_to(competition.public_dir)
    assert not competition.public_dir.is_relative_to(competition.private_dir)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_that_is_not_there_is_named(family: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"solve\.task is 'builtin-x'; {family} has builtin-"):
        benchmarks.load(family).competition("builtin-x", tmp_path)


def test_a_submission_that_is_no_table_goes_all_the_way_to_the_tracked_grade(tmp_path: Path, store: Path) -> None:
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps(solvers.replies("science")))
    given = {
        "solve.benchmark": "sciencebench",
        "solve.log_path": str(tmp_path),
        "solve.sandbox_timeout_s": "60",
        "solve.review": "false",
    }
    solve.main(params.load(SHIPPED, given), task=["builtin-ringdown"], scripted=str(replies))
    run_id = tracking.find_stage("solve")
    assert run_id is not None
    assert tracking.read_metrics(run_id)["solve/score"] == 1.0
    (submission,) = tmp_path.glob("submission_builtin-ringdown_*.npy")
    kept = tracking.download_artifact(run_id, f"submission/{submission.name}", tmp_path / "kept")
    assert kept.read_bytes() == submission.read_bytes()
