"""Tasks in folders: those of DeepModeling and of MLE-bench, read as they are.

What says how a task is graded and what came of preparing its data may lie apart, as they do in the originals:

    <tasks>/ID/           config.yaml grade.py prepare.py description.md leaderboard.csv checksums.yaml
    <data>/ID/            raw/ prepared/public/ prepared/private/

`<data>` is the folder that is named, or `competitions` in it. `<tasks>` is `benchmarks/PACKAGE/competitions` or
`PACKAGE/competitions` in a folder above it; else the same one, where it holds config.yaml files; else an installed
package's.
"""

import csv
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gradeflow.benchmarks import Competition, Grader
from gradeflow.benchmarks.third_party import Code, ThirdParty
from gradeflow.errors import DataError

Mode = Literal["test", "validation", "prepare"]
LFS = "version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Layout:
    """What differs between the families' folders.

    `package` is where a family's tasks lie; `imports` and `exact` are what its graders expect (Code); `ranked` says
    whether its leaderboards are people's (Competition).
    """

    package: str
    imports: tuple[str, ...] = ()
    exact: bool = False
    ranked: bool = True


class Folders:
    """The tasks of one family below a data folder.

    Raises:
        DataError: no folder of tasks belongs to it.
    """

    def __init__(
        self, layout: Layout, data_dir: Path, third_party: ThirdParty, *, tasks_dir: Path | None = None, mode: Mode
    ) -> None:
        inner = data_dir / "competitions"
        self.data = (inner if inner.is_dir() else data_dir).resolve()
        self.tasks = _tasks_dir(layout.package, self.data, tasks_dir)
        self._layout = layout
        self._third_party = third_party
        self._mode = mode
        self.ids = tuple(sorted(path.parent.name for path in self.tasks.glob("*/config.yaml")))

    def with_data(self) -> tuple[str, ...]:
        """The tasks that are prepared, or can be."""
        return tuple(one for one in self.ids if any((self.data / one / part).is_dir() for part in ("prepared", "raw")))

    def competition(self, task_id: str) -> Competition:
        """One task.

        Raises:
            DataError: a file of it is missing or not as expected; which, and what was expected.
        """
        folder = self.tasks / task_id
        file = folder / "config.yaml"
        config = _mapping(file)
        dataset, grader = (_named(config, name, dict, file) for name in ("dataset", "grader"))
        public, private, swap = "public", "private", {}
        preparer = _named(config, "preparer", str, file)
        if self._mode != "test":
            preparer = preparer.replace("prepare:", "prepare_val:")
        if self._mode == "validation":
            public, private = "public_val", "private_val"
            swap = {"/public/": "/public_val/", "/private/": "/private_val/"}
        answers, sample = (self._data_file(dataset, name, swap, file) for name in ("answers", "sample_submission"))
        gold = self._data_file(dataset, "gold_submission", swap, file) if "gold_submission" in dataset else answers
        board = _leaderboard(folder / "leaderboard.csv")
        grade = partial(self._third_party.grade, self._code(folder, _named(grader, "grade_fn", str, file)), gold=gold)
        prepared = self.data / task_id / "prepared"
        return Competition(
            id=task_id,
            name=str(config.get("name", task_id)),
            description=_description(folder, _named(config, "description", str, file)),
            grader=Grader(
                name=str(grader.get("name", "grade")),
                grade_fn=grade,
                is_lower_better=_lower_is_better(grader, board, folder / "leaderboard.csv"),
                reads_files=True,
            ),
            answers=answers,
            gold_submission=gold,
            sample_submission=sample,
            competition_type=config.get("competition_type", "simple"),
            prepare_fn=partial(self._third_party.prepare, self._code(folder, preparer), answers=answers),
            raw_dir=self.data / task_id / "raw",
            private_dir=prepared / private,
            public_dir=prepared / public,
            leaderboard=board,
            checksums=_mapping(folder / "checksums.yaml") if (folder / "checksums.yaml").is_file() else {},
            ranked=self._layout.ranked,
        )

    def _code(self, folder: Path, function: str) -> Code:
        package = self.tasks.parent if self.tasks.name == "competitions" else self.tasks
        return Code(folder.name, function, folder, package, self._layout.imports, self._layout.exact)

    def _data_file(self, dataset: Mapping[str, Any], name: str, swap: Mapping[str, str], file: Path) -> Path:
        relative: str = _named(dataset, name, str, file)
        for before, after in swap.items():
            relative = relative.replace(before, after)
        path = (self.data / relative).resolve()
        if not path.is_relative_to(self.data):
            raise DataError(f"{file}: dataset.{name} is {relative!r}, which leads out of {self.data}")
        return path


def listed(path: Path, family: str) -> tuple[str, ...]:
    """The ids that a file lists: a configuration with FAMILY_competitions or competitions, JSON Lines, or lines.

    Raises:
        DataError: it cannot be read, or lists none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    ids = list(_listed(path, text, family))
    if not ids or not all(isinstance(one, str) for one in ids):
        raise DataError(
            f"{path}: lists no tasks; expected {family}_competitions or competitions with a list of ids, JSON Lines "
            "with competition_id, or an id on each line"
        )
    return tuple(dict.fromkeys(ids))


def drift(competition: Competition) -> list[str]:
    """The prepared files that are not as the competition's checksums say, or are missing."""
    changed = []
    for name, folder in (("public", competition.public_dir), ("private", competition.private_dir)):
        for path, md5 in _flat(competition.checksums.get(name) or {}):
            file = folder / path
            if not file.is_file() or hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() != md5:
                changed.append(f"{name}/{path}")
    return changed


def _flat(sums: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in sums.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def _listed(path: Path, text: str, family: str) -> Iterator[Any]:
    if path.suffix.lower() in {".yaml", ".yml"}:
        content = _mapping(path)
        yield from content.get(f"{family}_competitions") or content.get("competitions") or []
        return
    for line in text.splitlines():
        if not (word := line.strip()) or word.startswith(("#", "//")):
            continue
        yield _id_of_row(path, word) if word.startswith("{") else word


def _id_of_row(path: Path, line: str) -> Any:
    try:
        return json.loads(line).get("competition_id")
    except ValueError as error:
        raise DataError(f"{path}: not JSON Lines: {error}") from None


def _tasks_dir(package: str, data: Path, named: Path | None) -> Path:
    if named is not None:
        inner = named / "competitions"
        places = [inner, named]
    else:
        above = [data, *data.parents, Path.cwd()]
        places = [place / part / package / "competitions" for place in above for part in ("benchmarks", "")]
        places.append(data)  # where a copy of some task's files may lie too
        spec = importlib.util.find_spec(package)
        places += [Path(place) / "competitions" for place in (spec.submodule_search_locations or [] if spec else [])]
    for place in places:
        if next(place.glob("*/config.yaml"), None):
            return place.resolve()
    if named is not None:
        raise DataError(f"{named}: holds no tasks; expected folders with config.yaml")
    if not data.is_dir():
        raise DataError(f"{data}: no such folder")
    raise DataError(
        f"{data}: no tasks belong to it: no folder above it holds benchmarks/{package}/competitions or "
        f"{package}/competitions, and it holds no folders with config.yaml; name them with solve.tasks_dir"
    )


def _mapping(file: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(file.read_bytes())
    except (OSError, YAMLError) as error:
        raise DataError(f"{file}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise DataError(f"{file}: expected a mapping, found {type(content).__name__}")
    return content


def _named(content: Mapping[str, Any], name: str, kind: type, file: Path) -> Any:
    value = content.get(name)
    if not isinstance(value, kind):
        found = "nothing" if value is None else repr(value)
        raise DataError(f"{file}: {name}: expected {'text' if kind is str else 'a mapping'}, found {found}")
    return value


def _description(folder: Path, named: str) -> str:
    """Its path counts from the root of the original's repository; the task's own folder has the file."""
    file = folder / Path(named).name
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: the description cannot be read: {error}") from None


def _leaderboard(file: Path) -> tuple[float, ...]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: the leaderboard cannot be read: {error}") from None
    if text.startswith(LFS):
        raise DataError(f"{file}: a pointer of Git LFS, not the file itself; `git lfs pull` in its repository gets it")
    rows = list(csv.DictReader(text.splitlines()))
    try:
        scores = tuple(float(row["score"]) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: expected a column `score` of numbers: {error}") from None
    if not scores or not all(map(math.isfinite, scores)):
        raise DataError(f"{file}: expected a score for each team, and at least one team")
    return scores


def _lower_is_better(grader: Mapping[str, Any], board: tuple[float, ...], file: Path) -> bool:
    """As the grader says, else as the leaderboard is sorted, best first. Where all are equal, higher is better."""
    stated = grader.get("is_lower_better")
    if isinstance(stated, bool):
        return stated
    if list(board) == sorted(board, reverse=True):
        return False
    if list(board) == sorted(board):
        return True
    raise DataError(
        f"{file}: sorted neither up nor down, so it does not tell whether lower is better; "
        "say grader.is_lower_better in config.yaml"
    )
