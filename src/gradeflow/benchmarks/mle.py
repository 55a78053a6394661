"""Machine learning competitions, with leaderboards of people, as MLE-bench collected them."""

from pathlib import Path

from gradeflow.benchmarks import Competition
from gradeflow.benchmarks.folders import Layout
from gradeflow.errors import SettingsError

FOLDERS = Layout("mlebench", imports=("sklearn.metrics",), float_precision="round_trip")


def tasks() -> tuple[str, ...]:
    return ()


def competition(task_id: str, _data_dir: Path) -> Competition:
    raise SettingsError(f"solve.task is {task_id!r}; mle has no tasks of its own")
