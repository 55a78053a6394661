"""What a run has logged and the store does not have yet: a folder of numbered parts.

A part is `entries.jsonl`, one line for each thing logged, and beside it the files that lines name. The writer appends
to the newest part; whoever sends takes the oldest, and removes it when the store has all of it. What a killed process
had begun to send is sent again: entries have their times and ids in them, so that MLflow stores them once. A line
that the process was killed in is left out. Lines are with the system and not yet on the disk when a call returns:
`kill -9` loses none, a power cut the last seconds.
"""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow.errors import TrackingError

Entry = Mapping[str, Any]
ENTRIES = "entries.jsonl"
REFUSED = "refused.jsonl"
_LOCK = "lock"
_held: set[Path] = set()


class Busy(TrackingError):  # noqa: N818 - says what there is
    """Another process, or another run of this one, writes to the outbox or sends it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What nothing is added to any more."""

    folder: Path

    def entries(self) -> Iterator[Entry]:
        file = self.folder / ENTRIES
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if line.endswith(b"\n"):
                yield json.loads(line)

    def refuse(self, entry: Entry, why: str) -> None:
        """Keep what the store will never take for its user to look at."""
        with (self.folder.parent / REFUSED).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"why": why, **entry}) + "\n")

    def remove(self) -> None:
        done = self.folder.with_suffix(".sent")
        self.folder.rename(done)
        shutil.rmtree(done)


class Outbox:
    """One writer, and one who sends, which may be another thread; other processes are kept out."""

    def __init__(self, folder: Path, *, wait_s: float = 0.0) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._owner = _lock(folder, wait_s)
        for sent in folder.glob("*.sent"):
            shutil.rmtree(sent)
        self._number = max((int(part.name) for part in self._parts()), default=0)
        self._open: int | None = None
        self._files = 0

    def add(self, entry: Entry) -> None:
        """Append; where there is no room for the line, nothing is left of it."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            file = self._writable()
            end = os.lseek(file, 0, os.SEEK_END)
            try:
                written = os.write(file, line)
                while written < len(line):
                    written += os.write(file, line[written:])
            except OSError:
                os.ftruncate(file, end)
                raise

    def add_file(self, write: Callable[[Path], object], entry: Entry) -> None:
        """Append an entry with a folder of its own, its `file`, for `write` to put files into."""
        with self._lock:
            self._writable()
            self._files += 1
            own = self._part() / f"file-{self._files}"
            own.mkdir()
            write(own)
            self.add({**entry, "file": own.name})

    def take(self) -> Part | None:
        """The oldest part, to which nothing is appended any more; None where nothing waits."""
        with self._lock:
            parts = self._parts()
            if parts and parts[0] == self._part():
                self._seal()
        return Part(parts[0]) if parts else None

    def is_empty(self) -> bool:
        with self._lock:
            return not self._parts()

    def close(self) -> None:
        """Let others in; an outbox that holds nothing is removed."""
        with self._lock:
            self._seal()
            if not self._parts() and not (self.folder / REFUSED).exists():
                shutil.rmtree(self.folder, ignore_errors=True)  # another process may just be opening it
            os.close(self._owner)
            _held.discard(self.folder)

    def _parts(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.isdecimal())

    def _part(self) -> Path:
        return self.folder / f"{self._number:06d}"

    def _writable(self) -> int:
        if self._open is None:
            self._number += 1
            self._part().mkdir()
            self._open = os.open(self._part() / ENTRIES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._open

    def _seal(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None


def _lock(folder: Path, wait_s: float) -> int:
    """The descriptor that holds the outbox for this process.

    Raises:
        Busy: it is held, and not let go of in time.
    """
    until = time.monotonic() + wait_s
    while (file := _try_lock(folder)) is None:
        if time.monotonic() > until:
            raise Busy(f"run {folder.name}: something else is writing to it, or sending what it left in {folder}")
        time.sleep(0.05)
    return file


def _try_lock(folder: Path) -> int | None:
    if folder in _held:  # a second lock of the same process would be granted
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    with suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_ino == (folder / _LOCK).stat().st_ino:  # it may just have been removed
            _held.add(folder)
            return file
    os.close(file)
    return None
