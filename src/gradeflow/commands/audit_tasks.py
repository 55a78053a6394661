"""`gradeflow audit tasks`: whether tasks grade what they say, and keep their answers to themselves."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradeflow import benchmarks, tracking
from gradeflow.benchmarks import FAMILIES, Competition, quarantine, soundness
from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.benchmarks.soundness import CHECKS, Finding
from gradeflow.errors import AuditError, DataError, GraderError
from gradeflow.params import Params

ALL = "all"
SHOWN = 10
"""Findings of a check and family that are printed; the run has all."""


def main(params: Params, *, task: Sequence[str]) -> None:
    """Audit the tasks of one family, or, where `solve.benchmark` is `all`, of all.

    Raises:
        AuditError: something is wrong with some; what, is printed, and in the run.
    """
    named = params.solve.benchmark
    families = FAMILIES if named == ALL else (benchmarks.canonical(named),)
    tracking.connect(params.tracking, Path())
    with tracking.start_run("audit_tasks", params.model_dump(mode="json")) as run:
        found: dict[str, dict[str, list[Finding]]] = {}
        for family in families:
            found[family] = own = _audit(params, family, task)
            run.log_metrics({f"audit/{family}/{name}": float(count) for name, count in _counts(own).items()})
            quarantine.update(params.solve.quarantine, family, own, _unusable(own))
        run.log_table("tasks.json", [row for family, own in found.items() for row in _rows(family, own)])
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(_table(found))
    for line in _lines(found):
        console.print(line)
    _judge(params, found)


def _audit(params: Params, family: str, chosen: Sequence[str]) -> dict[str, list[Finding]]:
    """What is wrong with each task; of most nothing."""
    settings = params.solve.model_copy(update={"benchmark": family, "quarantine": ""})
    with Benchmark(settings, params.sandbox, params.grade) as benchmark:
        ids = benchmark.chosen(",".join(chosen), None)
        competitions: dict[str, Competition] = {}

        def one(task_id: str) -> list[Finding]:
            try:
                competition = benchmark.competition(task_id)
                competition.prepare()
                competitions[task_id] = competition
                with tempfile.TemporaryDirectory(prefix="gradeflow-") as scratch:
                    return soundness.inspect(competition, Path(scratch))
            except (DataError, GraderError) as error:
                return [Finding(task_id, "files", str(error))]

        with ThreadPoolExecutor(params.sandbox.parallel) as pool:
            results = track(pool.map(one, ids), f"audit {family}", len(ids), transient=True)
            found = dict(zip(ids, results, strict=True))
        for finding in soundness.duplicates(competitions[task_id] for task_id in ids if task_id in competitions):
            found[finding.task_id].append(finding)
    return found


def _counts(own: Mapping[str, Sequence[Finding]]) -> Counter[str]:
    """Tasks, and of them those with a finding, those that are unusable, and those that fail each check."""
    counts: Counter[str] = Counter(dict.fromkeys(CHECKS, 0))
    counts.update(check for findings in own.values() for check in {finding.check for finding in findings})
    counts.update(tasks=len(own), wrong=sum(map(bool, own.values())), unusable=len(_unusable(own)))
    return counts


def _unusable(own: Mapping[str, Iterable[Finding]]) -> dict[str, list[str]]:
    reasons = {
        task_id: [f"{finding.check}: {finding.said}" for finding in findings if finding.unusable]
        for task_id, findings in own.items()
    }
    return {task_id: said for task_id, said in reasons.items() if said}


def _rows(family: str, own: Mapping[str, Sequence[Finding]]) -> list[dict[str, object]]:
    """A row for each task: whether it is sound, and what each check says against it."""
    return [
        {
            "benchmark": family,
            "task": task_id,
            "sound": not findings,
            "unusable": any(finding.unusable for finding in findings),
            **{check: "; ".join(one.said for one in findings if one.check == check) for check in CHECKS},
        }
        for task_id, findings in own.items()
    ]


def _table(found: Mapping[str, Mapping[str, Sequence[Finding]]]) -> Table:
    table = Table("", *found, title="tasks that fail a check")
    counts = [_counts(own) for own in found.values()]
    for name in ("tasks", *CHECKS, "wrong", "unusable"):
        table.add_row(name, *(str(count[name]) for count in counts))
    return table


def _lines(found: Mapping[str, Mapping[str, Sequence[Finding]]]) -> Iterable[str]:
    for family, own in found.items():
        findings = sorted(itertools.chain(*own.values()), key=lambda finding: CHECKS.index(finding.check))
        for check, group in itertools.groupby(findings, key=lambda finding: finding.check):
            same = list(group)
            for finding in same[:SHOWN]:
                yield f"{family} {finding.task_id}: {check}: {finding.said}"
            if len(same) > SHOWN:
                yield f"{family}: {check}: {len(same) - SHOWN} more, in tasks.json of the run"


def _judge(params: Params, found: Mapping[str, Mapping[str, Sequence[Finding]]]) -> None:
    counts = {family: _counts(own) for family, own in found.items()}
    bad = [
        f"{count['wrong']} of {count['tasks']} tasks of {family}" for family, count in counts.items() if count["wrong"]
    ]
    if not bad:
        return
    closed = sum(count["unusable"] for count in counts.values())
    where = params.solve.quarantine
    said = f"{closed} of them are unusable" + (f", and in quarantine by {where}" if where and closed else "")
    raise AuditError(f"something is wrong with {', '.join(bad)}; {said}")
