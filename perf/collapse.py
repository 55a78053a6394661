"""The published collapse, groups of two: what the guard makes of it.

    python perf/collapse.py
    python perf/collapse.py --seeds 0 1 2 --arms guarded --train.learning_rate 0.02

Both arms are trained with the same settings, seeds and questions. Settings are those of the original where they carry
over to the embedded base: groups of two, four questions a step, nearly no KL, no warm-up, a constant learning rate (the
base's own, as that of a 7B model would do nothing to it); --train.NAME VALUE changes one. The curves are of the
training's own rollouts. Before and after are of workflows that the policy samples for held-out questions, with one
seed: greedy, the embedded base hardly gets one right.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradeflow import dataset, models, params
from gradeflow.background import Background
from gradeflow.errors import CollapseError
from gradeflow.grpo import loop
from gradeflow.grpo.environment import WorkflowEnvironment
from gradeflow.grpo.rollouts import Batch
from gradeflow.grpo.sample import complete, policy_prompts
from gradeflow.types import Sample

ARMS = ("unguarded", "guarded")
LIKE_THE_ORIGINAL = {
    "train.group_size": "2",
    "train.prompts_per_step": "4",
    "train.kl_coef": "0.001",
    "train.warmup_steps": "0",
    "train.lr_schedule": "constant",
    "train.weight_decay": "0.01",
    "train.max_grad_norm": "1.0",
    "train.max_replaced_groups": "0",
    "train.micro_batch": "8",
    "train.val_samples": "120",
}


@dataclass
class Watcher:
    """Keeps the figures of each step, and what the guard did."""

    said: str
    figures: list[Mapping[str, float]] = field(default_factory=list)
    collapses: list[str] = field(default_factory=list)

    def step(self, number: int, logs: Mapping[str, float], batch: Batch) -> None:
        found = {**batch.figures(), "entropy": logs.get("entropy", 0.0), "kl": logs.get("kl", 0.0)}
        self.figures.append(found)
        shown = "  ".join(f"{name} {value:.2f}" for name, value in found.items())
        print(f"{self.said}: step {number}  {shown}", flush=True)

    def checkpoint(self, number: int, adapter: Path) -> None: ...

    def collapse(self, number: int, reason: str) -> None:
        self.collapses.append(f"step {number}: {reason}")
        print(f"{self.said}: {self.collapses[-1]}", flush=True)


@dataclass(frozen=True)
class Outcome:
    watcher: Watcher
    before: Sequence[Sample]
    after: Sequence[Sample]


def trained(settings: params.Params, said: str, background: Background) -> Outcome:
    import torch

    environment = WorkflowEnvironment(settings)
    held_out = dataset.read("test").examples[: settings.train.val_samples]
    try:
        torch.manual_seed(settings.train.seed)
        base, tokenizer = models.load(settings.base)
        model = loop.attach_adapter(base, settings.train.lora)
        prompts = policy_prompts(tokenizer, held_out, settings.workflow)

        def measure() -> Sequence[Sample]:
            torch.manual_seed(0)
            limits: dict[str, Any] = {
                "max_tokens": settings.train.max_completion_tokens,
                "temperature": settings.train.temperature,
            }
            texts = complete(model, tokenizer, prompts, **limits)
            with models.leaving_room():
                graded = background.run(environment.grade_all(list(zip(texts, held_out, strict=True))))
            return [one.sample for one in graded]

        watcher = Watcher(said)
        before = measure()
        with tempfile.TemporaryDirectory() as folder:
            identity = models.identify(settings.base)
            examples = dataset.read("train").examples
            course = loop.Course(model, tokenizer, identity, examples, environment, background, Path(folder))
            try:
                loop.train(course, settings.train, watcher)
            except CollapseError as error:
                watcher.collapses.append(str(error))
                print(f"{said}: {error}", flush=True)
        return Outcome(watcher, before, measure())
    finally:
        background.run(environment.close())


def accuracy(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.score or 0.0 for sample in samples)


def valid(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.valid for sample in samples)


def smooth(values: Sequence[float], width: int = 4) -> list[float]:
    """Means of as many steps side by side."""
    return [statistics.fmean(values[start : start + width]) for start in range(0, len(values), width)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    given, other = parser.parse_known_args()
    changes = {name.removeprefix("--"): value for name, value in zip(other[::2], other[1::2], strict=True)}
    steps = {"train.max_steps": str(given.steps), "train.eval_every": str(given.steps)}
    outcomes: dict[str, Outcome] = {}
    with Background() as background:
        for seed in given.seeds:
            for arm in given.arms:
                said, began = f"{arm}, seed {seed}", time.monotonic()
                own = {"train.seed": str(seed), "train.guard.enabled": str(arm == "guarded").lower()}
                settings = params.load(overrides=LIKE_THE_ORIGINAL | steps | own | changes)
                found = outcomes[said] = trained(settings, said, background)
                print(
                    f"{said}: held-out accuracy {accuracy(found.before):.1%} -> {accuracy(found.after):.1%}, "
                    f"valid {valid(found.before):.1%} -> {valid(found.after):.1%}, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    for name in ("valid_share", "reward"):
        print(f"\n{name}, means of 4 steps")
        for said, found in outcomes.items():
            values = smooth([figures[name] for figures in found.watcher.figures])
            print(f"{said:20}" + "".join(f"{value:6.0%}" for value in values))
    for said, found in outcomes.items():
        for collapse in found.watcher.collapses:
            print(f"{said}: {collapse}")


if __name__ == "__main__":
    main()
