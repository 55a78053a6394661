"""`gradeflow data show`: how many mixed rows there are of what, how long they are, and some of them."""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from gradeflow import dataset
from gradeflow.dataset import NAMES, Dataset
from gradeflow.errors import DataError, SettingsError
from gradeflow.params import Params
from gradeflow.types import Example

USAGE = "usage: gradeflow data show [--split train|validation|test] [--source NAME] [--count N] [--seed N]"


def main(_: Params, *, action: str, split: str, source: str, count: int, seed: int) -> None:
    """Show statistics of all splits, and `count` rows of one."""
    if action != "show" or split not in NAMES or count < 0:
        raise SettingsError(USAGE)
    found = [dataset.read(name) for name in NAMES]
    there = next(one for one in found if one.split == split)
    rows = [example for example in there.examples if source in {"", example.source}]
    if not rows:
        known = ", ".join(sorted({example.source for example in there.examples}))
        raise DataError(f"{there.path}: no row of {source}; there are: {known}")
    console = Console(highlight=False)
    console.print(_counts(found))
    if removed := _removed(there.path.with_name("dataset_stats.json")):
        console.print(f"removed: {removed}; which and why: {there.path.with_name('removed.jsonl')}")
    for example in random.Random(seed).sample(rows, min(count, len(rows))):
        console.print(_panel(example))


def _counts(found: Sequence[Dataset]) -> Table:
    table = Table(title="mixed rows", caption="words: of half of the questions at most, and of 95 % at most")
    for column in ("source", "type", "kind", *NAMES, "words"):
        table.add_column(column, justify="left" if column in {"source", "type", "kind"} else "right")
    groups: dict[tuple[str, str, str], dict[str, list[Example]]] = {}
    for one in found:
        for example in one.examples:
            of = groups.setdefault((example.source, example.problem_type, example.kind), {name: [] for name in NAMES})
            of[one.split].append(example)
    for key, by_split in sorted(groups.items()):
        lengths = [len(example.problem.split()) for some in by_split.values() for example in some]
        middle, *_, longest = statistics.quantiles(lengths, n=20)[9::9] if len(lengths) > 1 else lengths * 2
        table.add_row(*key, *(str(len(some)) for some in by_split.values()), f"{middle:.0f}, {longest:.0f}")
    return table


def _removed(path: Path) -> str:
    report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    counts = [
        f"{count} {split} ({why})"
        for split, reasons in report.get("removed", {}).items()
        for why, count in reasons.items()
        if count
    ]
    return ", ".join(counts)


def _panel(example: Example) -> Panel:
    hidden = ", ".join(example.extra) or "nothing"
    said = f"{escape(example.problem)}\n\n[bold]reference[/bold] {escape(example.ground_truth)}"
    return Panel(f"{said}\n[bold]for graders alone[/bold] {hidden}", title=f"{example.id} ({example.kind})")
