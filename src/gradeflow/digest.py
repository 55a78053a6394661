"""One way to name content: the SHA-256 of its bytes, of its canonical JSON, or of a folder's files."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_json(value: Any) -> str:
    """Digest of a JSON value, whatever the order of its keys."""
    return of_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())


def of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(folder: Path, names: Iterable[str]) -> str:
    """Digest of the named files of one folder, names included; their order does not matter."""
    return of_json({name: of_file(folder / name) for name in names})
