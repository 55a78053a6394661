"""Keeps answers out of public files when a task's data is prepared.

The preparers of DeepModeling copy the raw problem to the public folder, answer and all. What a problem says under a
name for the answer is taken out, which is how the public files were made that they published. A public file that is
the answers, or holds all of them, is refused. Subtler leaks are for an audit to find.
"""

import csv
import json
import re
from pathlib import Path

from gradeflow.errors import DataError

ANSWER_KEYS = re.compile(r"(expected|correct|gold|true)_.+|answers?|solutions?|ground_truth", re.IGNORECASE)


def strip(public: Path, answers: Path) -> None:
    """Take answers out of public problems.

    Raises:
        DataError: a public file is the answers, or has every row of them.
    """
    files = sorted(path for path in public.rglob("*") if path.is_file())
    for file in files:
        if file.suffix == ".json":
            _strip_problem(file)
    known = answers.read_bytes() if answers.is_file() else b""
    rows = set(_lines(known)[1:])
    for file in files:
        content = file.read_bytes()
        if known and content == known:
            raise DataError(f"{file.name}: a public file that is the same as the answers, {answers.name}")
        if rows and _tells(rows) and rows <= set(_lines(content)):
            raise DataError(f"{file.name}: a public file with every row of the answers, {answers.name}")


def _strip_problem(file: Path) -> None:
    """A problem is one object; lists of objects are data, and their labels are for learning from."""
    try:
        problem = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return
    if not isinstance(problem, dict):
        return
    kept = {key: value for key, value in problem.items() if not ANSWER_KEYS.fullmatch(key)}
    if kept != problem:
        file.write_text(json.dumps(kept, ensure_ascii=False, indent=2), encoding="utf-8")


def _lines(content: bytes) -> list[bytes]:
    return [line.strip() for line in content.splitlines() if line.strip()]


def _tells(rows: set[bytes]) -> bool:
    """Whether rows hold anything but a row's number: blank answers tell nothing."""
    return any(
        any(cell.strip() for cell in row[1:]) for row in csv.reader(row.decode(errors="replace") for row in rows)
    )
