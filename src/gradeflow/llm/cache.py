"""Replies kept on disk by the content of what was asked: shared by processes, and there after a crash."""

import json
import logging
import sqlite3
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from gradeflow.llm.client import Reply

logger = logging.getLogger(__name__)
PATIENCE_S = 5.0


class Cache:
    """A table of replies in `folder`. One that cannot be read or written is done without: it only saves time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "replies.sqlite"
        self._connection: sqlite3.Connection | None = None
        self._usable = True

    def get(self, key: str) -> Reply | None:
        with suppress(sqlite3.Error, OSError, ValueError, TypeError):
            found = self._table().execute("SELECT reply FROM replies WHERE key = ?", [key]).fetchone()
            return replace(Reply(**json.loads(found[0])), cached=True) if found else None
        return None

    def put(self, key: str, reply: Reply) -> None:
        if not self._usable:
            return
        try:
            with self._table() as table:
                table.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", [key, json.dumps(asdict(reply))])
        except (sqlite3.Error, OSError) as error:
            self._usable = False
            logger.warning("%s: replies are not kept any more: %s", self._path, error)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _table(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=PATIENCE_S)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        return self._connection
