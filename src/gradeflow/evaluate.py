"""Measure a base model and its adapters with lm-evaluation-harness, on equal terms.

In the project's own task an adapter writes workflows, so its prompt is the policy's, and grading runs the workflow and
asks the same scorer as training does. lm-eval's tasks keep their own prompts and metrics. One MLflow run has
results.json, the samples and the adapters' files.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradeflow import adapter as adapters
from gradeflow import champions, dataset, fingerprint, gate, jsonl, lineage, models, registry, tracking
from gradeflow.adapter import BaseIdentity
from gradeflow.dataset import Dataset
from gradeflow.errors import AdapterError, SettingsError
from gradeflow.evaluation import docker, looks, preflight, process, results, workflow
from gradeflow.evaluation import tasks as lm_tasks
from gradeflow.evaluation.earlier import ASKED, Earlier
from gradeflow.evaluation.looks import Looked
from gradeflow.evaluation.plan import BASE, WORKFLOW, Plan, Subject
from gradeflow.evaluation.report import TaskResult
from gradeflow.evaluation.results import Evaluation
from gradeflow.evaluation.samples import differences, scores_questions
from gradeflow.grpo import environment as environments
from gradeflow.params import Params
from gradeflow.types import KINDS, Example, Sample

SECTIONS = ("evaluate", "base", "models", "workflow", "judge", "scorer", "sandbox")
QUICK = 10
"""Questions per task in the original's quick mode."""
RESCORED = "gradeflow.rescored"
ADAPTERS = Path(".gradeflow/adapters")
UNFINISHED = Path(".gradeflow/evaluations/unfinished")
# Settings that say how an evaluation is run, and not what is measured.
HOW = {"cache": "", "where": "local", "timeout_s": 0, "after_training": False}


@dataclass(frozen=True, slots=True)
class Found:
    """An adapter's files and the training run that made it; a folder of the user's has none."""

    folder: Path
    training_run: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """What is evaluated: a plan, the base and adapters that it names, and the questions of the workflow task.

    `rescored` is the earlier evaluation whose replies these are, if any.
    """

    plan: Plan
    identity: BaseIdentity
    found: Sequence[Found]
    data: Dataset | None
    rescored: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of lm-eval's tasks by subject and task, samples of workflows by writer, fingerprints of adapters."""

    evaluations: Mapping[str, Mapping[str, Evaluation]]
    samples: Mapping[str, Sequence[Sample]]
    facts: Mapping[str, Any]
    fingerprints: Mapping[str, Mapping[str, Any]]

    @property
    def looked(self) -> Looked | None:
        return Looked.of(told) if (told := self.facts.get("looked")) else None


def main(params: Params, *, adapter: str = "", tasks: str = "", quick: bool = False, rescore: str = "") -> None:
    """Evaluate adapters (folders, training runs, registry URIs, by commas), or that of the newest training run.

    With `rescore`, an evaluation run or a folder with its files, the replies are taken from there.
    """
    tracking.connect(params.tracking, Path())
    if rescore:
        if adapter or quick:
            raise SettingsError(
                "--rescore takes adapters and questions from what it names: leave out --adapter, --quick"
            )
        with tempfile.TemporaryDirectory() as scratch:
            _carry_out(replayed(params, rescore, tasks, Path(scratch)))
        return
    params = _with_inputs(params, tasks, quick=quick)
    found = [find_adapter(one) for one in map(str.strip, adapter.split(",")) if one != BASE]
    identity, base = models.identify(params.base), models.base_folder(params.base)
    data = dataset.read(params.evaluate.split) if WORKFLOW in params.evaluate.tasks else None
    rival = None
    if params.promote.looks > 1 and data and found:
        rival = _rival(params.promote.model, found, identity)
    plan = make_plan(params, found, identity, base, data.md5 if data else "", rival)
    case = Case(plan, identity, found, data)
    mark = Path(case.plan.out).name
    if (done := tracking.find_run("evaluate", mark)) is not None:
        tracking.note_reuse("evaluate", done)
        print(f"evaluate: nothing has changed; reused run {done}")
        return
    _carry_out(case, mark)
    shutil.rmtree(case.plan.out)


def _carry_out(case: Case, mark: str | None = None) -> None:
    """Measure what is not measured yet, and write it into a run with this fingerprint."""
    plan, params, data = case.plan, case.plan.params, case.data
    preflight.require(plan, lm_tasks.known(params.evaluate))
    if data:
        asyncio.run(environments.require_ready(params, runs=not plan.replies))
    training_run = case.found[0].training_run if len({one.training_run for one in case.found}) == 1 else ""
    chain = tracking.read_tags(training_run).get(tracking.CHAIN) if training_run else None
    with (
        tracking.start_run("evaluate", params.model_dump(mode="json"), fingerprint=mark, chain=chain) as run,
        tempfile.TemporaryDirectory() as scratch,
    ):
        if training_run and tracking.PARENT not in tracking.read_tags(run.id):
            run.set_tags({tracking.PARENT: training_run})
        if case.rescored:
            run.set_tags({RESCORED: case.rescored})
        if data:
            registry.record_prompts(run, environments.prompts(params, runs=not plan.replies))
            run.log_dataset(data.path.name, data.path, data.md5, data.split, len(data.examples))
        in_docker = params.evaluate.where == "docker" and not plan.replies
        docker.measure(plan, params.evaluate.docker) if in_docker else process.run(plan)
        measured = read(plan)
        out = Path(scratch)
        write(out, plan, measured, case.found, case.identity)
        run.log_artifacts(out)
        tables = dict(flips(plan, measured, data.examples if data else ()))
        run.log_metrics(metrics(measured) | dict(measured.facts.get("figures", {})))
        run.set_tags(facts(measured))
        digests = ",".join(subject.digest for subject in plan.subjects[1:])
        run.set_tags({registry.ADAPTER_DIGEST: digests, lineage.TRAINING_RUN: training_run})
        for name, rows in tables.items():
            run.log_table(name, rows)
        for subject, one in zip(plan.subjects[1:], case.found, strict=True):
            model = registry.logged_model(
                one.folder, digest=subject.digest, run_id=one.training_run or run.id, step=one.step
            )
            registry.log_metrics(model, metrics_of(subject.name, measured), run.id)
    show(measured)


def _with_inputs(params: Params, tasks: str, *, quick: bool = False) -> Params:
    changes: dict[str, Any] = {"tasks": [one.strip() for one in tasks.split(",")]} if tasks else {}
    if quick:
        changes["limit"] = QUICK
    return params.model_copy(update={"evaluate": params.evaluate.model_copy(update=changes)})


def _rival(model: str, found: list[Found], identity: BaseIdentity) -> str | None:
    """The digest of the one that promotion will compare a single adapter with, empty for the base.

    A champion that is not among those `found` is measured beside them, as questions that are not asked are not asked
    of it either. None where there is more than one to judge, or nothing to compare it with.
    """
    champion, _ = champions.now(model)
    others = [one for one in found if champion is None or adapters.digest(one.folder) != champion.digest]
    if len(others) != 1:
        print(f"promote.looks: only one adapter can be judged, and there are {len(others)}: all questions are asked")
        return None
    if champion is None:
        return ""
    if (theirs := lineage.base_identity(champion.tags)) != identity:
        print(f"promote.looks: {champion} is of another base, {theirs.name}: all questions are asked")
        return None
    if len(found) == 1:
        found.append(find_adapter(f"models:/{model}/{champion.version}"))
    return champion.digest


def make_plan(
    params: Params,
    found: Sequence[Found],
    identity: BaseIdentity,
    base: Path,
    data: str,
    rival: str | None = None,
) -> Plan:
    """The plan for these adapters; its folder is named by all that the results depend on, so that the same one goes on.

    `data` is the digest of the questions of the workflow task, where that is among the tasks. Given a `rival`, by its
    digest or empty for the base, workflows are asked until the gate can decide between it and the other adapter.
    """
    settings = params.evaluate
    subjects = [Subject(BASE)]
    for one in found:
        facts = adapters.validate(one.folder, identity, base, allow_bin=settings.allow_bin)
        subjects.append(Subject(facts.digest[:12], facts.digest, str(one.folder.absolute()), facts.rank))
    if len(digests := {subject.digest for subject in subjects}) < len(subjects):
        raise AdapterError("the same adapter is named twice")
    names = lm_tasks.resolve(settings.tasks, settings.include)
    backend = preflight.choose_backend(settings)
    alike = params.model_copy(update={"evaluate": settings.model_copy(update=HOW)})
    asked = lm_tasks.contents(names, settings)
    judged: tuple[str, str] | None = None
    if rival is not None:
        other = next(subject.name for subject in subjects[1:] if subject.digest != rival)
        judged = other, next(subject.name for subject in subjects if subject.digest == rival)
    until = [json.dumps([judged, looks.terms(params.promote)])] if judged else []
    mark = fingerprint.of(alike, SECTIONS, identity.digest, *sorted(digests), *names, backend, data, asked, *until)
    return Plan(
        base=str(base.absolute()),
        revision="",
        base_digest=identity.digest,
        dtype=params.train.dtype,
        subjects=subjects,
        tasks=names,
        backend=backend,
        params=params,
        out=str((UNFINISHED / mark).absolute()),
        judged=judged,
    )


def replayed(params: Params, given: str, tasks: str, scratch: Path) -> Case:
    """The evaluation of a run, or of a folder with a run's files, to be scored again in all of its tasks or in some.

    Raises:
        EvaluationError: there is none, or only part of one.
    """
    run = "" if Path(given).is_dir() else given.removeprefix("runs:/").strip("/")
    earlier = Earlier.read(tracking.download_artifact(run, "", scratch / "earlier") if run else Path(given).absolute())
    asked = params.model_copy(update={"evaluate": earlier.settings(params.evaluate)})
    params = _with_inputs(asked, tasks)
    settings = params.evaluate
    names = lm_tasks.resolve(settings.tasks, settings.include)
    for task in names:
        earlier.replies(BASE, task)
    found, subjects = [], [Subject(BASE)]
    for name, one in earlier.adapters.items():
        if (held := adapters.digest(one.folder)) != one.digest:
            raise AdapterError(f"{one.folder}: its files have digest {held[:12]}; {one.digest[:12]} was evaluated")
        training_run = one.training_run if tracking.is_known(one.training_run) else ""
        step = int(tracking.read_tags(training_run).get("gradeflow.adapter.step", 0)) if training_run else 0
        found.append(Found(one.folder, training_run, step))
        subjects.append(Subject(name, one.digest))
    plan = Plan(
        base=earlier.base.name,
        revision=earlier.base.revision,
        base_digest=earlier.base.digest,
        dtype=params.train.dtype,
        subjects=subjects,
        tasks=names,
        backend="hf",
        params=params,
        out=str(scratch / "measured"),
        replies=str(earlier.folder),
    )
    data = dataset.read(settings.split) if WORKFLOW in names else None
    return Case(plan, earlier.base, found, data, rescored=run or str(earlier.folder))


def find_adapter(given: str) -> Found:
    """A folder, a run by its id or `runs:/ID`, `models:/NAME@ALIAS`, or for nothing the newest training run."""
    if given and Path(given).is_dir():
        return Found(Path(given))
    if "/" in given and not given.startswith(("runs:/", "models:/")):
        raise AdapterError(f"{given}: Output directory not found; expected an adapter's folder, run or registry URI")
    if given.startswith("models:/"):
        version = registry.resolve(given)
        if version is None:
            raise AdapterError(f"{given}: no such version in the registry")
        return Found(registry.fetch(version, ADAPTERS), version.tags.get(lineage.TRAINING_RUN, ""))
    run, _, path = given.removeprefix("runs:/").partition("/")
    if not (run := run or tracking.find_stage("train_grpo") or ""):
        raise AdapterError("no finished training run in this experiment; train one, or give --adapter FOLDER")
    step = int(tracking.read_tags(run).get("gradeflow.adapter.step", 0))
    return Found(tracking.download_artifact(run, path or "adapter", ADAPTERS / run), run, step)


def read(plan: Plan) -> Measured:
    """What the worker has left.

    Raises:
        EvaluationError: it is not whole; tasks that are done are named.
    """
    own = [task for task in plan.tasks if task != WORKFLOW]
    evaluations = {
        subject.name: {
            task: results.read(plan.folder(subject.name, task), [task], base=plan.base_digest, adapter=subject.digest)
            for task in own
        }
        for subject in plan.subjects
    }
    samples, facts = workflow.read(plan) if WORKFLOW in plan.tasks else ({}, {})
    files = {subject.name: plan.fingerprint(subject.name) for subject in plan.subjects[1:]}
    fingerprints = {
        name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()
    }
    return Measured(evaluations, samples, facts, fingerprints)


def write(out: Path, plan: Plan, measured: Measured, found: Sequence[Found], identity: BaseIdentity) -> None:
    """results.json, samples/*.jsonl, tasks/ as lm-eval wrote them, and adapters/: what promotion and a reader need."""
    for name, samples in measured.samples.items():
        jsonl.write(out / "samples" / f"{name}.jsonl", (sample.to_row() for sample in samples))
    for subject in plan.subjects:
        for task in plan.tasks:
            shutil.copytree(folder := plan.folder(subject.name, task), out / "tasks" / subject.name / folder.name)
    for subject, one in zip(plan.subjects[1:], found, strict=True):
        shutil.copytree(one.folder, out / "adapters" / subject.name)
    written: dict[str, Any] = {
        "asked": plan.settings.model_dump(mode="json", include=set(ASKED)),
        "base": {
            "name": identity.name,
            "revision": identity.revision,
            "digest": identity.digest,
            **_summary_of(BASE, measured),
        },
        "adapters": {
            subject.name: {
                "digest": subject.digest,
                "path": f"adapters/{subject.name}",
                "training_run": one.training_run,
                "fingerprint": measured.fingerprints.get(subject.name, {}),
                **_summary_of(subject.name, measured),
            }
            for subject, one in zip(plan.subjects[1:], found, strict=True)
        },
    }
    if measured.samples:
        written["scorer"], written["judge"] = measured.facts["scorer"], measured.facts["judge"]
        if measured.looked:
            written["looked"] = measured.looked.to_dict()
        written["fixed"] = {name: summary(own) for name, own in measured.samples.items() if name.startswith("fixed_")}
    (out / "results.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _summary_of(subject: str, measured: Measured) -> dict[str, Any]:
    own = measured.samples.get(subject)
    told = {
        one.task: {"metric": one.metric, "value": one.value, "stderr": one.stderr, "n": one.n}
        for evaluation in measured.evaluations.get(subject, {}).values()
        for one in evaluation.tasks
    }
    return (summary(own) if own else {}) | {"tasks": told}


def metrics(measured: Measured) -> dict[str, float]:
    """`gsm8k/exact_match` of the adapter, and of base and of several adapters `NAME/gsm8k/exact_match`."""
    names = list(measured.evaluations)
    alone = names[-1] if len(names) <= 2 else ""
    found: dict[str, float] = {}
    for name, evaluations in measured.evaluations.items():
        prefix = "" if name == alone else f"{name}/"
        for evaluation in evaluations.values():
            found |= {f"{prefix}{key}": value for key, value in results.metrics(evaluation).items()}
    for name, own in measured.samples.items():
        called = "adapter" if name == alone != BASE else name
        found |= {f"workflow/{called}/{key}": value for key, value in workflow_metrics(own).items()}
    if looked := measured.looked:
        found |= {"workflow/asked": float(looked.asked), "workflow/saved": float(looked.saved)}
    return found


def metrics_of(subject: str, measured: Measured) -> dict[str, float]:
    """What was measured of one subject, as `gsm8k/exact_match` and `workflow/accuracy`."""
    own = measured.samples.get(subject, [])
    found = {f"workflow/{key}": value for key, value in (workflow_metrics(own) if own else {}).items()}
    for evaluation in measured.evaluations[subject].values():
        found |= results.metrics(evaluation)
    return found


def facts(measured: Measured) -> dict[str, str]:
    """n, few-shot, version and hash of each of lm-eval's tasks, and the scorer of workflows, for tags."""
    found: dict[str, str] = {lineage.SCORER: measured.facts["scorer"]} if measured.samples else {}
    for evaluation in next(iter(measured.evaluations.values()), {}).values():
        found |= results.facts(evaluation)
    return found


def flips(plan: Plan, measured: Measured, examples: Sequence[Example]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Tables of the questions that base or adapter alone has right, by task; none where single ones have no score.

    `examples` are those of workflows.
    """
    for subject in plan.subjects[1:]:
        for task, evaluation in measured.evaluations[subject.name].items():
            before = measured.evaluations[BASE][task].samples
            keys = {leaf.task: leaf.metric for one in evaluation.tasks for leaf in one.leaves()}
            rows: list[Mapping[str, Any]] = [
                {"task": leaf} | row
                for leaf, file in evaluation.samples.items()
                if scores_questions(file, keys[leaf])
                for row in differences(before[leaf], file, keys[leaf])
            ]
            if rows:
                yield f"differences/{subject.name}_{Path(task).stem}.json", rows
        if measured.samples:
            pair = measured.samples[BASE], measured.samples[subject.name]
            rows = [{"task": WORKFLOW} | row for row in workflow.differences(*pair, examples)]
            if rows:
                yield f"differences/{subject.name}_{WORKFLOW}.json", rows


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    scores = [sample.score for sample in samples if sample.score is not None]
    low, high = gate.interval(scores)
    by_kind = {
        kind: statistics.fmean(own)
        for kind in KINDS
        if (own := [s.score for s in samples if s.kind == kind and s.score is not None])
    }
    return {
        "n": len(scores),
        "unscored": len(samples) - len(scores),
        "accuracy": statistics.fmean(scores) if scores else None,
        "interval": [low, high],
        "by_kind": by_kind,
        "valid_share": sum(sample.valid for sample in samples) / len(samples),
    }


def workflow_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    said = summary(samples)
    found = {f"accuracy_{kind}": value for kind, value in said["by_kind"].items()}
    found |= {"valid_share": said["valid_share"], "unscored": float(said["unscored"])}
    if said["accuracy"] is None:
        return found
    low, high = said["interval"]
    return found | {"accuracy": said["accuracy"], "accuracy_low": low, "accuracy_high": high}


def show(measured: Measured) -> None:
    console = Console()
    if measured.samples:
        rows = {name.removeprefix("fixed_"): summary(own) for name, own in measured.samples.items()}
        console.print(accuracy_table("accuracy of workflows on the held-out split", rows))
        if looked := measured.looked:
            console.print(f"{looked}; {looked.saved * len(rows)} answers saved.", highlight=False, soft_wrap=True)
    if any(measured.evaluations.values()):
        console.print(task_table(measured))


def task_table(measured: Measured) -> Table:
    """Each task's primary metric and its standard error, a column for each subject."""
    table = Table("task", "metric", "n", *measured.evaluations, title="lm-evaluation-harness")
    for name, first in next(iter(measured.evaluations.values())).items():
        for row, one in enumerate(first.tasks):
            found = [evaluations[name].tasks[row] for evaluations in measured.evaluations.values()]
            table.add_row(one.task, one.metric, str(one.n), *map(_shown, found))
    return table


def _shown(one: TaskResult) -> str:
    return f"{one.value:.4f}" if one.stderr is None else f"{one.value:.4f} ± {one.stderr:.4f}"


def accuracy_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Summaries by name: accuracy by kind and in all, its interval, the share of valid ones; fits into 80 columns."""
    table = Table(title=title)
    for column in ("", *KINDS, "all", "95 %", "valid"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, said in rows.items():
        table.add_row(name, *_cells(said))
    return table


def _cells(said: Mapping[str, Any]) -> list[str]:
    """What has no score is a dash."""
    shares = [said["by_kind"].get(kind) for kind in KINDS]
    low, high = said["interval"]
    return [
        *("-" if share is None else f"{share:.0%}" for share in shares),
        "-" if said["accuracy"] is None else f"{said['accuracy']:.1%}",
        f"{100 * low:.0f}-{100 * high:.0f}",
        f"{said['valid_share']:.0%}",
    ]
