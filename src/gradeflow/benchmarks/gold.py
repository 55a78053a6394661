"""A task's gold submission as numbers: to see where else they stand, and to grade it with errors of known size."""

import copy
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from gradeflow.benchmarks import Competition

NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?"
TAGGED = re.compile(r"@(?P<tag>\w+)\[(?P<value>.*)\]", re.DOTALL)
FOUND = re.compile(rf"(?<![\w.]){NUMBER}(?![\w])")


@dataclass(frozen=True, slots=True)
class Gold:
    """`answer` is the text of a single answer, `values` its number or the numbers of an array.

    `rewritten` is the submission with a function applied to each number, or with the text of a single answer replaced.
    """

    answer: str | None
    values: tuple[Decimal, ...]
    rewritten: Callable[[Callable[[Decimal], Decimal] | str], bytes]


def path(competition: Competition) -> Path | None:
    """The submission that should score best; of a task that names none, the answers themselves."""
    return competition.gold_submission or competition.answers


def read(file: Path) -> Gold | None:
    """None for a submission that is neither a single answer nor numbers of an array or a JSON document."""
    reader = {".csv": _single, ".npy": _array, ".json": _json}.get(file.suffix)
    try:
        return reader(file) if reader else None
    except (ValueError, OSError, csv.Error):  # what it is then, its grader tells
        return None


def number(text: str) -> Decimal | None:
    return Decimal(text.strip().replace(",", "")) if re.fullmatch(NUMBER, text.strip()) else None


def plain(value: Decimal) -> str:
    """Without an exponent, which some graders do not read, and with as many decimals as our own do."""
    return f"{value:.15f}".rstrip("0").rstrip(".")


def _single(file: Path) -> Gold | None:
    """A table with one row of two cells: an id, and an answer that is a number or `@tag[...]`."""
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        rows = list(csv.reader(lines))[:3]
    if len(rows) != 2 or any(len(row) != 2 for row in rows):
        return None
    header, (identifier, cell) = rows
    tagged = TAGGED.fullmatch(cell.strip())
    answer = tagged["value"] if tagged else cell.strip()
    value = number(answer)
    if value is None and not tagged:
        return None

    def rewritten(change: Callable[[Decimal], Decimal] | str) -> bytes:
        if isinstance(change, str):
            text = change
        else:
            assert value is not None
            text = plain(change(value))
        buffer = io.StringIO()
        csv.writer(buffer).writerows([header, [identifier, f"@{tagged['tag']}[{text}]" if tagged else text]])
        return buffer.getvalue().encode()

    return Gold(answer, () if value is None else (value,), rewritten)


def _array(file: Path) -> Gold | None:
    import numpy as np

    array = np.load(file, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        return None

    def rewritten(change: Callable[[Decimal], Decimal] | str) -> bytes:
        assert not isinstance(change, str)
        changed = [float(change(Decimal(float(value)))) for value in array.ravel()]
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(changed).reshape(array.shape))
        return buffer.getvalue()

    return Gold(None, tuple(Decimal(float(value)) for value in array.ravel()), rewritten)


def _json(file: Path) -> Gold | None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    values = tuple(Decimal(str(value)) for _, value in leaves(tree) if _is_number(value))

    def rewritten(change: Callable[[Decimal], Decimal] | str) -> bytes:
        assert not isinstance(change, str)
        return json.dumps(_changed(copy.deepcopy(tree), change)).encode()

    return Gold(None, values, rewritten) if values else None


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a JSON document, each with the nearest key above it."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value, key)
    else:
        yield key, tree


def _changed(tree: Any, change: Callable[[Decimal], Decimal]) -> Any:
    if isinstance(tree, dict):
        return {name: _changed(value, change) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_changed(value, change) for value in tree]
    return float(change(Decimal(str(tree)))) if _is_number(tree) else tree


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
