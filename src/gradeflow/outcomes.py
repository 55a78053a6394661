"""What came of tasks: one outcome each, and the figures of a benchmark, which a run and its table are made of."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from gradeflow import tracking
from gradeflow.attempt import Attempt

TASK = "gradeflow.solve.task"
SEED = "gradeflow.solve.seed"
PREFIX = "solve/"
MEDALS = ("gold", "silver", "bronze")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A score of None says that there was no valid submission. `cost` is in USD."""

    task: str
    seed: int
    score: float | None
    medal: str
    valid: bool
    above_median: bool
    turns: int
    cost: float
    seconds: float

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


def of_attempt(attempt: Attempt, seed: int) -> Outcome:
    return _outcome(attempt.competition.id, seed, metrics(attempt))


def of_children(run_id: str) -> list[Outcome]:
    """Those of the finished runs below a run."""
    found = (facts for facts in tracking.find_children(run_id) if facts.status == "FINISHED" and TASK in facts.tags)
    return [
        _outcome(one.tags[TASK], int(one.tags[SEED]), {name: point.value for name, point in one.latest.items()})
        for one in found
    ]


def metrics(attempt: Attempt) -> dict[str, float]:
    """What is compared between runs. Without a valid submission there is no score."""
    episode, report = attempt.episode, attempt.report
    values = {
        "cost": episode.cost,
        "prompt_tokens": sum(event.prompt_tokens for event in episode.events),
        "completion_tokens": sum(event.completion_tokens for event in episode.events),
        "turns": episode.turns,
        "experiments": episode.experiments,
        "seconds": attempt.seconds,
        "success": episode.success,
        "submission_exists": report.submission_exists,
        "valid_submission": report.valid_submission,
        "any_medal": report.any_medal,
        **{f"{medal}_medal": getattr(report, f"{medal}_medal") for medal in MEDALS},
        "above_median": report.above_median,
    }
    scored = values if report.score is None else values | {"score": report.score}
    return {f"{PREFIX}{name}": float(value) for name, value in scored.items()}


def _outcome(task: str, seed: int, measured: dict[str, float]) -> Outcome:
    of = {name.removeprefix(PREFIX): value for name, value in measured.items()}
    return Outcome(
        task,
        seed,
        of.get("score"),
        next((medal for medal in MEDALS if of[f"{medal}_medal"]), ""),
        bool(of["valid_submission"]),
        bool(of["above_median"]),
        int(of["turns"]),
        of["cost"],
        of["seconds"],
    )


def summary(found: Sequence[Outcome]) -> dict[str, float]:
    """Metrics of a benchmark: rates over its tasks, and their standard errors over seeds where there are several."""
    figures = {"tasks": float(len(found)), "cost": sum(one.cost for one in found)}
    for name, own in _rates(found):
        means = [statistics.fmean(values) for values in own]
        figures[name] = statistics.fmean(means)
        if len(means) > 1:
            figures[f"{name}_stderr"] = statistics.stdev(means) / len(means) ** 0.5
    return {f"{PREFIX}{name}": value for name, value in figures.items()}


def _rates(found: Sequence[Outcome]) -> Iterator[tuple[str, list[list[float]]]]:
    """Figures, and what each task has of it, seed by seed."""
    seeds = [[one for one in found if one.seed == seed] for seed in sorted({one.seed for one in found})]
    yield "any_medal_rate", [[float(bool(one.medal)) for one in own] for own in seeds]
    yield "above_median_rate", [[float(one.above_median) for one in own] for own in seeds]
    yield "valid_rate", [[float(one.valid) for one in own] for own in seeds]
    scored = [[one.score for one in own if one.score is not None] for own in seeds]
    if all(scored):
        yield "score_mean", scored


def so_far(found: Sequence[Outcome]) -> str:
    """For the progress bar."""
    if not found:
        return ""
    figures = summary(found)
    medals, cost = figures[f"{PREFIX}any_medal_rate"], figures[f"{PREFIX}cost"]
    score = f"score {mean:.2f}  " if (mean := figures.get(f"{PREFIX}score_mean")) is not None else ""
    return f"{score}medals {medals:.0%}  {cost:.2f} USD"


def table(found: Sequence[Outcome]) -> Table:
    figures = summary(found)
    rate, error = figures[f"{PREFIX}any_medal_rate"], figures.get(f"{PREFIX}any_medal_rate_stderr")
    spread = "" if error is None else f" ± {error:.1%} (standard error over seeds)"
    shown = Table(title=f"any medal: {rate:.1%}{spread}")
    for name in ("task", "seed", "score", "medal", "turns", "USD", "s"):
        shown.add_column(name, justify="left" if name in {"task", "medal"} else "right")
    for one in sorted(found, key=lambda one: (one.task, one.seed)):
        score = f"{one.score:g}" if one.score is not None else "none"
        shown.add_row(
            one.task, str(one.seed), score, one.medal, str(one.turns), f"{one.cost:.3f}", f"{one.seconds:.1f}"
        )
    return shown
