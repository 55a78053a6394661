"""Checkpoints of a run, `checkpoint-N` after N updates: each is whole, or it is not there."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradeflow import digest

MANIFEST = "checkpoint.json"
PART = "part"


@contextmanager
def writing(folder: Path, number: int, state: Mapping[str, Any]) -> Iterator[Path]:
    """A folder where `checkpoint-NUMBER` is made; what is in it then moves to `folder` at once, with the `state`."""
    part = folder / PART
    shutil.rmtree(part, ignore_errors=True)
    made = part / f"checkpoint-{number}"
    made.mkdir(parents=True)
    yield part
    names = sorted(path.name for path in made.iterdir())
    content = {"state": state, "files": names, "digest": digest.of_files(made, names)}
    (made / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    for path in (*made.iterdir(), made):
        _to_disk(path)
    place = folder / made.name
    shutil.rmtree(place, ignore_errors=True)
    made.rename(place)
    _to_disk(folder)
    part.rmdir()


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; those that are not whole are removed."""
    for path in sorted(folder.glob("checkpoint-*"), key=number_of, reverse=True):
        if _is_whole(path):
            return path
        shutil.rmtree(path)
    return None


def keep(folder: Path, count: int) -> None:
    """Remove all but the newest."""
    for path in sorted(folder.glob("checkpoint-*"), key=number_of)[:-count]:
        shutil.rmtree(path)


def state_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["state"]
    return found


def number_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _is_whole(checkpoint: Path) -> bool:
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return bool(digest.of_files(checkpoint, content["files"]) == content["digest"])
    except (OSError, ValueError, KeyError):
        return False


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
