"""Training that SIGKILL ends at any moment: the same command goes on, and leaves what one without a kill leaves."""

import functools
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from gradeflow import tracking
from support import killed, tiny
from support.chat_server import ChatServer

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's
KILLS = 5
SMALL = {
    "train__max_steps": 4,
    "train__eval_every": 2,
    "train__prompts_per_step": 2,
    "train__group_size": 4,
    "train__warmup_steps": 1,
    "train__max_completion_tokens": 64,
    "train__val_samples": 4,
    "train__trace_rollouts": 1,
    "models__base__model": "stand-in",
    "models__base__cache": ".gradeflow/replies",
}


@dataclass(frozen=True)
class Left:
    """What a finished training leaves: all but how long things took, and what was asked again after a kill."""

    digest: str
    points: dict[str, list[tuple[int, float | None]]]
    files: list[str]
    traces: Counter[tuple[str, str]]
    datasets: list[str]


def left_in(folder: Path) -> Left:
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = (one.experiment_id for one in client.search_experiments() if one.name == "gradeflow")
    runs = [run for run in client.search_runs([experiment]) if tracking.REUSED not in run.data.tags]
    assert [run.info.status for run in runs] == ["FINISHED"]
    (run,) = runs
    assert not any((folder / ".gradeflow" / "outbox").iterdir())
    traces = client.search_traces(locations=[experiment], max_results=500)
    return Left(
        run.data.tags["gradeflow.adapter.digest"],
        {name: points(client, run, name) for name in run.data.metrics},
        sorted(files(client, run.info.run_id)),
        Counter((trace.info.tags["step"], trace.info.request_preview) for trace in traces),
        sorted(used.dataset.name for used in run.inputs.dataset_inputs),
    )


def points(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float | None]]:
    found = client.get_metric_history(run.info.run_id, name)
    if asked := name.startswith("llm/"):  # sums over the whole run
        assert [point.value for point in found] == sorted(point.value for point in found)
    return [(point.step, None if asked or name.endswith("seconds") else point.value) for point in found]


def files(client: MlflowClient, run: str, folder: str = "") -> Iterator[str]:
    for found in client.list_artifacts(run, folder):
        if found.is_dir:
            yield from files(client, run, found.path)
        else:
            yield found.path


@dataclass(frozen=True)
class World:
    """Projects in which the same command trains; `whole` is what it leaves where nothing kills it."""

    empty: Path
    words: list[str]
    whole: Left
    seconds: float


def copied(empty: Path, name: str) -> Path:
    return Path(shutil.copytree(empty, empty.with_name(name)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without a run: its data."""
    folder = tmp_path_factory.mktemp("kill") / "empty"
    tiny.project(folder)
    tiny.settings(folder.parent, taught=True)
    return folder


@pytest.fixture(scope="module")
def world(project: Path) -> Iterator[Callable[[int], World]]:
    """Of a staleness; the uninterrupted run is made once."""
    with ChatServer(tiny.executor(project)) as server:

        @functools.cache
        def made(staleness: int) -> World:
            changes = tiny.changes(project.parent, **SMALL, train__staleness=staleness, models__base__url=server.url)
            words = ["train_grpo", "--params", str(tiny.ROOT / "params.yaml")]
            words += itertools.chain.from_iterable((f"--{name}", value) for name, value in changes.items())
            assert killed.run(project, ["--version"]) == 0  # what is imported once takes no part of the time
            whole = copied(project, f"whole-{staleness}")
            started = time.perf_counter()
            assert killed.run(whole, words) == 0, (whole / "said.txt").read_text()
            seconds = time.perf_counter() - started
            return World(project, words, left_in(whole), seconds)

        yield made


SLOW = [*((0, seed) for seed in range(1, 20)), *((2, seed) for seed in range(4))]


@pytest.mark.parametrize(
    ("staleness", "seed"), [(0, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_training_that_is_killed_at_any_moment_leaves_what_it_would_have_left(
    staleness: int, seed: int, world: Callable[[int], World]
) -> None:
    """Kills are uniform over the time that the whole run takes; a project that is done gives way to a fresh one."""
    given, chance, kills, numbers = world(staleness), random.Random(seed), 0, itertools.count()
    while kills < KILLS:
        folder = copied(given.empty, f"killed-{staleness}-{seed}-{next(numbers)}")
        status = killed.KILLED
        while status == killed.KILLED:
            moment = chance.uniform(0, given.seconds) if kills < KILLS else None
            status = killed.run(folder, given.words, moment)
            kills += status == killed.KILLED
            print(f"seed {seed}: status {status}" + (f", to be killed after {moment:.2f} s" if moment else ""))
        assert status == 0, (folder / "said.txt").read_text()
        assert left_in(folder) == given.whole
        shutil.rmtree(folder)
