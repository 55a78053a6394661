"""Mathematical modeling: word problems and differential equations whose answer is one number."""

from pathlib import Path

from gradeflow.benchmarks import Competition
from gradeflow.benchmarks.folders import Layout
from gradeflow.errors import SettingsError

FOLDERS = Layout("mathmodelingbench")


def tasks() -> tuple[str, ...]:
    return ()


def competition(task_id: str, _data_dir: Path) -> Competition:
    raise SettingsError(f"solve.task is {task_id!r}; mathmodeling has no tasks of its own")
