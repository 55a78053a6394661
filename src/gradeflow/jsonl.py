"""JSON Lines: read with the line named when one is bad, written so that no half file is ever taken for a whole one."""

import contextlib
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from gradeflow import disk
from gradeflow.errors import DataError


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl or .jsonl.gz file.

    Raises:
        DataError: naming file and line, for a missing file, a truncated one, bad UTF-8 or what is no JSON object.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line, path, number)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(f"{path}, after line {number}: cannot be read: {said}") from None


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " (the file seems cut off)"
        raise DataError(f"{path}, line {number}: not JSON: {error.msg}{cut}") from None
    except RecursionError:
        raise DataError(f"{path}, line {number}: not JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
    return value


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows beside `path` and move them into place when the last is on disk; returns how many."""
    count = 0
    with whole(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(", ", ": ")) + "\n")
            count += 1
    return count


@contextlib.contextmanager
def whole(path: Path) -> Iterator[TextIO]:
    """A file to write that takes the place of `path` when all of it is on disk, or not at all.

    Raises:
        DataError: it cannot be written; what was there before is untouched.
    """
    with placed(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        yield file


@contextlib.contextmanager
def placed(path: Path) -> Iterator[Path]:
    """As `whole`, for whoever opens the file by its path and closes it again."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written, and is as it was: {disk.said(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what killed processes have left of their attempts."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        try:
            os.kill(int(part.name.split(".")[-2]), 0)
        except ProcessLookupError:
            part.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue
