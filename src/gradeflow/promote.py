"""Challenger against champion: a paired test over the saved samples of an evaluation moves the alias, or not.

Without a champion the challenger is compared with the base. The decision is an MLflow run with the full
report; the aliases are `candidate` (registered last), `challenger` (refused last), `champion` and `previous`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradeflow import adapter, champions, digest, gate, lineage, registry, tracking
from gradeflow.champions import Overtaken
from gradeflow.errors import PromotionError, SettingsError, TrackingError
from gradeflow.evaluation.plan import WORKFLOW
from gradeflow.params import Params, Promote
from gradeflow.promotion import evidence, report
from gradeflow.promotion.evaluated import Evaluation, Subject, compare, look
from gradeflow.registry import Version

SHORT = 12
MIXED = "data/mixed/"
FORCED = "gradeflow.promotion.forced"
OVERTAKEN = "gradeflow.promotion.overtaken"


@dataclass(frozen=True, slots=True)
class Rival:
    """What the challenger has to beat: the champion, or the base where there is none."""

    label: str
    subject: Subject


@dataclass(frozen=True, slots=True)
class Case:
    """`objections` are against a promotion whatever the gate says; `after` is the move that made the champion."""

    challenger: Subject
    champion: Version | None
    after: int
    rival: Rival
    comparisons: Sequence[gate.Comparison]
    pairs: Sequence[gate.Pair]
    decision: gate.Decision
    objections: Sequence[str]
    forced: str = ""

    @property
    def is_won(self) -> bool:
        return self.decision.promote and not self.objections

    @property
    def verdict(self) -> str:
        reasons = [*self.objections, *([] if self.decision.promote and self.objections else self.decision.reasons)]
        said = f"over the {self.rival.label}: {'; '.join(reasons)}."
        if self.is_won:
            return f"Promoted {said}"
        return (
            f"Promoted by force, because: {self.forced}. Else not promoted {said}"
            if self.forced
            else f"Not promoted {said}"
        )


def main(params: Params, *, evaluation: str = "", dry_run: bool = False, force: bool = False, reason: str = "") -> None:
    """Promote the best adapter of an evaluation run (by default the newest), if the gate says so, or by force.

    Raises:
        PromotionError: there is nothing to decide on, or it cannot be decided.
        AdapterError: the adapter's files are broken, do nothing, or belong to another base.
    """
    if force != bool(reason.strip()):
        raise SettingsError('--force and --reason "..." go together: the reason is kept with the champion')
    tracking.connect(params.tracking, Path())
    with TemporaryDirectory() as scratch:
        found = Evaluation.read(evaluation or _newest_evaluation(), Path(scratch))
        while True:
            try:
                _decide(found, params, dry_run=dry_run, forced=reason.strip(), scratch=Path(scratch))
            except Overtaken as overtaken:
                _say(f"{overtaken}. Judging against it.")
            else:
                return


def _decide(found: Evaluation, params: Params, *, dry_run: bool, forced: str, scratch: Path) -> None:
    name = params.promote.model
    champion, after = champions.now(name) if dry_run else champions.current(name)
    challenger, among = _challenger(found, champion, params.promote)
    if champion and champion.digest == challenger.digest:
        if not dry_run:
            _repair(champion)
        _say(f"{champion} is the champion already; nothing to promote.")
        return
    case = _case(challenger, among, champion, after, params.promote, forced, scratch)
    fingerprint = _fingerprint(case, params)
    earlier = None if case.is_won or case.forced else tracking.find_run("promote", fingerprint)
    _show(case, params.promote)
    if dry_run:
        _say(f"A dry run, nothing was moved; it would have been: {case.verdict}")
    elif earlier:
        tracking.note_reuse("promote", earlier)
        _say(f"Decided before, in run {earlier}. {case.verdict}")
    else:
        _carry_out(case, params, fingerprint)
        _say(case.verdict)


def _newest_evaluation() -> str:
    found = tracking.find_stage("evaluate")
    if found is None:
        raise PromotionError(
            "no finished evaluation run in this experiment. Run `gradeflow evaluate`, or give --evaluation"
        )
    return found


def _challenger(evaluation: Evaluation, champion: Version | None, policy: Promote) -> tuple[Subject, int]:
    """The adapter that is best on the first target, and among how many; the champion only where it is alone there."""
    found = evaluation.subjects()
    if not found:
        raise PromotionError(f"evaluation run {evaluation.run_id} has no adapter: it measured the base alone")
    others = [one for one in found if champion is None or one.digest != champion.digest] or found
    return max(others, key=lambda one: one.mean(policy.targets[0])), len(others)


def _case(
    challenger: Subject,
    among: int,
    champion: Version | None,
    after: int,
    policy: Promote,
    forced: str,
    scratch: Path,
) -> Case:
    rival = _rival(challenger.evaluation, champion, scratch)
    tasks = [*policy.targets, *policy.guards]
    comparisons = [compare(task, challenger, rival.subject) for task in tasks]
    pairs = gate.pair(challenger.samples(), rival.subject.samples()) if WORKFLOW in tasks else ()
    decision = gate.decide(comparisons, policy, among=among, look=look(challenger, rival.subject, policy))
    objections = [_data_problem(challenger.training_run)] if policy.clean_data else []
    found = [one for one in objections if one]
    return Case(challenger, champion, after, rival, comparisons, pairs, decision, found, forced)


def _rival(evaluation: Evaluation, champion: Version | None, scratch: Path) -> Rival:
    """The champion's samples: from this evaluation if it took part, else from the one that it was promoted on."""
    if champion is None:
        return Rival("base", Subject(evaluation))
    move = champions.promotion(champion.name, champion.version)
    run_id = move.evaluation if move and move.evaluation else champion.tags.get(lineage.EVALUATION_RUN)
    here = _of(evaluation, champion)
    if here is None and run_id and (evaluated := _of(Evaluation.read(run_id, scratch), champion)):
        here = evaluated
    if here is None:
        raise PromotionError(f"{champion} is in no evaluation that is known: evaluate it beside the challenger")
    return Rival("champion", here)


def _of(evaluation: Evaluation, version: Version) -> Subject | None:
    return next((one for one in evaluation.subjects() if one.digest == version.digest), None)


def _data_problem(training_run: str) -> str:
    """Why nothing is known of questions of the evaluation among the training rows; empty where there are none."""
    if not training_run:
        return "it came from a folder: nothing is known of its training data (promote.clean_data asks for that)"
    try:
        told = json.loads(tracking.read_text(training_run, evidence.DATA))
        is_clean = bool(told["config"]["decontaminate"])
    except (TrackingError, ValueError, KeyError, TypeError):
        return "its training run says nothing of what was removed from its data (promote.clean_data asks for that)"
    return "" if is_clean else "held-out questions were not kept out of its training data (mix.decontaminate was off)"


def _fingerprint(case: Case, params: Params) -> str:
    return digest.of_json(
        {
            "evaluation": case.challenger.evaluation.run_id,
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
        version = _register(case.challenger, params)
        run.log_metrics(report.numbers(case.decision))
        told = _report(case, version, params.promote)
        used = {one.evaluation.run_id: one.evaluation for one in (case.challenger, case.rival.subject)}
        rests_on = evidence.collect(used, told, case.challenger.training_run)
        run.log_text(told, evidence.REPORT)
        run.log_text(rests_on, evidence.NAME)
        run.log_table("flips.json", report.flips(case.pairs))
        run.log_figure(report.figure(case.comparisons, case.pairs, case.rival.label), "differences.png")
        if case.forced:
            run.set_tags({FORCED: case.forced})
        try:
            _move(case, version, run.id, digest.of_bytes(rests_on.encode()))
        except Overtaken:
            run.set_tags({OVERTAKEN: "true"})
            raise


def _move(case: Case, version: Version, run_id: str, rests_on: str) -> None:
    """The champion's alias moves last: until then the old champion is in place, and a second call goes on."""
    if case.is_won or case.forced:
        kind: champions.Kind = "promotion" if case.is_won else "forced"
        champions.move(
            version.name,
            version,
            after=case.after,
            kind=kind,
            why=case.verdict,
            run_id=run_id,
            evaluation=case.challenger.evaluation.run_id,
            evidence=rests_on,
        )
        if "challenger" in version.aliases:
            registry.delete_alias(version.name, "challenger")
    else:
        registry.set_alias(version, "challenger")
    registry.describe(version, f"{case.verdict} Run {run_id}.")


def _repair(champion: Version) -> None:
    """What was cut off after the move that made it champion."""
    move = champions.promotion(champion.name, champion.version)
    if move is None:
        return
    registry.describe(champion, f"{move.why} Run {move.run_id}.")
    if "challenger" in champion.aliases:
        registry.delete_alias(champion.name, "challenger")
    if tracking.read_facts(move.run_id).status == "FINISHED":
        tracking.note_reuse("promote", move.run_id)
        return
    with tracking.start_run("promote", {}, resume=move.run_id):
        _say(f"Run {move.run_id}, which was cut off, is complete.")


def _register(challenger: Subject, params: Params) -> Version:
    evaluation = challenger.evaluation
    facts = adapter.validate(challenger.folder, evaluation.base)
    if facts.digest != challenger.digest:
        raise PromotionError(
            f"evaluation run {evaluation.run_id}: adapters/{challenger.name} has digest {facts.digest[:SHORT]}, "
            f"but {challenger.digest[:SHORT]} was evaluated"
        )
    version = registry.register(
        challenger.folder,
        params.promote.model,
        digest=challenger.digest,
        run_id=challenger.training_run or evaluation.run_id,
        step=challenger.step,
        tags=_lineage(challenger) | _facts_of(challenger, facts),
    )
    registry.set_alias(version, "candidate")
    return version


def _facts_of(challenger: Subject, facts: adapter.AdapterFacts) -> dict[str, str]:
    """What a server wants to know before it loads the adapter."""
    known = {registry.RANK: str(facts.rank), registry.FINGERPRINT: challenger.fingerprint}
    return {name: value for name, value in known.items() if value}


def _lineage(challenger: Subject) -> dict[str, str]:
    evaluation = challenger.evaluation
    trained = tracking.read_tags(challenger.training_run) if challenger.training_run else {}
    runs = filter(None, (challenger.training_run, evaluation.run_id))
    read = {name: md5 for run in runs for name, md5 in tracking.read_datasets(run).items()}
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


def _report(case: Case, version: Version, policy: Promote) -> str:
    told: Mapping[str, Any] = asdict(case.decision) | {
        "verdict": case.verdict,
        "objections": list(case.objections),
        "forced": case.forced,
        "policy": policy.model_dump(mode="json"),
        "version": version.version,
        "challenger": case.challenger.digest,
        "champion": case.champion.digest if case.champion else None,
        "rival": case.rival.label,
        "evaluation_run": case.challenger.evaluation.run_id,
        "rival_evaluation_run": case.rival.subject.evaluation.run_id,
        "scorer": case.challenger.evaluation.scorer,
        "won": [pair.challenger.example_id for pair in case.pairs if (pair.difference or 0) > 0],
        "lost": [pair.challenger.example_id for pair in case.pairs if (pair.difference or 0) < 0],
    }
    return json.dumps(told, indent=2)


def _show(case: Case, policy: Promote) -> None:
    title = f"{case.challenger.digest[:SHORT]} against the {case.rival.label}"
    _say(report.table(case.decision, case.rival.label, title))
    for line in report.notes(case.decision, policy.power):
        _say(line)


def _say(what: Any) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(what, markup=False)
