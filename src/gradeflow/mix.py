"""Mix datasets: drop duplicates and what gives evaluation questions away, and draw by exact shares.

The same raw files and settings give the same bytes on every machine.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from gradeflow import jsonl
from gradeflow.dataset import NAMES
from gradeflow.errors import DataError
from gradeflow.mixing import card, parquet, written
from gradeflow.mixing.parallel import each
from gradeflow.mixing.pool import Pool
from gradeflow.mixing.quota import shares
from gradeflow.mixing.scan import SPLITS, Raw
from gradeflow.params import Mix, Params
from gradeflow.types import Split

# How the statistics call the splits.
SHORT: Mapping[Split, str] = {"train": "train", "validation": "val", "test": "test"}
BLOCK = 10_000
"""Rows that are written at once."""

Chosen = Mapping[Split, NDArray[np.int64]]


def main(params: Params, *, raw: Path, out: Path) -> None:
    """Mix the datasets that mix.weights names into train, validation and test sets."""
    settings = params.mix
    names = dict.fromkeys([*settings.weights, *settings.protect])
    raws = [Raw(name, at, raw / f"{name}.jsonl", name in settings.weights) for at, name in enumerate(names)]
    sizes: dict[Split, int] = {
        "train": settings.target_train_size,
        "validation": settings.target_val_size,
        "test": settings.target_test_size,
    }
    with Progress() as progress:
        pool = Pool(raws, settings, progress)
        chosen = {split: pool.draw(split, size) for split, size in sizes.items()}
        _require_rows(pool, chosen, settings, raw)
        for split, name in NAMES.items():
            rows = pool.entries[chosen[split]]
            blocks = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
            with jsonl.whole(out / name) as file:
                file.writelines(each(written.mixed, blocks, raws, progress, f"mix  {name}"))
        with jsonl.whole(out / "removed.jsonl") as file:
            file.writelines(pool.removals())
    _write_parquet(out, sum(map(len, chosen.values())) >= settings.parquet_rows)
    report = statistics(pool, chosen, raws, settings)
    with jsonl.whole(out / "dataset_stats.json") as file:
        file.write(json.dumps(report, indent=2) + "\n")
    with jsonl.whole(out / "mixture.csv") as file:
        csv.writer(file, lineterminator="\n").writerows(_mixture(pool, chosen))
    with jsonl.whole(out / "README.md") as file:
        file.write(card.of(report))
    for split, name in NAMES.items():
        print(f"{out / name}: {len(chosen[split])} rows", report[f"{SHORT[split]}_distribution"])
    for said in _shortfalls(report, settings, sizes):
        print(said)


def _write_parquet(out: Path, is_large: bool) -> None:  # noqa: FBT001 - the only thing that it depends on
    """Splits of a large mix, under the names by which datasets.load_dataset knows them; else an empty folder."""
    folder = out / "parquet"
    folder.mkdir(exist_ok=True)
    for split, name in NAMES.items():
        file = folder / f"{split}.parquet"
        if is_large:
            parquet.write(out / name, file)
        else:
            file.unlink(missing_ok=True)


def _require_rows(pool: Pool, chosen: Chosen, settings: Mix, raw: Path) -> None:
    for split in SPLITS:
        if not len(chosen[split]):
            types = pool.count(np.flatnonzero(pool.entries["split"] == SPLITS.index(split)))
            raise DataError(
                f"{raw}: no {split} rows to draw: mix.type_ratios names {', '.join(settings.type_ratios)}; "
                f"the {split} rows of {', '.join(settings.weights)} are {', '.join(sorted(types)) or 'none'}"
            )


def statistics(pool: Pool, chosen: Chosen, raws: Sequence[Raw], settings: Mix) -> dict[str, Any]:
    """What was drawn, under the original's names, and what was there and went."""
    report: dict[str, Any] = {}
    for split, short in SHORT.items():
        counts, size = pool.count(chosen[split]), len(chosen[split])
        types = {kind: sum(by_source.values()) for kind, by_source in sorted(counts.items())}
        report |= {
            f"{short}_size": size,
            f"{short}_distribution": types,
            f"{short}_ratios": {kind: count / size for kind, count in types.items()},
            f"{short}_sources": dict(sorted(_by_source(counts).items())),
        }
    left = {short: _by_source(pool.count(pool.left(split))) for split, short in SHORT.items()}
    report["dataset_stats"] = {
        raw.name: {short: counts[raw.name] for short, counts in left.items()} for raw in raws if raw.is_mixed
    }
    report["removed"] = pool.removed()
    report["config"] = settings.model_dump(mode="json")
    return report


def _by_source(counts: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    return sum((Counter(by_source) for by_source in counts.values()), Counter())


def _mixture(pool: Pool, chosen: Chosen) -> Iterator[tuple[object, ...]]:
    yield "split", "type", "source", "rows"
    for split, indices in chosen.items():
        for kind, by_source in sorted(pool.count(indices).items()):
            for source, rows in sorted(by_source.items()):
                yield split, kind, source, rows


def _shortfalls(report: Mapping[str, Any], settings: Mix, sizes: Mapping[Split, int]) -> Iterator[str]:
    """Where a problem type has fewer rows than its share."""
    ratios = {str(kind): ratio for kind, ratio in settings.type_ratios.items()}
    for split, short in SHORT.items():
        for kind, wanted in shares(ratios, sizes[split]).items():
            if (found := report[f"{short}_distribution"].get(kind, 0)) < wanted:
                remedy = "; name more datasets, or raise mix.repeat" if split == "train" else ""
                yield f"{split}: {found} rows of {kind}, where its share is {wanted}{remedy}"
