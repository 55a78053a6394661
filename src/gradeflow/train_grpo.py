"""Train a LoRA adapter with GRPO: the policy writes workflows or works on modeling tasks, the environment grades it.

The best checkpoint by validation is the result. Started again after an interruption, the stage goes on in the same run.
"""

import math
import shutil
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from gradeflow import (
    adapter,
    dataset,
    disk,
    fingerprint,
    models,
    registry,
    tracking,
)
from gradeflow.adapter import BaseIdentity
from gradeflow.background import Background
from gradeflow.errors import AdapterError, TooManyFaults
from gradeflow.grpo import checkpoint, loop, works
from gradeflow.grpo.cautions import cautions
from gradeflow.grpo.environment import Environment
from gradeflow.grpo.rollouts import Batch
from gradeflow.grpo.works import Work
from gradeflow.params import Params
from gradeflow.types import Example, Rollout, Sample
from gradeflow.workflow.run import FAILURES

# A file in checkpoints that have been validated.
VALIDATED = "validated"
FAULTS = "faults/"
_SOMETIMES = {"train/entropy": "entropy", "train/log_prob_gap": "log_prob_gap"}
"""Metrics that a step need not have, and what TRL calls them: none of an entropy, where there was nothing to learn."""
VALIDATION = "val_accuracy"


def main(params: Params) -> None:
    """Train an adapter, or say which finished run has made the same one."""
    with works.opened(params) as work:
        params = _with_steps(params, len(work.train.examples))
        identity = models.identify(params.base)
        mark = fingerprint.of(params, work.sections, identity.digest, work.train.md5, work.validation.md5)
        tracking.connect(params.tracking, Path())
        if (done := tracking.find_run("train_grpo", mark)) is not None:
            tracking.note_reuse("train_grpo", done)
            print(f"train_grpo: nothing has changed; reused run {done}")
            return
        resume = tracking.find_unfinished("train_grpo", mark)
        tree = params.model_dump(mode="json")
        with Background() as background:
            background.run(work.require_ready())
            background.run(loop.require_ready(params.train))
            with tracking.start_run("train_grpo", tree, resume=resume, fingerprint=mark, apart=True) as run:
                _run(params, work, identity, background, run)


def _run(params: Params, work: Work, identity: BaseIdentity, background: Background, run: tracking.Run) -> None:
    registry.record_prompts(run, work.prompts)
    for data in (work.train, work.validation):
        run.log_dataset(data.path.name, data.path, data.md5, data.split, len(data.examples))
    for path in dataset.described(work.train):
        run.log_artifact(path, "dataset")
    run.log_figure(dataset.figure([work.train, work.validation]), "dataset/mixture.png")
    folder = Path("runs/train_grpo") / run.id
    environment = work.environment()
    try:
        with disk.watched(folder):
            _train(params, work, identity, environment, background, run, folder)
    finally:
        background.run(environment.close())


def _with_steps(params: Params, questions: int) -> Params:
    """`train.epochs` in steps."""
    train = params.train
    if not train.epochs:
        return params
    steps = math.ceil(train.epochs * questions / train.prompts_per_step) * train.ppo_epochs
    return params.model_copy(update={"train": train.model_copy(update={"max_steps": steps, "epochs": 0})})


def _train(
    params: Params,
    work: Work,
    identity: BaseIdentity,
    environment: Environment,
    background: Background,
    run: tracking.Run,
    folder: Path,
) -> None:
    import torch

    torch.manual_seed(params.train.seed)
    base, tokenizer = models.load(params.base, params.train.dtype)
    model = loop.attach_adapter(base, params.train.lora).to(models.device())
    known = cautions(params)
    run.set_tags(
        {
            "gradeflow.base.name": identity.name,
            "gradeflow.base.revision": identity.revision,
            "gradeflow.base.digest": identity.digest,
            **environment.tags(),
            "gradeflow.cautions": "\n".join(known),
        }
    )
    course = loop.Course(
        model, tokenizer, identity, work.train.examples, environment, background, folder / "checkpoints"
    )
    with Progress() as progress:
        for caution in known:
            progress.console.print(f"warning: {caution}", style="yellow", highlight=False)
        questions = work.validation.examples[: params.train.val_samples]
        loop.require_room(course, [*course.examples, *questions], params.train)
        watcher = Watcher(params, course, questions, run, progress, folder, tracking.read_facts(run.id).latest)
        if watcher.catch_up() < params.train.max_steps:  # the trainer would take one more step
            loop.train(course, params.train, watcher)
    watcher.finish()


@dataclass
class Watcher:
    """Writes down in MLflow what the loop reports, validates checkpoints, and keeps the best one."""

    params: Params
    course: loop.Course
    validation: Sequence[Example]
    run: tracking.Run
    progress: Progress
    folder: Path
    before: Mapping[str, tracking.Point]
    """The newest points of a run that goes on. A step or validation that it has is done again, and not told again."""
    task: Any = None

    def __post_init__(self) -> None:
        self.causes = {name.removeprefix(FAULTS) for name in self.before if name.startswith(FAULTS)}
        """Of faults that the run has had; they count 0 from then on where they do not happen."""

    def step(self, number: int, logs: Mapping[str, float], batch: Batch) -> None:
        metrics = step_metrics(number, logs, batch, self.params.workflow.operators)
        metrics |= fault_metrics(batch, self.causes)
        self.causes |= {name.removeprefix(FAULTS) for name in metrics if name.startswith(FAULTS)}
        if not self._has("train/step", number):
            if number % self.params.train.eval_every == 0:
                self._show(batch, number)
            self.run.log_metrics(metrics | self._asked(), step=number)  # last: with them the run has all of the step
        if self.task is None:
            self.task = self.progress.add_task("train_grpo", total=self.params.train.max_steps)
        said = f"train_grpo  accuracy {metrics['train/accuracy']:.0%}  valid {metrics['rollouts/valid_share']:.0%}"
        self.progress.update(self.task, completed=number, description=said)

    def _has(self, metric: str, number: int) -> bool:
        return metric in self.before and self.before[metric].step >= number

    def _asked(self) -> dict[str, float]:
        """What the run has asked of its models so far, what was done again after an interruption too."""
        before = {name: point.value for name, point in self.before.items() if name.startswith("llm/")}
        now = self.course.environment.figures()
        return {name: before.get(name, 0.0) + now.get(name, 0.0) for name in {*before, *now}}

    def _show(self, batch: Batch, number: int) -> None:
        rows = [rollout_row(rollout) for rollout in batch.rollouts]
        self.run.log_table(f"rollouts/step_{number:06d}.json", rows[: self.params.train.log_rollouts])
        judge = self.course.environment.judge
        for place, group in enumerate(batch.groups[: self.params.train.trace_rollouts]):
            self.run.log_rollout_trace(group[0], number, judge.model if judge else "", name=f"{number}/{place}")

    def catch_up(self) -> int:
        """Validate what has not been: the start, or a checkpoint that was written last. Returns its step."""
        last = checkpoint.newest(self.course.folder)
        if last is None:
            if not self._has(VALIDATION, 0):
                self.validate(0)
            return 0
        number = checkpoint.number_of(last)
        if not (last / VALIDATED).exists():
            self.course.model.load_adapter(str(last), "default", is_trainable=True)
            self.checkpoint(number, last)
        return number

    def checkpoint(self, number: int, folder: Path) -> None:
        score = self.validate(number)
        self.run.log_artifact(folder / "adapter_model.safetensors", f"checkpoints/step_{number}")
        self.run.log_artifact(folder / adapter.CONFIG, f"checkpoints/step_{number}")
        best, rank = self._best(), score if self._acts(folder) else -math.inf
        if best is None or rank >= best[0]:
            self._keep(folder, number, rank)
        (folder / VALIDATED).touch()

    def _acts(self, folder: Path) -> bool:
        """Whether it changes the base: none does after the first update of a warm-up, or back at the start."""
        try:
            adapter.validate(folder, self.course.identity)
        except AdapterError:
            return False
        return True

    def collapse(self, number: int, reason: str) -> None:
        self.run.set_tags({f"gradeflow.collapse.step_{number}": reason})
        self.progress.console.print(f"step {number}: collapsed: {reason}")

    def validate(self, number: int) -> float:
        """Mean score of greedy workflows on the validation questions; unscored ones are left out and counted."""
        played = loop.episodes_of(self.course, self.params.train).play(self.validation, number)
        samples = [one.sample for one in played]
        metrics = validation_metrics(samples, statistics.fmean(one.cost for one in played))
        if not self._has(VALIDATION, number):
            self.run.log_table(f"validation/step_{number:06d}.json", [sample.to_row() for sample in samples])
        if VALIDATION not in metrics:
            raise TooManyFaults(
                f"step {number}: no validation question has a score ({_counts(s.fault for s in samples)}). When "
                f"{self.course.environment.needs} answer again, the same command goes on from the last checkpoint",
                cause="validation",
            )
        if not self._has(VALIDATION, number):
            self.run.log_metrics(metrics, step=number)
        self.progress.console.print(
            f"step {number}: validation accuracy {metrics['val_accuracy']:.1%}, valid {metrics['val_success_rate']:.1%}"
        )
        return metrics[VALIDATION]

    def _best(self) -> tuple[float, int] | None:
        """Score and step of the best checkpoint so far; of equal ones the later."""
        scores = [file.read_text().split() for file in self.folder.glob("best-*/score.txt")]
        return max(((float(score), int(number)) for score, number in scores), default=None)

    def _keep(self, folder: Path, number: int, score: float) -> None:
        fresh, best = self.folder / "part", self.folder / f"best-{number}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for name in ("adapter_model.safetensors", adapter.CONFIG):
            shutil.copy2(folder / name, fresh / name)
        (fresh / "score.txt").write_text(f"{score} {number}")
        shutil.rmtree(best, ignore_errors=True)
        fresh.rename(best)
        for other in self.folder.glob("best-*"):
            if other != best:
                shutil.rmtree(other)

    def finish(self) -> None:
        """Check that the best adapter is whole and changes the model, and make it the run's result."""
        best = self._best()
        assert best is not None
        score, number = best
        folder = self.folder / f"best-{number}"
        facts = adapter.validate(folder, self.course.identity)
        self.course.model.load_adapter(str(folder), "best")
        self.course.model.set_adapter("best")
        adapter.fingerprint(self.course.model, adapter.default_probes(len(self.course.tokenizer)))
        result = self.folder / "adapter"
        shutil.rmtree(result, ignore_errors=True)
        shutil.copytree(folder, result, ignore=shutil.ignore_patterns("score.txt"))
        self.run.log_artifacts(result, "adapter")
        self.run.set_tags({"gradeflow.adapter.digest": facts.digest, "gradeflow.adapter.step": str(number)})
        if not self._has("best/step", 0):
            self.run.log_metrics({"best/val_accuracy": score, "best/step": number})
        self.progress.console.print(f"best checkpoint: step {number}, adapter {facts.digest[:12]}, in {result}")


def step_metrics(number: int, logs: Mapping[str, float], batch: Batch, operators: Sequence[str]) -> dict[str, float]:
    """One training step under the names that the original's users know, and what TRL reports beside them.

    Counts and means are over all groups of the step, those that taught nothing too.
    What did not happen counts 0: left out, it would keep its last value in MLflow, and be missing beside other runs.
    """
    rollouts = [rollout for group in batch.asked for rollout in group]
    figures = batch.figures()
    samples = [rollout.sample for rollout in rollouts]
    scored = [sample for sample in samples if sample.score is not None]
    scores = [sample.score or 0.0 for sample in scored]
    staleness = [(number - 1) - one.version for one in rollouts]
    metrics = {
        "train/step": float(number),
        "train/loss": logs.get("loss", 0.0),
        "train/kl_div": logs.get("kl", 0.0),
        "train/temperature": statistics.fmean(one.temperature for one in rollouts),
        "train/learning_rate": logs.get("learning_rate", 0.0),
        "train/grad_norm": logs.get("grad_norm", 0.0),
        "train/clip_share": logs.get("clip_ratio/region_mean", 0.0),
        **{name: logs[said] for name, said in _SOMETIMES.items() if said in logs},
        "train/step_seconds": logs.get("step_time", 0.0),
        "train/waited_seconds": batch.waited,
        "train/staleness": statistics.fmean(staleness),
        "train/staleness_max": float(max(staleness)),
        "train/completion_tokens": figures["completion_tokens"],
        "train/dead_group_share": figures["dead_group_share"],
        "train/num_total": float(len(samples)),
        "train/num_correct": float(sum(score == 1 for score in scores)),
        "rollouts/valid_share": figures["valid_share"],
    }
    if scores:
        metrics |= {
            "train/avg_reward": figures["reward"],
            "train/max_reward": max(scores),
            "train/min_reward": min(scores),
            "train/accuracy": _share(score == 1 for score in scores),
            "train/avg_correctness_score": statistics.fmean(scores),
        }
    for kind in sorted({sample.kind for sample in scored}):
        own = [sample.score or 0.0 for sample in scored if sample.kind == kind]
        metrics |= {
            f"train/accuracy_{kind}": _share(score == 1 for score in own),
            f"train/avg_score_{kind}": statistics.fmean(own),
            f"train/count_{kind}": float(len(own)),
            f"sample/{kind}/correctness": own[0],
            f"sample/{kind}/reward": own[0],
        }
    judged = [sample.score or 0.0 for sample in scored if sample.by == "judge"]
    metrics["judge/count"] = float(len(judged))
    if judged:
        metrics["judge/score"] = statistics.fmean(judged)
    metrics |= {name: value for name, value in logs.items() if name.startswith(("judge/", "guard/"))}
    failures = dict.fromkeys(FAILURES, 0) | _counts(s.failure for s in samples)
    metrics |= {f"failures/{name}": float(count) for name, count in failures.items()}
    return metrics | {f"operators/{name}": _share(name in sample.operators for sample in samples) for name in operators}


def fault_metrics(batch: Batch, causes: Collection[str]) -> dict[str, float]:
    """What share of all rollouts of a step has no score, replaced ones too, and for which causes."""
    samples = [rollout.sample for group in batch.asked for rollout in group]
    counts = dict.fromkeys(causes, 0) | _counts(sample.fault for sample in samples)
    return {
        "rollouts/replaced_groups": float(len(batch.replaced)),
        "rollouts/unscored_share": _share(sample.score is None for sample in samples),
        **{f"{FAULTS}{cause}": count / len(samples) for cause, count in counts.items()},
    }


def validation_metrics(samples: Sequence[Sample], cost: float) -> dict[str, float]:
    """Figures of one validation; without a single score there is no accuracy, rather than one of 0."""
    scored = [sample for sample in samples if sample.score is not None]
    scores = [sample.score or 0.0 for sample in scored]
    metrics = {
        "val_num_correct": float(sum(score == 1 for score in scores)),
        "val_num_total": float(len(samples)),
        "val_avg_cost": cost,
        "val_success_rate": _share(sample.valid for sample in samples),
    }
    if scores:
        metrics |= {"val_accuracy": statistics.fmean(scores), "val_avg_correctness": statistics.fmean(scores)}
    for kind in sorted({sample.kind for sample in scored}):
        metrics[f"val_accuracy_{kind}"] = statistics.fmean(s.score or 0.0 for s in scored if s.kind == kind)
    return metrics


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    sample = rollout.sample
    return {
        "id": sample.example_id,
        "kind": sample.kind,
        "problem": rollout.example.problem,
        "workflow": sample.completion,
        "operators": ", ".join(sample.operators),
        "answer": sample.answer,
        "reference": rollout.example.ground_truth,
        "score": sample.score,
        "by": sample.by,
        "judged": sample.judged,
        "reason": rollout.reason,
        "failure": sample.failure,
        "fault": sample.fault,
    }


def _share(values: Any) -> float:
    found = [bool(value) for value in values]
    return sum(found) / len(found) if found else 0.0


def _counts(names: Any) -> dict[str, int]:
    return dict(Counter(name for name in names if name))
