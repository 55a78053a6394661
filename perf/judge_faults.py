"""Training while the judge fails: what abstaining saves, beside scoring a fault as a wrong answer.

    python perf/judge_faults.py --share 0.3 --seeds 0 1 2
    python perf/judge_faults.py --kind text --steps 24 --every 3

Each arm is trained with the same settings, seeds and questions, and measured on the held-out questions by a judge that
does not fail, every few steps where that is asked for. With one kind of questions, `text`, the judge decides them all.
The failing judge is a stand-in around the real one: a share of its verdicts, drawn at random, is faulty.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from gradeflow import dataset, models, params
from gradeflow.background import Background
from gradeflow.errors import JudgeError
from gradeflow.gate import bootstrap
from gradeflow.grpo import loop
from gradeflow.grpo.environment import WorkflowEnvironment
from gradeflow.grpo.rollouts import Batch
from gradeflow.grpo.sample import complete, policy_prompts
from gradeflow.judge import Verdict
from gradeflow.scorer import Scorer
from gradeflow.types import KINDS, Sample

Arm = Literal["no faults", "faults abstained", "faults scored 0"]
ARMS: tuple[Arm, ...] = get_args(Arm)
Curve = dict[int, Sequence[Sample]]


class FailingJudge:
    """A stand-in: the real judge, but for a share of verdicts that are faults or, as the original had it, zeros."""

    def __init__(self, judge: Any, arm: Arm, share: float, seed: int) -> None:
        self.version = f"failing {judge.version}"
        self.most_seeds = judge.most_seeds
        self._judge = judge
        self._arm = arm
        self._share = share
        self._random = random.Random(seed)

    async def verdict(self, *asked: str, **more: Any) -> Verdict:
        verdict: Verdict = await self._judge.verdict(*asked, **more)
        if self._arm == "no faults" or self._random.random() >= self._share:
            return verdict
        if self._arm == "faults scored 0":
            return replace(verdict, correct=False)
        raise JudgeError("an injected fault", cause="injected")


class Watcher:
    def __init__(self, said: str, measure: Callable[[], Sequence[Sample]]) -> None:
        self.said = said
        self.curve: Curve = {}
        self._measure = measure

    def step(self, number: int, _: Mapping[str, float], batch: Batch) -> None:
        scores = [rollout.sample.score for rollout in batch.rollouts]
        mean = statistics.fmean(score or 0.0 for score in scores)
        unscored = scores.count(None)
        print(f"\r{self.said}: step {number}, reward {mean:.2f}, {unscored} without a score  ", end="", flush=True)

    def checkpoint(self, number: int, _: Path) -> None:
        self.curve[number] = self._measure()

    def collapse(self, number: int, reason: str) -> None:
        print(f"\r{self.said}: step {number}: {reason}", flush=True)


def trained(settings: params.Params, arm: Arm, share: float, kind: str, background: Background) -> Curve:
    """Held-out samples at each checkpoint, by its step."""
    import torch

    environment = WorkflowEnvironment(settings)
    honest, seed = environment.scorer, settings.train.seed
    failing_judge: Any = FailingJudge(environment.judge, arm, share, seed)
    failing = Scorer(settings.scorer, environment.sandbox, failing_judge)
    held_out = [example for example in dataset.read("test").examples if kind in {"", example.kind}]
    examples = [example for example in dataset.read("train").examples if kind in {"", example.kind}]
    try:
        torch.manual_seed(seed)
        base, tokenizer = models.load(settings.base)
        model = loop.attach_adapter(base, settings.train.lora)
        identity = models.identify(settings.base)
        prompts = policy_prompts(tokenizer, held_out, settings.workflow)

        def measure() -> Sequence[Sample]:
            texts = complete(model, tokenizer, prompts, max_tokens=settings.train.max_completion_tokens)
            environment.scorer = honest
            with models.leaving_room():
                graded = background.run(environment.grade_all(list(zip(texts, held_out, strict=True))))
            environment.scorer = failing
            return [one.sample for one in graded]

        watcher = Watcher(f"{arm}, seed {seed}", measure)
        with tempfile.TemporaryDirectory() as folder:
            course = loop.Course(model, tokenizer, identity, examples, environment, background, Path(folder))
            environment.scorer = failing
            loop.train(course, settings.train, watcher)
        return watcher.curve
    finally:
        background.run(environment.close())


def accuracy(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.score or 0.0 for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.3, help="share of verdicts that are faults")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="0: as in params.yaml")
    parser.add_argument("--every", type=int, default=0, help="measure every so many steps; 0: at the end")
    parser.add_argument("--kind", default="", choices=["", *KINDS], help="train and measure on questions of this kind")
    given = parser.parse_args()
    steps = given.steps or params.load().train.max_steps
    settings = {"train.max_steps": str(steps), "train.eval_every": str(given.every or steps)}
    found: dict[Arm, Curve] = {arm: {} for arm in ARMS}
    with Background() as background:
        for seed in given.seeds:
            seeded = params.load(overrides=settings | {"train.seed": str(seed)})
            for arm in ARMS:
                began = time.monotonic()
                curve = trained(seeded, arm, given.share, given.kind, background)
                for step, samples in curve.items():
                    found[arm][step] = [*found[arm].get(step, []), *samples]
                reached = " ".join(f"{accuracy(samples):.1%}" for samples in curve.values())
                print(f"\r{arm}, seed {seed}: held-out {reached}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{'step':16}" + "".join(f"{step:7}" for step in found["no faults"]))
    for arm, curve in found.items():
        print(f"{arm:16}" + "".join(f"{accuracy(samples):7.1%}" for samples in curve.values()))
    for arm in ARMS[1:]:
        print(f"{arm}, against none, 95 %:", end="")
        for step, clean in found["no faults"].items():
            pairs = zip(found[arm][step], clean, strict=True)
            differences = np.array([(one.score or 0.0) - (other.score or 0.0) for one, other in pairs])
            low, high = bootstrap(differences)
            print(f"  step {step} {differences.mean():+.1%} ({low:+.1%} to {high:+.1%})", end="")
        print()


if __name__ == "__main__":
    main()
