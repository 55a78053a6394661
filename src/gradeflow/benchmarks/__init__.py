"""One file per benchmark family. A family module has

- `FOLDERS`: how folders of competitions that others made for it are laid out;
- `tasks() -> tuple[str, ...]`: the competitions that it makes itself, by id;
- `competition(task_id, data_dir) -> Competition`: one of them; its public files come to lie below `data_dir`.

Adding a family is one module here.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from gradeflow.errors import SettingsError

if TYPE_CHECKING:
    from gradeflow.benchmarks.folders import Layout

FAMILIES = ("engineering", "mathmodeling", "mle", "science")
SPELLINGS = {f"{family}bench": family for family in ("engineering", "mathmodeling", "mle", "science")}

TaskType = Literal["kaggle", "qa", "code", "science"]
Prepare = Callable[[Path, Path, Path], None]


class InvalidSubmissionError(Exception):
    """The submission cannot be graded, and that is the submission's doing."""


@dataclass(frozen=True, slots=True)
class TaskDefinition:
    """What an agent is asked.

    The payload of a kaggle task has `description`, `public_data_dir` and `output_submission_path`.
    """

    task_id: str
    task_type: TaskType
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grader:
    """`grade_fn` takes the submission and the answers, None where it knows them itself.

    Both are tables, or with `reads_files` the paths of files of any kind.
    """

    name: str
    grade_fn: Callable[[Any, Any], float]
    is_lower_better: bool = False
    reads_files: bool = False


@dataclass(frozen=True, slots=True)
class Competition:
    """A task with its grader. `prepare_fn(raw, public, private)` makes its files; a leaderboard is scores.

    Where a leaderboard holds baselines and nobody's work, `ranked` is false: there are no medals, nor is a score above
    the median.
    """

    id: str
    name: str
    description: str
    grader: Grader
    answers: Path | None
    gold_submission: Path | None
    sample_submission: Path
    competition_type: str
    prepare_fn: Prepare
    raw_dir: Path
    private_dir: Path
    public_dir: Path
    leaderboard: tuple[float, ...]
    checksums: dict[str, Any] = field(default_factory=dict)
    ranked: bool = True

    def prepare(self) -> None:
        """Make the public and private files unless they are there."""
        if not self.public_dir.is_dir():
            self.prepare_fn(self.raw_dir, self.public_dir, self.private_dir)


class Family(Protocol):
    FOLDERS: "Layout"

    def tasks(self) -> tuple[str, ...]: ...
    def competition(self, task_id: str, data_dir: Path) -> Competition: ...


def seeds(name: str, count: int = 20) -> dict[str, int]:
    """The seeds of a family's built-in tasks by their ids: NAME, NAME-1 and so on."""
    return {f"{name}-{seed}" if seed else name: seed for seed in range(count)}


def seed_of(task_id: str, known: Mapping[str, int], benchmark: str) -> int:
    if task_id not in known:
        raise SettingsError(f"solve.task is {task_id!r}; {benchmark} has {', '.join(known)}")
    return known[task_id]


def canonical(name: str) -> str:
    """A family's one name, whichever of its spellings was used."""
    return SPELLINGS.get(name, name)


def load(name: str) -> Family:
    here = {module.name for module in pkgutil.iter_modules(__path__)}
    known = [family for family in FAMILIES if family in here]
    if canonical(name) not in known:
        raise SettingsError(f"solve.benchmark is {name!r}; expected one of {', '.join(known)}")
    return cast("Family", importlib.import_module(f"{__name__}.{canonical(name)}"))
