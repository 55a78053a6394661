"""The mixed datasets as DVC knows them: dvc.lock says where a split lies and what it must hold."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow import digest, jsonl, lineage
from gradeflow.errors import DataError
from gradeflow.types import Example, Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES: Mapping[Split, str] = {
    "train": "train_mixed.jsonl",
    "validation": "val_mixed.jsonl",
    "test": "test_mixed.jsonl",
}
DESCRIPTION = ("README.md", "dataset_stats.json", "mixture.csv", "removed.jsonl")


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split: its examples, where they came from, and DVC's MD5 of that file."""

    split: Split
    path: Path
    md5: str
    examples: tuple[Example, ...]


def digest_of(example: Example) -> str:
    """What a sample names its question by: 16 hex of all that the row holds, answer and tests included."""
    return digest.of_json(example.to_row())[:16]


def described(data: Dataset) -> list[Path]:
    """What `mix` has written beside the rows: a card, statistics, and what was removed and why."""
    return [path for name in DESCRIPTION if (path := data.path.with_name(name)).is_file()]


def figure(splits: Sequence[Dataset]) -> "Figure":
    """The share of each source in each split, as bars."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 1 + 0.6 * len(splits)), layout="constrained")
    axes = drawn.subplots()
    counts = [Counter(example.source for example in data.examples) for data in splits]
    ends = [0.0] * len(splits)
    for source in sorted(set().union(*counts)):
        shares = [count[source] / max(1, count.total()) for count in counts]
        axes.barh([data.split for data in splits], shares, left=ends, label=source)
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axes.set_xlabel("share of rows")
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


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
