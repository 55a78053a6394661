"""Rows as they are written, read again from their raw files. Processes that import this module start fast."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from numpy.typing import NDArray

from gradeflow.mixing import scan
from gradeflow.mixing.scan import SPLITS, Raw

Why = Literal["duplicate", "contaminated", "near duplicate"]


@dataclass(frozen=True, slots=True)
class Gone:
    """Rows that go, each because of another, with the words that they share or how similar they are."""

    entries: NDArray[Any]
    because: NDArray[Any]
    why: Sequence[Why]
    shared: Sequence[str | float]


def mixed(entries: NDArray[Any], raws: Sequence[Raw]) -> str:
    return _lines(example.to_row() for example in scan.read(raws, entries))


def removed(gone: Gone, raws: Sequence[Raw]) -> str:
    rows, others = scan.read(raws, gone.entries), scan.read(raws, gone.because)
    splits = [SPLITS[number] for number in gone.entries["split"].tolist()]
    return _lines(
        {"id": row.id, "source": row.source, "split": split, "why": why, "because": other.id, "shared": shared}
        for row, split, why, other, shared in zip(rows, splits, gone.why, others, gone.shared, strict=True)
    )


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE).decode() for row in rows)
