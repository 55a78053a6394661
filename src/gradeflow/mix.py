"""Mix datasets: convert, drop duplicates, keep the splits apart, and draw by exact shares.

The same raw files and settings give the same bytes on every machine.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradeflow import digest, jsonl, sources
from gradeflow.dataset import NAMES
from gradeflow.errors import DataError
from gradeflow.params import Mix, Params
from gradeflow.types import Example, Split

# What a duplicate in two splits is kept for: held-out questions win over training rows.
ORDER: tuple[Split, ...] = ("test", "validation", "train")
# How the statistics call the splits.
SHORT: Mapping[Split, str] = {"train": "train", "validation": "val", "test": "test"}
Pools = dict[Split, dict[str, list[Example]]]


def main(params: Params, *, raw: Path, out: Path) -> None:
    """Mix the datasets that mix.weights names into train, validation and test sets."""
    settings = params.mix
    loaded = {name: load(name, raw / f"{name}.jsonl") for name in settings.weights}
    pools, dropped = separate(loaded)
    sizes: dict[Split, int] = {
        "train": settings.target_train_size,
        "validation": settings.target_val_size,
        "test": settings.target_test_size,
    }
    chosen = {split: draw(pools[split], size, settings, split) for split, size in sizes.items()}
    _require_rows(chosen, loaded, settings, raw)
    for split, name in NAMES.items():
        jsonl.write(out / name, (example.to_row() for example in chosen[split]))
    report = statistics(chosen, pools, dropped, settings)
    with jsonl.whole(out / "dataset_stats.json") as file:
        file.write(json.dumps(report, indent=2) + "\n")
    for split, name in NAMES.items():
        types = Counter(example.problem_type for example in chosen[split])
        print(f"{out / name}: {len(chosen[split])} rows", dict(sorted(types.items())))


def _require_rows(
    chosen: Mapping[Split, Sequence[Example]],
    loaded: Mapping[str, Sequence[tuple[Split, Example]]],
    settings: Mix,
    raw: Path,
) -> None:
    for split, examples in chosen.items():
        if not examples:
            types = {example.problem_type for rows in loaded.values() for own, example in rows if own == split}
            raise DataError(
                f"{raw}: no {split} rows to draw: mix.type_ratios names {', '.join(settings.type_ratios)}; "
                f"the {split} rows of {', '.join(loaded)} are {', '.join(sorted(types)) or 'none'}"
            )


def load(name: str, path: Path) -> list[tuple[Split, Example]]:
    """The rows of one raw file, converted; a source without validation rows lends a tenth of its training rows."""
    convert = sources.load(name).example
    found: list[tuple[Split, Example]] = []
    for number, row in enumerate(_rows(path), start=1):
        split = row.pop("split", None)
        if split not in NAMES:
            raise DataError(f"{path}, line {number}: field split: {split!r} is none of {', '.join(NAMES)}")
        try:
            found.append((split, convert(row)))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    if any(split == "validation" for split, _ in found):
        return found
    return [("validation" if split == "train" and _tenth(example) else split, example) for split, example in found]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from jsonl.read(path)
    except DataError as error:
        raise DataError(f"{error}; `dvc repro` makes it anew") from None


def _tenth(example: Example) -> bool:
    return sources.split_of(example.problem) == "validation"


def separate(loaded: Mapping[str, Sequence[tuple[Split, Example]]]) -> tuple[Pools, Counter[str]]:
    """Pools by split and source without any question twice, counted by the split that lost it."""
    seen: set[str] = set()
    dropped: Counter[str] = Counter()
    pools: Pools = {split: {name: [] for name in loaded} for split in ORDER}
    for split in ORDER:
        for name, rows in loaded.items():
            for own, example in rows:
                if own != split:
                    continue
                key = normalised(example.problem)
                if key in seen:
                    dropped[split] += 1
                else:
                    seen.add(key)
                    pools[split][name].append(example)
    return pools, dropped


def normalised(problem: str) -> str:
    return digest.of_bytes(re.sub(r"\s+", " ", problem.strip().casefold()).encode())


def draw(pool: Mapping[str, Sequence[Example]], size: int, settings: Mix, split: Split) -> list[Example]:
    """`size` examples: exact shares by problem type, then by weight within a type; small training sets whole."""
    by_type: dict[str, dict[str, Sequence[Example]]] = defaultdict(dict)
    for name, examples in pool.items():
        if examples:
            by_type[examples[0].problem_type][name] = examples
    ratios = {str(kind): ratio for kind, ratio in settings.type_ratios.items() if kind in by_type}
    chosen: list[Example] = []
    for kind, quota in shares(ratios, size).items():
        weights = {name: settings.weights[name] for name in by_type[kind]}
        for name, count in shares(weights, quota).items():
            examples = by_type[kind][name]
            small = split == "train" and len(examples) < settings.keep_small_threshold
            chosen += _sample(examples, len(examples) if small else min(count, len(examples)), settings.seed)
    random.Random(settings.seed).shuffle(chosen)
    return chosen


def _sample(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    ordered = sorted(examples, key=lambda example: example.id)
    return random.Random(seed).sample(ordered, count)


def shares(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` divided by weight, exactly, by largest remainder; ties go to the earlier name."""
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    rest = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in rest[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def statistics(
    chosen: Mapping[Split, Sequence[Example]], pools: Pools, dropped: Mapping[str, int], settings: Mix
) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for split, short in SHORT.items():
        types = _counts(example.problem_type for example in chosen[split])
        report |= {
            f"{short}_size": len(chosen[split]),
            f"{short}_distribution": types,
            f"{short}_ratios": {name: count / len(chosen[split]) for name, count in types.items()},
            f"{short}_sources": _counts(example.source for example in chosen[split]),
        }
    names = list(pools["train"])
    report["dataset_stats"] = {
        name: {
            "train": len(pools["train"][name]),
            "val": len(pools["validation"][name]),
            "test": len(pools["test"][name]),
        }
        for name in names
    }
    report["duplicates_dropped"] = {split: dropped.get(split, 0) for split in ORDER}
    report["config"] = settings.model_dump(mode="json")
    return report


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))
