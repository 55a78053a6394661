"""The mixed datasets as DVC knows them: dvc.lock says where a split lies and what it must hold."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradeflow import jsonl, lineage
from gradeflow.errors import DataError
from gradeflow.types import Example, Split

NAMES: Mapping[Split, str] = {
    "train": "train_mixed.jsonl",
    "validation": "val_mixed.jsonl",
    "test": "test_mixed.jsonl",
}


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split: its examples, where they came from, and DVC's MD5 of that file."""

    split: Split
    path: Path
    md5: str
    examples: tuple[Example, ...]


def read(split: Split, root: Path = Path()) -> Dataset:
    """The mixed split that `dvc repro` has made.

    Raises:
        DataError: it is not there, or its bytes are not those that dvc.lock records.
    """
    outputs = lineage.dvc_lock_digests(root)
    path = next((Path(name) for name in outputs if Path(name).name == NAMES[split]), None)
    if path is None or not (root / path).is_file():
        raise DataError(f"{path or NAMES[split]}: not made yet; run: dvc repro")
    content = (root / path).read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != outputs[str(path)]:
        raise DataError(f"{path}: MD5 is {found}, dvc.lock says {outputs[str(path)]}; run: dvc repro")
    return Dataset(split, path, found, tuple(Example.from_row(row) for row in jsonl.read(root / path)))
