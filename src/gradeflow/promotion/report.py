"""What a decision is told by: figures, a table, a plot of the paired differences, the samples that flipped."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from gradeflow import gate
from gradeflow.gate import Comparison, Decision, Finding, Pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def numbers(decision: Decision) -> dict[str, float]:
    """Metrics: those of the first target, and where there are further tasks those of each under its name."""
    found = {"promote": float(decision.promote), "level": decision.level, **_numbers(decision.first)}
    if len(decision.findings) > 1:
        for one in decision.findings:
            found |= {f"{one.task}/{name}": value for name, value in _numbers(one).items()}
    return {f"promotion/{name}": value for name, value in found.items()}


def _numbers(found: Finding) -> dict[str, float]:
    plain = asdict(found)
    low, high = plain.pop("interval")
    named = {name: float(value) for name, value in plain.items() if not isinstance(value, str)}
    return named | {"interval_low": low, "interval_high": high}


def table(decision: Decision, rival: str, title: str) -> Table:
    shown = Table("task", "n", "challenger", rival, "difference", "95 % interval", "won : lost", "p", title=title)
    for one in decision.findings:
        low, high = one.interval
        p_value = one.p_gain if one.role == "target" else one.p_loss
        shown.add_row(
            one.task if one.role == "target" else f"{one.task} (guard)",
            str(one.n),
            f"{one.mean_challenger:.1%}",
            f"{one.mean_champion:.1%}",
            f"{one.difference:+.1%}",
            f"{low:+.1%} to {high:+.1%}",
            f"{one.wins} : {one.losses}",
            f"{p_value:.2g}",
        )
    return shown


def notes(decision: Decision, power: float) -> Iterator[str]:
    """What the table leaves out."""
    for one in decision.findings:
        if one.role == "target":
            yield (
                f"{one.task}: {one.n} questions show a gain of {one.detectable:.1%} with a probability of {power:.0%}; "
                f"{one.abstained} pairs without a score."
            )
    if decision.among > 1:
        yield f"The challenger is the best of {decision.among}; p is corrected for that."


def flips(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Rows for a table: the questions on which the two differ."""
    return [
        {
            "question": one.challenger.example_id,
            "kind": one.challenger.kind,
            "difference": one.difference,
            "challenger": one.challenger.answer,
            "champion": one.champion.answer,
            "challenger_wrote": one.challenger.completion,
            "champion_wrote": one.champion.completion,
        }
        for one in pairs
        if one.difference
    ]


def figure(comparisons: Sequence[Comparison], pairs: Sequence[Pair], rival: str) -> "Figure":
    """The mean paired difference with its interval: of each task, and of workflows kind by kind."""
    from matplotlib.figure import Figure

    every = {one.task: one.differences for one in comparisons} | dict(gate.by_kind(pairs))
    rows = {name: values for name, values in every.items() if len(values)}
    drawn = Figure(figsize=(7, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    for row, values in enumerate(rows.values()):
        axes.plot(gate.bootstrap(values), [row, row], color="tab:blue", linewidth=3)
        axes.plot(values.mean(), row, "o", color="tab:blue")
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{name} (n = {len(values)})" for name, values in rows.items()])
    axes.set_xlabel(f"score of the challenger minus that of the {rival}: mean, 95 % interval")
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.invert_yaxis()
    return drawn
