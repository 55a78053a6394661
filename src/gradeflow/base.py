"""The base model of everything that follows: the embedded one is made here, any other is only named.

What it can do before any training is measured on problems that it has not seen: as executor through each operator, as
policy, and as judge. The numbers say what there is to win, and where the ceiling is.
"""

import asyncio
import itertools
import json
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gradeflow import disk, fingerprint, models, registry, sources, tracking
from gradeflow.embedded import curriculum, teach
from gradeflow.embedded.recipe import recipe
from gradeflow.errors import JudgeError, TooManyFaults
from gradeflow.grpo import environment as environments
from gradeflow.grpo.environment import WorkflowEnvironment
from gradeflow.grpo.sample import complete, policy_prompts
from gradeflow.judge import Judge
from gradeflow.params import Params
from gradeflow.types import KINDS, Example, Sample
from gradeflow.workflow import fixed, operators
from gradeflow.workflow.program import ProgramError, parse

SECTIONS = ("base", "models", "workflow", "judge", "scorer", "sandbox")
# Seed of the lessons and problems that the base is measured on, away from those that it is taught with.
HELD_OUT = 1_000_003


def main(params: Params) -> None:
    """Make the embedded base, unless it is there, and measure it."""
    identity = models.identify(params.base)
    if params.base.model != "embedded":
        print(f"base: {identity.name} at {identity.revision}; nothing to make")
        return
    folder = params.base.folder / identity.name
    tracking.connect(params.tracking, Path())
    mark = fingerprint.of(params, SECTIONS, identity.digest)
    there = (folder / "config.json").is_file()
    if there and (done := tracking.find_run("base", mark)) is not None:
        tracking.note_reuse("base", done)
        print(f"base: nothing has changed; reused {folder}")
        return
    with asyncio.Runner() as runner:
        runner.run(environments.require_ready(params))
        with tracking.start_run("base", params.model_dump(mode="json"), fingerprint=mark) as run:
            run.set_tags({"gradeflow.base.name": identity.name, "gradeflow.base.digest": identity.digest})
            registry.record_prompts(run, environments.prompts(params))
            if not there:
                with disk.watched(params.base.folder):
                    make(params, folder, run)
            with models.leaving_room():
                environment = WorkflowEnvironment(params)
                try:
                    found = measure(params, environment, runner)
                finally:
                    runner.run(environment.close())
            run.log_metrics(found)
            show(found)
    print(f"base: {folder}")


def make(params: Params, folder: Path, run: tracking.Run) -> None:
    """Teach a fresh model and put it in place as a whole."""
    started = time.monotonic()
    fresh = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    lessons = list(itertools.islice(curriculum.lessons(params.base.seed), params.base.examples))
    words = teach.tokenizer(lessons, params.base.vocabulary)
    model = teach.blank_model(params.base, words)
    size = sum(weight.numel() for weight in model.parameters())
    with Progress() as progress:
        task = progress.add_task(f"base  {size / 1e6:.2f}M parameters")
        for said in teach.teach(model, teach.encode(lessons, words), params.base):
            progress.update(task, total=said.steps, completed=said.step, description=f"base  loss {said.loss:.3f}")
            run.log_metrics({"base/loss": said.loss}, step=said.step)
    model.save_pretrained(fresh)
    words.save_pretrained(fresh)
    (fresh / "recipe.json").write_text(json.dumps(recipe(params.base), indent=2, sort_keys=True) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    run.log_metrics({"base/parameters": float(size), "base/teach_seconds": time.monotonic() - started})


def measure(params: Params, environment: WorkflowEnvironment, runner: asyncio.Runner) -> dict[str, float]:
    """Accuracy of each fixed operator by kind, of the policy's own workflows, and of the judge."""
    held_out = [
        example
        for name in curriculum.SOURCES
        for example in itertools.islice(sources.made(name, "test", HELD_OUT), params.base.measure)
    ]
    found: dict[str, float] = {}
    for operator in fixed.OPERATORS:
        pairs = [(fixed.program(operator), example) for example in held_out]
        samples = [one.sample for one in runner.run(environment.grade_all(pairs))]
        found |= _accuracies(f"executor/{operator}", samples)
    found |= _as_policy(params, held_out, environment, runner)
    if environment.judge is not None:
        found |= runner.run(_as_judge(environment.judge, 4 * params.base.measure))
    return found


def _as_policy(
    params: Params, held_out: Sequence[Example], environment: WorkflowEnvironment, runner: asyncio.Runner
) -> dict[str, float]:
    import torch

    torch.manual_seed(params.base.seed)
    model, words = models.load(params.base)
    prompts = policy_prompts(words, held_out, params.workflow)
    limits: dict[str, Any] = {"max_tokens": params.train.max_completion_tokens}
    greedy = complete(model, words, prompts, **limits)
    sampled = complete(model, words, prompts, temperature=params.train.temperature, **limits)
    pairs = list(zip(greedy, held_out, strict=True))
    samples = [one.sample for one in runner.run(environment.grade_all(pairs))]
    first = Counter(_first_operator(text) for text in sampled)
    return {
        **_accuracies("policy", samples),
        "policy/valid_share": statistics.fmean(_parses(text) for text in sampled),
        **{f"policy/uses/{name}": first[name] / len(sampled) for name in fixed.OPERATORS},
    }


def _parses(text: str) -> bool:
    try:
        return not parse(text).mends
    except ProgramError:
        return False


def _first_operator(text: str) -> str:
    """The operator that a workflow is about: the ensemble if there is one, else the first that it calls."""
    if "self.sc_ensemble(" in text:
        return "ScEnsemble"
    called = [
        (text.index(f"self.{op.attribute}("), name)
        for name, op in operators.OPERATORS.items()
        if f"self.{op.attribute}(" in text
    ]
    return min(called)[1] if called else ""


async def _as_judge(judge: Judge, count: int) -> dict[str, float]:
    rng = random.Random(HELD_OUT)
    cases = [
        curriculum.case(example, rng) for example in itertools.islice(sources.made("places", "test", HELD_OUT), count)
    ]

    async def right(case: curriculum.Case) -> float | None:
        try:
            verdict = await judge.verdict(case.question, case.reference, case.answer)
        except JudgeError:
            return None
        return float(verdict.correct == case.correct)

    answers = await asyncio.gather(*(right(case) for case in cases))
    given = [answer for answer in answers if answer is not None]
    return {
        "judge/accuracy": statistics.fmean(given) if given else 0.0,
        "judge/no_verdict_share": 1 - len(given) / count,
    }


def _accuracies(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    scored = [sample for sample in samples if sample.score is not None]
    if lacking := set(KINDS) - {sample.kind for sample in scored}:
        faults = Counter(sample.fault for sample in samples if sample.fault)
        raise TooManyFaults(
            f"{name}: no question about {', '.join(sorted(lacking))} has a score ({dict(faults)}); when executor, "
            "judge and sandbox answer again, the same command measures anew",
            cause="measure",
        )
    by_kind = {
        f"{name}/{kind}": statistics.fmean(sample.score or 0.0 for sample in scored if sample.kind == kind)
        for kind in KINDS
    }
    return {**by_kind, f"{name}/all": statistics.fmean(sample.score or 0.0 for sample in scored)}


def show(found: dict[str, float]) -> None:
    table = Table(title="the base on problems that it has not seen")
    for column in ("", *KINDS, "all"):
        table.add_column(column, justify="right" if column else "left")
    rows = [f"executor/{operator}" for operator in fixed.OPERATORS] + ["policy"]
    for name in rows:
        table.add_row(name, *(f"{found[f'{name}/{kind}']:.1%}" for kind in (*KINDS, "all")))
    console = Console()
    console.print(table)
    uses = ", ".join(f"{name} {found[f'policy/uses/{name}']:.0%}" for name in fixed.OPERATORS)
    console.print(f"workflows that parse: {found['policy/valid_share']:.1%}; they use {uses}")
    if "judge/accuracy" in found:
        console.print(f"judge: {found['judge/accuracy']:.1%} right, no verdict {found['judge/no_verdict_share']:.1%}")
