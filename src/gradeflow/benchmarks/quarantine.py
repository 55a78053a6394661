"""Tasks that nobody is to be given: one JSON line each, with why.

`gradeflow audit tasks` writes the file, solving and training skip what it names. Deleting a line lets a task back in,
until the next audit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradeflow import jsonl
from gradeflow.benchmarks import canonical
from gradeflow.errors import DataError, SettingsError


def read(file: str, benchmark: str) -> dict[str, list[str]]:
    """A family's tasks in quarantine, each with the reasons; a file that has no name, or is not there, names none.

    Raises:
        DataError: a line is not as expected.
    """
    rows = _rows(Path(file)) if file else []
    return {row["task"]: row["reasons"] for row in rows if row["benchmark"] == canonical(benchmark)}


def update(file: str, benchmark: str, audited: Collection[str], bad: Mapping[str, Sequence[str]]) -> None:
    """Say anew of each audited task whether it is in quarantine; what the file says of others stays."""
    if not file:
        return
    path, name = Path(file), canonical(benchmark)
    kept = [row for row in _rows(path) if row["benchmark"] != name or row["task"] not in audited]
    found = [{"benchmark": name, "task": task, "reasons": list(reasons)} for task, reasons in bad.items()]
    if found or path.exists():
        jsonl.write(path, sorted([*kept, *found], key=lambda row: (row["benchmark"], row["task"])))


def refuse(file: str, benchmark: str, tasks: Iterable[str]) -> None:
    """Raises SettingsError for a task in quarantine."""
    closed = read(file, benchmark)
    for task in tasks:
        if task in closed:
            raise SettingsError(
                f"solve.task is {task!r}, which is in quarantine: {'; '.join(closed[task])}. Choose another, or "
                f"delete its line in {file} to use it all the same"
            )


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = list(jsonl.read(path)) if path.is_file() else []
    for number, row in enumerate(rows, start=1):
        texts = [row.get("benchmark"), row.get("task"), *(row.get("reasons") or [None])]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{path}, line {number}: expected benchmark, task and reasons, found {str(row)[:100]}")
    return rows
