"""Training while the judge fails: what abstaining saves, beside scoring a fault as a wrong answer.

    python perf/judge_faults.py --share 0.3 --seeds 0 1 2

Each arm is trained with the same settings, seeds and questions, and measured on the held-out questions by a judge that
does not fail. The failing judge is a stand-in around the real one: a share of its verdicts, drawn at random, is faulty.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradeflow import dataset, models, params
from gradeflow.errors import JudgeError
from gradeflow.gate import bootstrap
from gradeflow.grpo import loop
from gradeflow.grpo.environment import WorkflowEnvironment
from gradeflow.grpo.sample import complete, policy_prompts
from gradeflow.judge import Verdict
from gradeflow.scorer import Scorer
from gradeflow.types import Sample

Arm = Literal["no faults", "faults abstained", "faults scored 0"]


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


class Quiet:
    def __init__(self, arm: Arm, seed: int) -> None:
        self.said = f"{arm}, seed {seed}"

    def step(self, number: int, _: Mapping[str, float], groups: Sequence[loop.Group], *__: Any) -> None:
        scores = [rollout.sample.score for group in groups for rollout in group]
        mean = statistics.fmean(score or 0.0 for score in scores)
        unscored = scores.count(None)
        print(f"\r{self.said}: step {number}, reward {mean:.2f}, {unscored} without a score  ", end="", flush=True)

    def checkpoint(self, number: int, adapter: Path) -> None: ...


def trained(settings: params.Params, arm: Arm, share: float, runner: asyncio.Runner) -> list[Sample]:
    """Held-out samples of the adapter at the last step."""
    import torch

    environment = WorkflowEnvironment(settings)
    honest, seed = environment.scorer, settings.train.seed
    failing: Any = FailingJudge(environment.judge, arm, share, seed)
    try:
        torch.manual_seed(seed)
        base, tokenizer = models.load(settings.base)
        model = loop.attach_adapter(base, settings.train.lora)
        with tempfile.TemporaryDirectory() as folder:
            examples = dataset.read("train").examples
            course = loop.Course(model, tokenizer, examples, environment, Path(folder), runner.run)
            environment.scorer = Scorer(settings.scorer, environment.sandbox, failing)
            loop.train(course, settings.train, settings.workflow, Quiet(arm, seed))
        environment.scorer = honest
        held_out = dataset.read("test").examples
        prompts = policy_prompts(tokenizer, held_out, settings.workflow)
        texts = complete(model, tokenizer, prompts, max_tokens=settings.train.max_completion_tokens)
        with models.leaving_room():
            graded = runner.run(environment.grade_all(list(zip(texts, held_out, strict=True))))
        return [one.sample for one in graded]
    finally:
        runner.run(environment.close())


def accuracy(samples: Sequence[Sample], kind: str = "") -> float:
    return statistics.fmean(sample.score or 0.0 for sample in samples if kind in {"", sample.kind})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.3, help="share of verdicts that are faults")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="0: as in params.yaml")
    given = parser.parse_args()
    overrides = {"train.max_steps": str(given.steps)} if given.steps else {}
    arms: tuple[Arm, ...] = ("no faults", "faults abstained", "faults scored 0")
    found: dict[Arm, list[Sample]] = {arm: [] for arm in arms}
    with asyncio.Runner() as runner:
        for seed in given.seeds:
            settings = params.load(overrides=overrides | {"train.seed": str(seed)})
            for arm in arms:
                began = time.monotonic()
                samples = trained(settings, arm, given.share, runner)
                found[arm] += samples
                kinds = ", ".join(f"{kind} {accuracy(samples, kind):.0%}" for kind in sorted({s.kind for s in samples}))
                said = f"{arm}, seed {seed}: held-out {accuracy(samples):.1%} ({kinds})"
                print(f"\r{said}, {time.monotonic() - began:.0f} s", flush=True)
    clean = found["no faults"]
    for arm in arms[1:]:
        pairs = zip(found[arm], clean, strict=True)
        differences = np.array([(one.score or 0.0) - (other.score or 0.0) for one, other in pairs])
        low, high = bootstrap(differences)
        print(f"{arm}, against none: {differences.mean():+.1%}, 95 % from {low:+.1%} to {high:+.1%}")


if __name__ == "__main__":
    main()
