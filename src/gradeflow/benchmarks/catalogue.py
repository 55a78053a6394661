"""A benchmark's tasks, wherever they come from: made by the family itself, or read from folders."""

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, cast, get_args

from gradeflow import benchmarks, params
from gradeflow.benchmarks import Competition, quarantine
from gradeflow.benchmarks.folders import Folders, Layout, Mode, listed
from gradeflow.benchmarks.third_party import ThirdParty
from gradeflow.errors import SettingsError

MODES: tuple[str, ...] = get_args(Mode)


class Benchmark:
    """The tasks of one family; used in `with`, which ends the graders' processes.

    Without a data folder there are the built-in tasks alone; with one, its own come before them.
    """

    def __init__(self, settings: params.Solve, sandbox: params.Sandbox, limits: params.Grade, *, mode: str = "test"):
        self.name = benchmarks.canonical(settings.benchmark)
        self._family = benchmarks.load(settings.benchmark)
        self._settings = settings
        self._mode = cast("Mode", mode)
        self._third_party = ThirdParty(sandbox, limits)
        self._folders: Folders | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opening:
            self._made = Path(opening.enter_context(tempfile.TemporaryDirectory(prefix="gradeflow-")))
            if self._settings.data_dir:
                third_party = opening.enter_context(self._third_party)
                layout: Layout = self._family.FOLDERS
                named = Path(self._settings.tasks_dir).expanduser() if self._settings.tasks_dir else None
                data = Path(self._settings.data_dir).expanduser()
                self._folders = Folders(layout, data, third_party, tasks_dir=named, mode=self._mode)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def tasks(self) -> tuple[str, ...]:
        """All there are: of the data folder where one is named, else the built-in ones."""
        return self._folders.ids if self._folders else self._family.tasks()

    def chosen(self, ids: str, dataset_file: Path | None) -> tuple[str, ...]:
        """The tasks named by commas, else those that a file lists, else all that have data.

        Raises:
            SettingsError: one that is named is in quarantine; of the others such are left out.
        """
        if ids:
            named = tuple(word for word in (part.strip() for part in ids.split(",")) if word)
            quarantine.refuse(self._settings.quarantine, self.name, named)
            return named
        if dataset_file:
            return self.usable(listed(dataset_file, self.name))
        return self.usable(self._folders.with_data() if self._folders else self.tasks())

    def usable(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Those that are not in quarantine."""
        closed = quarantine.read(self._settings.quarantine, self.name)
        return tuple(task_id for task_id in ids if task_id not in closed)

    def competition(self, task_id: str) -> Competition:
        """One task.

        Raises:
            SettingsError: there is none of that name.
            DataError: its files are not as expected.
        """
        if self._folders and task_id in self._folders.ids:
            return self._folders.competition(task_id)
        if task_id in self._family.tasks():
            return self._family.competition(task_id, self._made)
        known = self.tasks()
        few = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        raise SettingsError(f"solve.task is {task_id!r}; {self.name} has {few}")
