"""`gradeflow watch`: a training run as a table that follows it, from MLflow alone.

A look costs the store one request. The courses of the metrics that are shown are read once, at the start; after that
they grow by the newest points, which may leave out some of the steps between two looks.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradeflow import tracking
from gradeflow.errors import TrackingError
from gradeflow.params import Params
from gradeflow.tracking import Facts, Point

STAGE = "train_grpo"
EVERY_S = 2.0
NEWEST = 20
WIDTH = 48
QUIET_S = 120.0
STEP, VALIDATION = "train/step", "val_accuracy"
KINDS = "train/accuracy_"
BARS = "▁▂▃▄▅▆▇█"
Show = Callable[[float], str]


@dataclass
class Watched:
    """A run, and what has been seen of the course of its metrics; `trouble` is why the last look saw nothing."""

    facts: Facts
    series: dict[str, list[Point]] = field(default_factory=dict)
    trouble: str = ""

    def look_again(self) -> None:
        """See what is new, now or at the next look."""
        try:
            self.look()
            self.trouble = ""
        except TrackingError as error:
            self.trouble = str(error)

    def look(self) -> None:
        self.facts = tracking.read_facts(self.facts.id)
        for name, point in self.facts.latest.items():
            if name in self.series:
                seen = self.series[name]
                if not seen or point.step > seen[-1].step:
                    seen.append(point)
            elif is_shown(name):
                self.series[name] = tracking.read_history(self.facts.id, name)


def main(params: Params, *, run: str, once: bool) -> None:
    """Show a run until it ends; once, where asked to or where the output is no terminal.

    Raises:
        TrackingError: there is no such run, or it is not of training.
    """
    tracking.connect(params.tracking, Path())
    watched = Watched(tracking.read_facts(find(run, params.tracking.experiment)))
    watched.look()
    console = Console(highlight=False)
    if once or not sys.stdout.isatty():
        console.print(view(watched, time.time()))
        return
    live = Live(view(watched, time.time()), console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), live:  # how one stops watching
        while watched.facts.status == "RUNNING":
            time.sleep(EVERY_S)
            watched.look_again()
            live.update(view(watched, time.time()), refresh=True)


def find(run: str, experiment: str) -> str:
    """The id of the run that is meant; where it used the result of an earlier one, of that."""
    found = run if len(run) == 32 else tracking.newest_run(STAGE, run)
    if found is None and run:
        raise TrackingError(f"no {STAGE} run whose name has {run!r} in it. MLflow's pages and `make ui` list runs")
    if found is None:
        raise TrackingError(f"experiment {experiment} has no {STAGE} run yet. This starts one: gradeflow {STAGE}")
    tags = tracking.read_tags(found)
    if (stage := tags.get(tracking.STAGE)) != STAGE:
        raise TrackingError(f"run {found} is of {stage or 'no stage of ours'}; watch shows runs of {STAGE}")
    return tags.get(tracking.REUSED, found)


def is_shown(name: str) -> bool:
    return name in {STEP, VALIDATION, *(metric for metric, _, _ in ROWS)} or name.startswith(KINDS)


def share(value: float) -> str:
    return f"{value:.1%}"


def number(value: float) -> str:
    return f"{value:.4g}"


ROWS: Sequence[tuple[str, str, Show]] = (
    ("train/avg_reward", "reward", number),
    ("train/accuracy", "accuracy", share),
    ("rollouts/unscored_share", "unscored", share),
    ("rollouts/valid_share", "valid", share),
    ("train/entropy", "entropy", number),
    ("train/kl_div", "KL", number),
    ("train/dead_group_share", "dead groups", share),
)


def view(watched: Watched, now: float) -> RenderableType:
    """All that is shown."""
    facts, steps = watched.facts, watched.series.get(STEP, [])
    parts: list[RenderableType] = [Text.assemble((facts.name, "bold"), "  ", said(facts, steps, now))]
    most = int(facts.params.get("train.max_steps", "0"))
    if steps and most:
        parts += [progress(facts, steps, most), Text()]
    parts.append(table(watched) if watched.series else Text("no step yet"))
    if watched.trouble:
        parts.append(Text(watched.trouble, "red"))
    return Group(*parts)


def said(facts: Facts, steps: Sequence[Point], now: float) -> Text:
    """How the run is, in words."""
    lasted = duration((facts.ended or now) - facts.started)
    why = facts.tags.get(tracking.ERROR, "")
    match facts.status:
        case "FINISHED":
            return Text(f"finished after {lasted}", "green")
        case "FAILED":
            return Text(f"failed after {lasted}{f': {why}' if why else ''}", "red")
        case "KILLED":
            return Text(f"interrupted after {lasted}; the same command goes on", "yellow")
    quiet = now - max([facts.started, *(point.at for point in facts.latest.values())])
    if quiet > max(QUIET_S, 10 * max(seconds_per_step(steps), default=0.0)):
        return Text(f"nothing new for {duration(quiet)}: killed, hanging, or its server was away", "red")
    return Text(f"running for {lasted}", "cyan")


def progress(facts: Facts, steps: Sequence[Point], most: int) -> Table:
    """Step, bar, pace and time left."""
    line = Table.grid(padding=(0, 1))
    step = steps[-1].step
    cells: list[RenderableType] = [f"step {step}/{most}", ProgressBar(total=most, completed=step, width=30)]
    if taken := seconds_per_step(steps)[-NEWEST:]:
        pace = statistics.median(taken)
        cells.append(f"{1 / pace:.2f} steps/s")
        latest = facts.latest
        if "train/completion_tokens" in latest and "train/num_total" in latest:
            tokens = latest["train/completion_tokens"].value * latest["train/num_total"].value
            cells.append(f"{tokens / pace:,.0f} tokens/s")
        if facts.status == "RUNNING" and step < most:
            # Validations make some steps long, and belong to the rest; the time before a run was resumed does not.
            usual = [one for one in taken if one < 20 * pace]
            cells.append(f"{duration((most - step) * statistics.fmean(usual))} left")
    line.add_row(*cells)
    return line


def table(watched: Watched) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", f"last {NEWEST}", "from the first step to the last"):
        made.add_column(heading, justify="right" if heading.startswith("last") else "left", style="", no_wrap=True)
    series = watched.series
    kinds = sorted(name for name in series if name.startswith(KINDS))
    for name, label, show in ROWS:
        made.add_row(*cells(label, series.get(name, ()), show))
        if name == "train/accuracy":
            for kind in kinds:
                made.add_row(*cells(f"  {kind.removeprefix(KINDS)}", series[kind], share))
    if validated := series.get(VALIDATION):
        best = max(validated, key=lambda point: (point.value, point.step))
        text = f"{share(best.value)} at step {best.step}"
        made.add_row("validation", share(validated[-1].value), f"{spark(validated)}  best {text}")
    return made


def cells(label: str, points: Sequence[Point], show: Show) -> tuple[str, str, str]:
    known = [point.value for point in points[-NEWEST:] if not math.isnan(point.value)]
    return label, show(statistics.fmean(known)) if known else "-", spark(points)


def spark(points: Sequence[Point]) -> str:
    """The course in bars between its lowest and its highest, each the mean of as many points."""
    values = [point.value for point in points if not math.isnan(point.value)]
    each = math.ceil(len(values) / WIDTH) or 1
    means = [statistics.fmean(values[start : start + each]) for start in range(0, len(values), each)]
    if len(means) < 2:
        return ""
    low, high = min(means), max(means)
    scale = 0.0 if math.isclose(low, high) else (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def seconds_per_step(steps: Sequence[Point]) -> list[float]:
    return [taken for one, two in itertools.pairwise(steps) if (taken := (two.at - one.at) / (two.step - one.step)) > 0]


def duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
