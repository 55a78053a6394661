"""A dataset card, with the header that the Hugging Face hub reads: what is in it, whose it is, and on what terms."""

from collections.abc import Mapping
from typing import Any

from gradeflow import sources

_CARD = """\
---
license:
{licences}
---

# Mixed questions with reference answers

Drawn by Gradeflow with seed {seed}. The share of each problem type, and what there was to draw from, are in
`dataset_stats.json`. Each dataset keeps its own licence.

| dataset | train | validation | test | licence | by |
|---|---:|---:|---:|---|---|
{rows}

Before that, {removed} rows were removed: equal to another or nearly so, or with 13 words of a held-out question in a
row. `removed.jsonl` names them.
"""


def of(report: Mapping[str, Any]) -> str:
    """The card to these statistics."""
    licences: dict[str, None] = {}
    rows = []
    for name in report["dataset_stats"]:
        published = getattr(sources.load(name), "PUBLISHED", None)
        licence = published.licence if published else "MIT"
        licences[f"- {licence.lower()}"] = None
        by = f"[{published.attribution}]({published.home})" if published else "made by Gradeflow"
        counts = (str(report[f"{short}_sources"].get(name, 0)) for short in ("train", "val", "test"))
        rows.append(f"| {name} | {' | '.join(counts)} | {licence} | {by} |")
    return _CARD.format(
        licences="\n".join(licences),
        seed=report["config"]["seed"],
        rows="\n".join(rows),
        removed=", ".join(f"{sum(reasons.values())} {split}" for split, reasons in report["removed"].items()),
    )
