"""A project that was moved or copied: MLflow keeps full paths, which then lead to where it was.

Only the store that lies in the project is looked at, and only paths of files that came along.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),
)
FILES = "mlruns"


def follow(database: Path, root: Path) -> list[Path]:
    """Let the paths of a project's own SQLite store lead to the folder it lies in; returns where they led before."""
    if database.resolve().parent != root.resolve():
        return []
    root = root.resolve()
    with closing(sqlite3.connect(database, timeout=30)) as store, store:
        here = {name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "experiments" not in here:
            return []
        led = [_path(at) for (at,) in store.execute("SELECT artifact_location FROM experiments") if at]
        strange = [path for path in led if path.parent.name == FILES and path.parent.parent not in {root, Path()}]
        moved = {path.parent.parent for path in strange if (root / FILES / path.name).is_dir()}
        for path in strange:
            old, new = path, root / FILES / path.name
            if new.is_dir() or (old.parent.parent in moved and not old.parent.parent.exists()):
                for table, column in _PLACES:
                    if table in here:
                        _rewrite(store, table, column, old, new)
    return sorted(moved)


def _path(location: str) -> Path:
    return Path(url2pathname(urlparse(location).path) if location.startswith("file:") else location)


def _rewrite(store: sqlite3.Connection, table: str, column: str, old: Path, new: Path) -> None:
    for before, after in ((str(old), str(new)), (old.as_uri(), new.as_uri())):
        store.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608 - names from above
            f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
            (after, len(before) + 1, before, len(before) + 1, f"{before}/"),
        )
