"""`gradeflow leaderboard`: registered versions and runs, ranked by a metric, with its interval."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradeflow import champions, registry, tracking
from gradeflow.errors import TrackingError
from gradeflow.gate.inference import Z95
from gradeflow.params import Params

if TYPE_CHECKING:
    import pandas as pd

WORKFLOW = "workflow/"
OF_ADAPTER = "workflow/adapter/"


def main(params: Params, *, metric: str = "workflow/accuracy", lower: bool = False, count: int = 20) -> None:
    """Print the best `count`.

    Raises:
        TrackingError: nothing has the metric.
    """
    tracking.connect(params.tracking, Path())
    ranked = frame(metric, params.promote.model, lower=lower)
    table = Table("", "what", metric, "95 % interval", "adapter", "run", "when (UTC)", title="leaderboard")
    rows: list[dict[str, Any]] = ranked.head(count).to_dict("records")  # type: ignore[assignment]
    for rank, row in enumerate(rows, start=1):
        interval = "" if math.isnan(row["low"]) else f"{row['low']:.4g} to {row['high']:.4g}"
        when = f"{row['at']:%Y-%m-%d %H:%M}"
        value, adapter, run = f"{row['value']:.4g}", row["adapter"][:12], row["run"][:8]
        table.add_row(str(rank), escape(row["what"]), value, interval, adapter, run, when)
    console = Console(highlight=False)
    console.print(table)
    if (left := len(ranked) - count) > 0:
        console.print(f"{left} more; --count shows them")


def frame(metric: str, model: str, *, lower: bool = False) -> "pd.DataFrame":
    """Versions of a model and runs that have a metric, the best first: what, value, low, high, adapter, run, at.

    The interval comes from METRIC_low and METRIC_high, else from METRIC_stderr; where there is neither it is NaN. A run
    that evaluated one adapter has its `workflow/accuracy` as `workflow/adapter/accuracy`.

    Raises:
        TrackingError: nothing has it.
    """
    import pandas as pd

    rows = [*_versions(metric, model), *_runs(metric)]
    if not rows:
        raise TrackingError(f"no version of {model} and no run has the metric {metric}; `make ui` shows what there is")
    return pd.DataFrame(rows).sort_values(["value", "at"], ascending=[lower, False]).reset_index(drop=True)


def _versions(metric: str, model: str) -> Iterator[dict[str, Any]]:
    import pandas as pd

    champion = registry.get_alias(model, champions.CHAMPION)
    for version in registry.versions(model):
        found = registry.measured(version)
        if metric in found:
            crown = " (champion)" if champion and champion.version == version.version else ""
            yield _row(
                f"{model} version {version.version}{crown}",
                metric,
                found,
                version.digest,
                version.tags.get("gradeflow.run.evaluation", ""),
                pd.Timestamp(version.made_ms, unit="ms", tz="UTC"),
            )


def _runs(metric: str) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys([metric, metric.replace(WORKFLOW, OF_ADAPTER, 1)])
    found = tracking.find_measured(list(names))
    for _, run in found.iterrows():
        values = {
            str(key).removeprefix("metrics."): value
            for key, value in run.items()
            if str(key).startswith("metrics.") and not math.isnan(value)
        }
        name = next(name for name in names if name in values)
        yield _row(
            str(run.get("tags.mlflow.runName", "")),
            name,
            values,
            str(run.get(f"tags.{registry.ADAPTER_DIGEST}") or ""),
            str(run["run_id"]),
            run["start_time"],
        )


def _row(what: str, metric: str, found: Mapping[str, float], adapter: str, run: str, at: Any) -> dict[str, Any]:
    value = found[metric]
    error = Z95 * found.get(f"{metric}_stderr", float("nan"))
    return {
        "what": what,
        "value": value,
        "low": found.get(f"{metric}_low", value - error),
        "high": found.get(f"{metric}_high", value + error),
        "adapter": "" if adapter == "nan" else adapter,
        "run": run,
        "at": at,
    }
