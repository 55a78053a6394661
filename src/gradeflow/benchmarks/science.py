"""Data-driven science: analyses whose results are tables, pictures or arrays."""

from pathlib import Path

from gradeflow.benchmarks import Competition
from gradeflow.benchmarks.folders import Layout
from gradeflow.errors import SettingsError

FOLDERS = Layout("sciencebench", imports=("sklearn.metrics",))


def tasks() -> tuple[str, ...]:
    return ()


def competition(task_id: str, _data_dir: Path) -> Competition:
    raise SettingsError(f"solve.task is {task_id!r}; science has no tasks of its own")
