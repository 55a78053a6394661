"""What the public files of a task tell of its answers: in a file beside them, in their names, in the order of rows.

Archives, pictures and files of more than LARGEST bytes are not looked into. A column that tells nearly all answers is
named whatever it was meant for: a task that one column solves teaches nothing either.
"""

import bisect
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow.benchmarks import Competition, gold

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 64 << 20
TABLES = {".csv": ",", ".tsv": "\t"}
TEXTS = {".json", ".jsonl", ".txt", ".md", ".html", ".xml", ".yaml", ".yml", ".py", ".ipynb", ".log"}
UNTELLING = re.compile(r"(?:id|index|number|difficulty|category|type|level)", re.IGNORECASE)
DIGITS = 4
"""A number with fewer significant digits may stand somewhere by chance."""
SURE = 0.99
"""Share of the answers, or correlation with them, from which something tells them."""
KNOWN_ROWS = 0.05
"""Share of the test rows that may be known by chance."""
LAGS = 5


def find(competition: Competition, known: gold.Gold | None) -> list[str]:
    """Each way in which the answers are public, in words."""
    files = sorted(path for path in competition.public_dir.rglob("*") if path.is_file())
    found = [
        f"the public file {file.name} is the answers"
        for file in files
        if competition.answers and competition.answers.is_file() and _same(file, competition.answers)
    ]
    if known is not None and known.answer is not None:
        return [*found, *_single(competition, known, files)]
    if known is not None:
        return [*found, *_numbers(known, files)]
    return [*found, *_rows(competition, files)]


def _same(file: Path, answers: Path) -> bool:
    same_size = file.stat().st_size == answers.stat().st_size > 0
    return same_size and file.read_bytes() == answers.read_bytes()


# A single answer


def _single(competition: Competition, known: gold.Gold, files: Sequence[Path]) -> Iterator[str]:
    value = known.values[0] if known.values else None
    told = {number for text in gold.FOUND.findall(competition.description) if (number := gold.number(text)) is not None}
    if re.search(rf"@\w+\[{re.escape(known.answer or '')}\]", competition.description):
        yield f"the description holds the answer {known.answer}"
    for file in files:
        if file.name == competition.sample_submission.name:
            continue
        text = _text(file)
        keys = {key for key, leaf in _leaves(file, text) if not UNTELLING.fullmatch(key) and _is(leaf, known)}
        if keys:
            yield f"{file.name} holds the answer {known.answer} as {', '.join(sorted(keys))}"
        elif value is not None and _digits(value) >= DIGITS and value not in told and value in _in(text):
            yield f"{file.name} holds the answer {known.answer}"
        if (
            value is not None
            and _digits(value) >= DIGITS - 1
            and value not in told
            and value in _in(file.stem.replace("_", " "))
        ):
            yield f"the file name {file.name} holds the answer {known.answer}"


def _text(file: Path) -> str:
    """Nothing of what is no text: its numbers could not be told from noise. Of tables, only very short ones."""
    size = file.stat().st_size
    is_text = file.suffix.lower() in TEXTS or (file.suffix.lower() in TABLES and size < 1024)
    return file.read_text(encoding="utf-8", errors="replace") if is_text and size <= LARGEST else ""


def _leaves(file: Path, text: str) -> list[tuple[str, Any]]:
    try:
        return list(gold.leaves(json.loads(text))) if file.suffix.lower() == ".json" else []
    except ValueError:
        return []


def _is(leaf: Any, known: gold.Gold) -> bool:
    text = str(leaf).strip()
    if tagged := gold.TAGGED.fullmatch(text):
        text = tagged["value"]
    return text == known.answer or (bool(known.values) and gold.number(text) == known.values[0])


def _in(text: str) -> set[Decimal]:
    return {number for found in gold.FOUND.findall(text) if (number := gold.number(found)) is not None}


def _digits(value: Decimal) -> int:
    """Significant ones; zeros at either end are not."""
    return len("".join(map(str, value.as_tuple().digits)).strip("0"))


# An array


def _numbers(known: gold.Gold, files: Sequence[Path]) -> Iterator[str]:
    """Files in which at least half of an array's numbers stand, to five digits."""
    sought = [float(value) for value in known.values if _digits(value) >= DIGITS]
    for file in files:
        if not sought or file.stat().st_size > LARGEST:
            continue
        held = sorted(float(value) for value in _array(file))
        if 2 * sum(_stands_in(held, value) for value in sought) >= len(sought):
            yield f"{file.name} holds the numbers of the gold submission"


def _stands_in(held: Sequence[float], value: float) -> bool:
    place = bisect.bisect_left(held, value)
    return any(abs(near - value) <= 1e-5 * abs(value) for near in held[max(place - 1, 0) : place + 1])


def _array(file: Path) -> Sequence[Decimal]:
    if file.suffix == ".npy":
        held = gold.read(file)
        return held.values if held else ()
    is_text = file.suffix.lower() in TEXTS | set(TABLES)
    return list(_in(file.read_text(encoding="utf-8", errors="replace"))) if is_text else []


# A table


def _rows(competition: Competition, files: Sequence[Path]) -> Iterator[str]:
    answers, sample = _table(competition.answers), _table(competition.sample_submission)
    if answers is None or sample is None or len(answers) < 2:
        return
    key = next((str(name) for name in answers if name in sample and answers[name].is_unique), None)
    targets = [str(name) for name in answers if name in sample and name != key]
    if key is None or not targets:
        return
    tables = {file.relative_to(competition.public_dir).as_posix(): _table(file) for file in files}
    for target in targets:
        truth = dict(zip(answers[key], answers[target], strict=True))
        yield from _by_table({name: table for name, table in tables.items() if table is not None}, truth, target)
        names = [file.relative_to(competition.public_dir).with_suffix("").as_posix() for file in files]
        yield from _by_name(names, truth, target)


def _table(file: Path | None) -> "pd.DataFrame | None":
    import pandas as pd

    if file is None or file.suffix.lower() not in TABLES or not file.is_file() or file.stat().st_size > LARGEST:
        return None
    try:
        return pd.read_csv(file, sep=TABLES[file.suffix.lower()], dtype=str, keep_default_na=False)
    except ValueError:
        return None


def _by_table(tables: "Mapping[str, pd.DataFrame]", truth: Mapping[str, str], target: str) -> Iterator[str]:
    test: pd.DataFrame | None = None
    rest: list[tuple[str, pd.DataFrame]] = []
    orders: set[str] = set()
    for name, table in tables.items():
        key = _key(table, truth)
        if key is None:
            rest.append((name, table))
            continue
        if test is None or len(table.columns) > len(test.columns):
            test = table
        rows = table[table[key].isin(truth.keys())]
        asked = [truth[row] for row in rows[key]]
        for column in rows.columns.drop(key):
            if tells(list(rows[column]), asked):
                yield f"the column {column} of {name} tells {target}"
        orders |= {f"the order of rows in {name}"} if is_ordered(asked) else set()
    by_id = [truth[identifier] for identifier in sorted(truth, key=_natural)]
    if is_ordered(by_id):
        yield f"the order of ids tells {target}"
    yield from (f"{order} tells {target}" for order in sorted(orders))
    if test is not None and (key := _key(test, truth)) is not None:
        for name, table in rest:
            yield from _derived(name, table, test.drop(columns=key), [truth.get(row) for row in test[key]], target)


def _key(table: "pd.DataFrame", truth: Mapping[str, str]) -> str | None:
    """The column that names at least half of what is asked for."""
    asked = truth.keys()
    return next((str(name) for name in table if 2 * len(asked & set(table[name])) >= len(asked)), None)


def _derived(
    name: str, table: "pd.DataFrame", test: "pd.DataFrame", asked: Sequence[str | None], target: str
) -> Iterator[str]:
    """A table without the ids may hold the test rows all the same: under their other columns, or in their order."""
    shared = [column for column in test if column in table]
    others = [column for column in table if column not in test]
    if len(table) == len(test) and None not in asked:
        for column in others:
            if tells(list(table[column]), [str(value) for value in asked]):
                yield f"the column {column} of {name} tells {target} in the order of the test rows"
    if len(shared) < 2:
        return
    held, rows = ([tuple(row) for row in each[shared].itertuples(index=False)] for each in (table, test))
    place, in_table, in_test = {row: number for number, row in enumerate(held)}, Counter(held), Counter(rows)
    pairs = [
        (place[row], value)
        for row, value in zip(rows, asked, strict=True)
        if value is not None and in_table[row] == in_test[row] == 1
    ]
    if len(pairs) < max(3, KNOWN_ROWS * len(test)):
        return
    for column in others:
        cells = [str(cell) for cell in table[column]]
        if tells([cells[number] for number, _ in pairs], [value for _, value in pairs]):
            yield f"{name} has {len(pairs)} of the {len(test)} test rows, and its column {column} tells their {target}"


def _by_name(names: Sequence[str], truth: Mapping[str, str], target: str) -> Iterator[str]:
    """File names that hold an id, and elsewhere the answer."""
    parts: list[dict[str, str]] = []
    for name in names:
        words = re.findall(r"[A-Za-z0-9]+", name)
        found = next((word for word in reversed(words) if word in truth), None)
        if found is None:
            continue
        words.remove(found)
        while len(parts) < len(words):
            parts.append({})
        for part, word in zip(parts, words, strict=False):
            part[found] = word
    for part in parts:
        if 2 * len(part) >= len(truth) and tells(list(part.values()), [truth[identifier] for identifier in part]):
            example = next(name for name in names if next(iter(part)) in name)
            yield f"file names such as {example} tell {target}"
            return


def _natural(text: str) -> list[tuple[bool, int | str]]:
    """As people sort: numbers by their size."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", text) if part]


def tells(values: Sequence[str], truth: Sequence[str]) -> bool:
    """Whether values tell the truth: as they are, one to one, or by their order."""
    most = max(Counter(truth).values()) / len(truth) if truth else 1.0
    if most > SURE:
        return False
    if sum(value == true for value, true in zip(values, truth, strict=True)) >= SURE * len(truth):
        return True
    pairs = Counter(zip(values, truth, strict=True))
    best: dict[str, int] = {}
    for (value, _), count in pairs.items():
        best[value] = max(best.get(value, 0), count)
    if len(best) <= min(2 * len(set(truth)), len(truth) // 3) and sum(best.values()) >= SURE * len(truth):
        return True
    return abs(_rank_correlation(values, truth)) >= SURE


def _rank_correlation(values: Sequence[str], truth: Sequence[str]) -> float:
    """Spearman's; of two classes the share of pairs in order, stretched to the same range; 0 if not of numbers."""
    from scipy.stats import rankdata

    numbers, asked = _floats(values), _floats(truth)
    if numbers is None:
        return 0.0
    classes = sorted(set(truth))
    if len(classes) == 2:
        ranks = rankdata(numbers)
        ones = [rank for rank, true in zip(ranks, truth, strict=True) if true == classes[1]]
        pairs = len(ones) * (len(truth) - len(ones))
        return float(2 * (sum(ones) - len(ones) * (len(ones) + 1) / 2) / pairs - 1)
    return _pearson(list(rankdata(numbers)), list(rankdata(asked))) if asked is not None else 0.0


def _pearson(one: Sequence[float], other: Sequence[float]) -> float:
    from statistics import StatisticsError, correlation

    try:
        return correlation(one, other)
    except StatisticsError:  # all are equal
        return 0.0


def _floats(texts: Sequence[str]) -> list[float] | None:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def is_ordered(truth: Sequence[str]) -> bool:
    """Whether a row's place tells its answer: equal classes side by side or in turn, or rising or falling numbers."""
    counts, n = Counter(truth), len(truth)
    if n < 20:
        return False
    if 2 * len(counts) > n:
        return abs(_rank_correlation([str(place) for place in range(n)], truth)) >= 0.95
    by_chance = sum(count**2 for count in counts.values()) / n**2
    for lag in range(1, LAGS + 1):
        same = sum(one == other for one, other in zip(truth, truth[lag:], strict=False)) / (n - lag)
        if same > by_chance + 0.8 * (1 - by_chance) and by_chance < SURE:
            return True
    return False
