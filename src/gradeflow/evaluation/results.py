"""What lm-eval has measured, all of it, or an EvaluationError that says what is missing and which tasks are done.

A result that is missing is never a 0, and base and adapter are never taken for each other. Reads what lm-eval 0.4.9 to
0.4.13 write, and any other version whose file has the same shape.
"""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import jsonl
from gradeflow.errors import EvaluationError
from gradeflow.evaluation import report as reports
from gradeflow.evaluation import samples
from gradeflow.evaluation.report import Report, TaskResult

NAME = "results.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The tasks that were asked for. `samples` are the files of their leaves, where they were looked for."""

    tasks: tuple[TaskResult, ...]
    versions: tuple[str, ...]
    samples: Mapping[str, Path]
    notes: tuple[str, ...]

    @property
    def average(self) -> float | None:
        """The mean share over the tasks, a group counting once; None where no task's metric is a share."""
        inside = {below.task for task in self.tasks for below in task.walk() if below is not task}
        shares = [task.value for task in self.tasks if task.is_share and task.task not in inside]
        return statistics.fmean(shares) if shares else None

    def walk(self) -> list[TaskResult]:
        """All tasks, groups and subtasks, each once."""
        return list({one.task: one for task in self.tasks for one in task.walk()}.values())


def read(
    place: Path,
    tasks: Sequence[str] = (),
    *,
    base: str = "",
    adapter: str | None = None,
    primary: Mapping[str, str] | None = None,
    with_samples: bool = True,
    since: float = 0.0,
) -> Evaluation:
    """The results of `tasks` in a file, or in the files below a folder; without tasks, of all that were run.

    Tasks are lm-eval's names of tasks, groups and tags, or YAML files. results.json stands for all beside and below it;
    without one, the newest results of a task are taken. `base` is the folder, hub id or digest of the model that must
    have been measured, `adapter` the digest of its adapter, or "" for none. lm-eval's own file has no digest; there it
    is only looked whether an adapter was loaded, and that the file is not older than `since`, in seconds of the epoch.
    `primary` names another `metric` or `metric,filter` for a task. `with_samples` checks the samples too.

    Raises:
        EvaluationError: the first thing that is wrong; `done` are the tasks with which nothing is.
    """
    found, wrong = _load_all(place)
    good: dict[str, tuple[TaskResult, Report]] = {}
    files: dict[str, Path] = {}
    for task in tasks or [root for report in found for root in report.roots()]:
        try:
            report, names = _newest(place, task, found)
            report.require_subject(base, adapter, since)
            parsed = [report.parse(name, primary or {}) for name in names]
            if with_samples:
                files |= {leaf.task: samples.require(report.file, leaf) for one in parsed for leaf in one.leaves()}
            good |= {one.task: (one, report) for one in parsed}
        except EvaluationError as error:
            wrong.append(error)
    if wrong:
        raise EvaluationError(str(wrong[0]), done=list(good))
    used = [report for report in found if any(report is own for _, own in good.values())]
    return Evaluation(
        tuple(one for one, _ in good.values()),
        tuple(sorted({report.content.lm_eval_version for report in used})),
        files,
        tuple(report.note for report in used if report.note),
    )


def write(
    folder: Path,
    raw: Mapping[str, Any],
    *,
    base: str,
    base_digest: str,
    adapter: str = "",
    primary: Mapping[str, str] | None = None,
    **more: object,
) -> Path:
    """Write lm-eval's results as `folder`/results.json, with whose they are under the key `gradeflow`.

    `adapter` is its digest, empty for the base alone; `more` is kept there too. Samples have files of their own and are
    left out. The file is there as a whole or not at all.

    Raises:
        EvaluationError: these are no whole results; nothing is written.
    """
    file = folder / NAME
    plain = json.dumps({key: value for key, value in raw.items() if key != "samples"}, default=_plain)
    tree = json.loads(plain)
    report = reports.checked(file, tree)
    parsed = [report.parse(name, primary or {}) for root in report.roots() for name in report.names(root)]
    tree["gradeflow"] = {
        "base": {"name": base, "digest": base_digest},
        "adapter": adapter,
        "primary": {one.task: one.metric for task in parsed for one in task.walk()},
        **more,
    }
    with jsonl.whole(file) as out:
        out.write(json.dumps(tree, indent=2, ensure_ascii=False) + "\n")
    return file


def metrics(evaluation: Evaluation) -> dict[str, float]:
    """Every metric of every task and subtask under the name that MLflow takes, and its `_stderr`."""
    found: dict[str, float] = {}
    for one in evaluation.walk():
        for key, metric in one.metrics.items():
            found[name := metric_name(one.task, key)] = metric.value
            if metric.stderr is not None:
                found[f"{name}_stderr"] = metric.stderr
    return found


def metric_name(task: str, key: str) -> str:
    """`arc_easy/acc_norm`, with the filter where it has a name: `humaneval/pass_at_1_create_test`."""
    metric, _, kind = key.partition(",")
    name = metric if kind in {"", "none"} else f"{metric}_{kind}"
    return _allowed(f"{task}/{name.replace('@', '_at_')}")


def facts(evaluation: Evaluation) -> dict[str, str]:
    """What the numbers rest on, for parameters or tags, of each task that was asked for."""
    found = {"lm_eval_version": ", ".join(evaluation.versions)}
    for one in evaluation.tasks:
        said = {
            "metric": one.metric,
            "n": one.n,
            "num_fewshot": one.num_fewshot,
            "version": one.version,
            "hash": one.hash,
        }
        found |= {_allowed(f"{one.task}/{name}"): str(value) for name, value in said.items() if value not in {None, ""}}
    return found


def _load_all(place: Path) -> tuple[list[Report], list[EvaluationError]]:
    """The reports, the newest first, and what is wrong with files that are none."""
    found, wrong = [], []
    for file in _files(place):
        try:
            found.append(reports.load(file))
        except EvaluationError as error:
            wrong.append(error)
    if not found and not wrong:
        raise EvaluationError(f"{place}: no results of lm-eval (results.json or results_<time>.json)")
    return sorted(found, key=lambda report: report.content.date, reverse=True), wrong


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place] if place.exists() else []
    if (place / NAME).exists():
        return [place / NAME]
    below = [file for folder in sorted(place.iterdir()) if folder.is_dir() for file in _files(folder)]
    return [*sorted(place.glob("results_*.json")), *below]


def _newest(place: Path, task: str, found: Sequence[Report]) -> tuple[Report, list[str]]:
    for report in found:
        if names := report.names(task):
            return report, names
    there = sorted({name for report in found for name in report.content.results})
    raise EvaluationError(f"{place}: no results of task {task}; there are {', '.join(there) or 'none of any'}")


def _allowed(name: str) -> str:
    """MLflow refuses other characters in a name."""
    return re.sub(r"[^\w.\- /]", "_", name)


def _plain(value: Any) -> Any:
    """NumPy's numbers as numbers; the rest as text, as lm-eval writes it too."""
    return value.item() if hasattr(value, "item") else str(value)
