"""Challenger against champion: a paired test over the saved samples of an evaluation moves the alias, or not.

Without a champion the challenger is compared with the base. The decision is an MLflow run with the full
report; the aliases are `candidate` (registered last), `challenger` (refused last), `champion` and `previous`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gradeflow import adapter, digest, gate, lineage, registry, tracking
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import PromotionError
from gradeflow.params import Params
from gradeflow.registry import Version
from gradeflow.types import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT = 12
MIXED = "data/mixed/"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An adapter with its samples in an evaluation run."""

    digest: str
    path: str
    training_run: str
    step: int
    samples: tuple[Sample, ...]

    @property
    def mean(self) -> float:
        scores = [sample.score for sample in self.samples if sample.score is not None]
        return sum(scores) / len(scores) if scores else 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    run_id: str
    scorer: str
    judge: Mapping[str, str]
    base: BaseIdentity
    base_samples: tuple[Sample, ...]
    adapters: tuple[Evaluated, ...]


@dataclass(frozen=True, slots=True)
class Rival:
    """What the challenger has to beat: the champion, or the base where there is none."""

    label: str
    scorer: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Case:
    evaluation: Evaluation
    challenger: Evaluated
    champion: Version | None
    rival: Rival
    decision: gate.Decision


def main(params: Params, *, evaluation: str = "", dry_run: bool = False) -> None:
    """Promote the best adapter of an evaluation run (by default the newest), if the gate says so.

    Raises:
        PromotionError: there is nothing to decide on, or it cannot be decided.
        AdapterError: the adapter's files are broken, do nothing, or belong to another base.
    """
    tracking.connect(params.tracking, Path())
    found = _read_evaluation(evaluation or _newest_evaluation())
    champion = registry.get_alias(params.promote.model, "champion")
    challenger = _challenger(found, champion)
    if champion and champion.digest == challenger.digest:
        _note_reuse(champion.tags.get(lineage.PROMOTION_RUN), dry_run=dry_run)
        _say(f"{champion} is the champion already; nothing to promote.")
        return
    case = _case(found, challenger, champion, params)
    fingerprint = _fingerprint(case, params)
    earlier = None if case.decision.promote else tracking.find_run("promote", fingerprint)
    _show(case)
    if dry_run:
        _say(f"A dry run, nothing was moved; it would have been: {_verdict(case)}")
    elif earlier:
        _note_reuse(earlier, dry_run=dry_run)
        _say(f"Decided before, in run {earlier}. {_verdict(case)}")
    else:
        _carry_out(case, params, fingerprint)
        _say(_verdict(case))


def _note_reuse(run_id: str | None, *, dry_run: bool) -> None:
    if run_id and not dry_run:
        tracking.note_reuse("promote", run_id)


def _newest_evaluation() -> str:
    found = tracking.find_stage("evaluate")
    if found is None:
        raise PromotionError(
            "no finished evaluation run in this experiment. Run `gradeflow evaluate`, or give --evaluation"
        )
    return found


def _read_evaluation(run_id: str) -> Evaluation:
    written = tracking.read_text(run_id, "results.json")
    try:
        results = json.loads(written)
        base = results["base"]
        identity = BaseIdentity(base["name"], base.get("revision") or "", base["digest"])
        if not results.get("scorer"):
            raise PromotionError(
                f"evaluation run {run_id} has no graded workflows, which promotion compares: name another with "
                "--evaluation, or evaluate with `workflow` among evaluate.tasks"
            )
        return Evaluation(
            run_id=run_id,
            scorer=results["scorer"],
            judge=results.get("judge", {}),
            base=identity,
            base_samples=_samples(run_id, "base"),
            adapters=tuple(_evaluated(run_id, name, entry) for name, entry in results["adapters"].items()),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PromotionError(f"evaluation run {run_id}: results.json lacks or garbles {error}") from None


def _evaluated(run_id: str, name: str, entry: Mapping[str, Any]) -> Evaluated:
    return Evaluated(
        entry["digest"],
        entry["path"],
        entry["training_run"],
        int(entry.get("step", 0)),
        _samples(run_id, name),
    )


def _samples(run_id: str, name: str) -> tuple[Sample, ...]:
    rows = tracking.read_text(run_id, f"samples/{name}.jsonl").split("\n")
    return tuple(Sample.from_row(json.loads(row)) for row in rows if row)


def _challenger(evaluation: Evaluation, champion: Version | None) -> Evaluated:
    """The best adapter of the evaluation; the champion only where it is alone there."""
    if not evaluation.adapters:
        raise PromotionError(f"evaluation run {evaluation.run_id} has no adapter: it measured the base alone")
    others = [one for one in evaluation.adapters if champion is None or one.digest != champion.digest]
    return max(others or evaluation.adapters, key=lambda one: one.mean)


def _case(evaluation: Evaluation, challenger: Evaluated, champion: Version | None, params: Params) -> Case:
    rival = _rival(evaluation, champion)
    scorers = (evaluation.scorer, rival.scorer)
    decision = gate.decide(challenger.samples, rival.samples, params.promote, scorers=scorers)
    return Case(evaluation, challenger, champion, rival, decision)


def _rival(evaluation: Evaluation, champion: Version | None) -> Rival:
    """The champion's samples: from this evaluation if it took part, else from the one of its lineage."""
    if champion is None:
        return Rival("base", evaluation.scorer, evaluation.base_samples)
    here = [one for one in evaluation.adapters if one.digest == champion.digest]
    if here:
        return Rival("champion", evaluation.scorer, here[0].samples)
    run_id = champion.tags.get(lineage.EVALUATION_RUN)
    if run_id is None:
        raise PromotionError(f"{champion} has no tag {lineage.EVALUATION_RUN}: evaluate it beside the challenger")
    samples = _samples(run_id, champion.digest[:SHORT])
    return Rival("champion", champion.tags.get(lineage.SCORER, ""), samples)


def _fingerprint(case: Case, params: Params) -> str:
    return digest.of_json(
        {
            "evaluation": case.evaluation.run_id,
            "challenger": case.challenger.digest,
            "champion": case.champion.digest if case.champion else None,
            "policy": params.promote.model_dump(mode="json"),
        }
    )


def _carry_out(case: Case, params: Params, fingerprint: str) -> None:
    """Register the challenger, record the decision, and move the aliases, in this order."""
    with tracking.start_run(
        "promote",
        {"promote": params.promote.model_dump(mode="json")},
        resume=tracking.find_unfinished("promote", fingerprint),
        fingerprint=fingerprint,
    ) as run:
        with TemporaryDirectory() as folder:
            version = _register(case.evaluation, case.challenger, params, Path(folder))
        run.log_metrics({f"promotion/{name}": value for name, value in _numbers(case.decision).items()})
        run.log_text(_report(case, version), "report.json")
        run.log_figure(_figure(case), "differences.png")
        registry.describe(version, f"{_verdict(case)} Run {run.id}.")
        if case.decision.promote:
            _crown(version, case, run.id)
        else:
            registry.set_alias(version, "challenger")


def _register(evaluation: Evaluation, challenger: Evaluated, params: Params, into: Path) -> Version:
    folder = tracking.download_artifact(evaluation.run_id, challenger.path, into)
    facts = adapter.validate(folder, evaluation.base)
    if facts.digest != challenger.digest:
        raise PromotionError(
            f"evaluation run {evaluation.run_id}: {challenger.path} has digest {facts.digest[:SHORT]}, "
            f"but {challenger.digest[:SHORT]} was evaluated"
        )
    version = registry.register(
        folder,
        params.promote.model,
        digest=challenger.digest,
        run_id=challenger.training_run,
        step=challenger.step,
        tags=_lineage(evaluation, challenger),
    )
    registry.set_alias(version, "candidate")
    return version


def _lineage(evaluation: Evaluation, challenger: Evaluated) -> dict[str, str]:
    trained = tracking.read_tags(challenger.training_run)
    read = tracking.read_datasets(challenger.training_run) | tracking.read_datasets(evaluation.run_id)
    mixed = {path: md5 for path, md5 in lineage.dvc_lock_digests(Path()).items() if path.startswith(MIXED)}
    git = {name: trained[name] for name in (tracking.GIT_COMMIT, tracking.GIT_DIRTY) if name in trained}
    return lineage.collect(
        lineage.Sources(
            base=evaluation.base,
            training_run=challenger.training_run,
            evaluation_run=evaluation.run_id,
            git=git,
            data=read,
            dvc=mixed,
            scorer=evaluation.scorer,
            judge_model=evaluation.judge.get("model", ""),
            judge_prompt=evaluation.judge.get("prompt", ""),
        )
    )


def _crown(version: Version, case: Case, run_id: str) -> None:
    """The champion's alias moves last: until then the old champion is in place, and a second call goes on."""
    registry.set_tags(version, {lineage.PROMOTION_RUN: run_id})
    if "challenger" in version.aliases:
        registry.delete_alias(version.name, "challenger")
    if case.champion:
        registry.set_alias(case.champion, "previous")
    registry.set_alias(version, "champion")


def _numbers(decision: gate.Decision) -> dict[str, float]:
    plain = asdict(decision)
    low, high = plain.pop("interval")
    del plain["reasons"]
    return {name: float(value) for name, value in plain.items()} | {
        "interval_low": low,
        "interval_high": high,
    }


def _report(case: Case, version: Version) -> str:
    pairs = gate.pair(case.challenger.samples, case.rival.samples)
    report = asdict(case.decision) | {
        "version": version.version,
        "challenger": case.challenger.digest,
        "champion": case.champion.digest if case.champion else None,
        "rival": case.rival.label,
        "evaluation_run": case.evaluation.run_id,
        "scorer": case.evaluation.scorer,
        "won": [pair.challenger.example_id for pair in pairs if (pair.difference or 0) > 0],
        "lost": [pair.challenger.example_id for pair in pairs if (pair.difference or 0) < 0],
    }
    return json.dumps(report, indent=2)


def _figure(case: Case) -> "Figure":
    """The paired difference of each kind with its interval."""
    from matplotlib.figure import Figure

    pairs = gate.pair(case.challenger.samples, case.rival.samples)
    kinds = {kind: values for kind, values in gate.by_kind(pairs).items() if len(values)}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row, values in enumerate(kinds.values()):
        axes.plot(gate.bootstrap(values), [row, row], color="tab:blue", linewidth=3)
        axes.plot(values.mean(), row, "o", color="tab:blue")
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_yticks(range(len(kinds)), [f"{kind} (n = {len(values)})" for kind, values in kinds.items()])
    axes.set_xlabel(f"score of the challenger minus that of the {case.rival.label}: mean, 95 % interval")
    axes.set_ylim(-0.5, len(kinds) - 0.5)
    return figure


def _show(case: Case) -> None:
    from rich.table import Table

    decision, rival = case.decision, case.rival.label
    table = Table("", "mean", "95 % interval", title=f"{case.challenger.digest[:SHORT]} against the {rival}")
    for label, mean, samples in (
        ("challenger", decision.mean_challenger, case.challenger.samples),
        (rival, decision.mean_champion, case.rival.samples),
    ):
        low, high = gate.interval([sample.score for sample in samples if sample.score is not None])
        table.add_row(label, f"{mean:.1%}", f"{low:.1%} to {high:.1%}")
    low, high = decision.interval
    table.add_row("difference", f"{decision.difference:+.1%}", f"{low:+.1%} to {high:+.1%}")
    _say(table)
    _say(
        f"{decision.n} questions: {decision.wins} won, {decision.losses} lost; "
        f"{decision.abstained} pairs without a score."
    )


def _verdict(case: Case) -> str:
    decided = "Promoted" if case.decision.promote else "Not promoted"
    return f"{decided} over the {case.rival.label}: {'; '.join(case.decision.reasons)}."


def _say(what: Any) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(what)
