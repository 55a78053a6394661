"""`gradeflow audit judge`: what the judge says about answers that are right or wrong for certain.

`gradeflow audit tasks` is in audit_tasks.

Figures are by kind. Those of kinds that the judge is not asked about decide nothing, and are shown all the same.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gradeflow import dataset, llm, models, prompt, readiness, registry, tracking
from gradeflow.audit import KINDS, Case, Figures, Judged, ask, cases, figures, objections
from gradeflow.commands import audit_tasks
from gradeflow.errors import AuditError, DataError, SettingsError
from gradeflow.judge import Judge, prompt_of
from gradeflow.params import Model, Params
from gradeflow.types import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(params: Params, *, action: str, count: int, seed: int, task: Sequence[str]) -> None:
    """Audit the judge, or tasks.

    Raises:
        AuditError: it must not be relied on; why is printed, and in the run.
    """
    if action == "tasks":
        audit_tasks.main(params, task=task)
    elif action == "judge" and count > 0:
        judge(params, count, seed)
    else:
        raise SettingsError(
            "usage: gradeflow audit judge [--count N] [--seed N], with N of 1 or more questions a kind, or gradeflow "
            "audit tasks [--benchmark B] [--data-dir D] [--task ID ...]"
        )


def judge(params: Params, count: int, seed: int) -> None:
    data = dataset.read("test")
    asked = cases(data.examples, count, seed)
    if not asked:
        raise DataError(f"{data.path}: no question that has a number, a choice or a text for an answer")
    # Replies that were kept say nothing of the judge as it is now.
    named = {name: params.models[name].model_copy(update={"cache": ""}) for name in params.judge.models}
    tracking.connect(params.tracking, Path())
    with asyncio.Runner() as runner:
        for name, model in named.items():
            if model.url != llm.LOCAL:
                runner.run(readiness.ask(name, model))
        with tracking.start_run("audit", params.model_dump(mode="json")) as run:
            run.log_dataset(data.path.name, data.path, data.md5, data.split, len(data.examples))
            registry.record_prompts(run, [prompt.load("judge"), *map(prompt_of, params.judge.prompts.values())])
            judged = runner.run(_judge(params, named, asked))
            found = {kind: figures(own) for kind in KINDS if (own := [one for one in judged if one.case.kind == kind])}
            lines, against = _objections(params, found)
            _record(run, params, judged, found)
            run.log_text("\n".join(lines), "objections.txt")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(_table(found))
    for line in lines:
        console.print(line)
    if against:
        raise AuditError(f"judge {'+'.join(params.judge.models)} fails its audit: {', '.join(against)}")


async def _judge(params: Params, named: Mapping[str, Model], asked: Sequence[Case]) -> list[Judged]:
    local = llm.LOCAL in {model.url for model in named.values()}
    clients = llm.Clients(named, models.base_folder(params.base) if local else None)
    judge = Judge([clients[name] for name in params.judge.models], params.judge)
    with Progress() as progress:
        task = progress.add_task(f"audit judge  {judge.model}", total=len(asked))

        async def one(case: Case) -> Judged:
            said = await ask(judge, case)
            progress.advance(task)
            return said

        try:
            return list(await asyncio.gather(*map(one, asked)))
        finally:
            await clients.close()


def _record(run: tracking.Run, params: Params, judged: Sequence[Judged], found: Mapping[Kind, Figures]) -> None:
    for kind, own in found.items():
        run.log_metrics({f"audit/{kind}/{name}": value for name, value in own.metrics().items()})
    rows = [{**asdict(one.case), "verdict": one.verdict, "reason": one.reason, "fault": one.fault} for one in judged]
    run.log_table("cases.json", rows)
    run.log_figure(_figure(found, params.judge.max_false_positives), "rates.png")


def _objections(params: Params, found: Mapping[Kind, Figures]) -> tuple[list[str], list[Kind]]:
    """A line for each, and the kinds with one in which the judge is asked in training."""
    lines: list[str] = []
    against: list[Kind] = []
    for kind, own in found.items():
        counts = kind == "text" or params.judge.audit_share > 0
        said = objections(own, params.judge, params.train.max_fault_share)
        lines += [f"{kind}{'' if counts else ', which it is not asked about'}: {line}" for line in said]
        against += [kind] if said and counts else []
    return lines, against


def _table(found: Mapping[Kind, Figures]) -> Table:
    table = Table("", *found, title="the judge against known labels, with 95 % bounds")
    columns = [_cells(own) for own in found.values()]
    for label in next(iter(columns), {}):
        table.add_row(label, *(str(column[label]) for column in columns))
    return table


def _cells(own: Figures) -> dict[str, object]:
    return {
        "accuracy": own.accuracy,
        "kappa": f"{own.kappa:.2f}",
        "false positives": own.false_positives,
        "false negatives": own.false_negatives,
        "position": own.agreement["swapped"],
        "length": own.agreement["long"],
        "repeat": own.agreement["again"],
        "canaries passed": len(own.passed),
        "no verdict": own.no_verdict,
        "faults": own.faults.total(),
    }


def _figure(found: Mapping[Kind, Figures], limit: float) -> "Figure":
    """Both rates of each kind with their bounds, and what is allowed of the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rates = {
        f"{kind}: {name} (n = {rate.n})": rate
        for kind, own in found.items()
        for name, rate in (("false positives", own.false_positives), ("false negatives", own.false_negatives))
    }
    for row, (name, rate) in enumerate(rates.items()):
        color = "tab:red" if "positives" in name else "tab:blue"
        axes.plot((rate.low, rate.high), (row, row), color=color, linewidth=3)
        axes.plot(rate.share, row, "o", color=color)
    axes.axvline(limit, color="grey", linewidth=1, label="judge.max_false_positives")
    axes.set_yticks(range(len(rates)), list(rates))
    axes.set_xlabel("rate, 95 % bounds")
    axes.set_xlim(0, 1)
    axes.legend()
    return figure
