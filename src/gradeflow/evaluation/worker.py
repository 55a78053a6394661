"""The process that measures: `python -m gradeflow.evaluation.worker PLAN.json DESCRIPTOR`.

It ends with 0 when every subject has whole results in every task. What is done lies in its folder as soon as it is, so
that a process that was ended early leaves all that it had, and the next one goes on from there. What ended it is told
in one line through the open file DESCRIPTOR, as a file of its own would need room on a disk that may be full.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import disk
from gradeflow.errors import EvaluationError, GradeflowError
from gradeflow.evaluation.plan import WORKFLOW, Plan, Subject
from gradeflow.sandbox import Sandbox

if TYPE_CHECKING:
    from gradeflow.evaluation.engine import Engine
    from gradeflow.evaluation.results import Evaluation

MEMORY = re.compile(
    "out of memory|allocate memory|memory for the cache blocks|less than desired GPU memory", re.IGNORECASE
)
"""What Python, torch and vLLM say when there is too little: in words alone, since their errors are of any type."""

LONGEST = 4096
"""Bytes of the line: what a pipe takes at once, read or not."""


def run(plan: Plan) -> None:
    """Measure whatever of the plan is not measured yet."""
    from gradeflow.evaluation.engine import Engine

    engine = None if plan.replies else Engine(plan)
    for task in plan.tasks:
        if task == WORKFLOW:
            from gradeflow.evaluation import workflow

            whole = partial(_whole, plan, WORKFLOW)
            workflow.measure(plan, engine, whole) if engine else workflow.score_again(plan, whole)
            continue
        for subject in plan.subjects:
            fill = partial(_measure, engine) if engine else partial(_score_again, plan)
            _whole(plan, task, subject.name, partial(fill, subject, task))
    _keep_fingerprints(plan, engine)


def _keep_fingerprints(plan: Plan, engine: "Engine | None") -> None:
    from gradeflow.evaluation.earlier import Earlier

    earlier = Earlier.read(Path(plan.replies)).adapters if plan.replies else {}
    for subject in plan.subjects[1:]:
        if engine:
            told: Mapping[str, Any] = {"dtype": plan.dtype, "changes": engine.fingerprint(subject)}
        else:
            told = earlier[subject.name].fingerprint
        plan.fingerprint(subject.name).write_text(json.dumps(told), encoding="utf-8")


def _whole(plan: Plan, task: str, name: str, fill: Callable[[Path], None]) -> None:
    """Let `fill` write the folder of a subject's task, and put it in its place when it is whole."""
    folder = plan.folder(name, task)
    if folder.is_dir():
        return
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fill(part)
    part.rename(folder)


def _measure(engine: "Engine", subject: Subject, task: str, folder: Path) -> None:
    _run_harness(engine.plan, subject, task, engine.of(subject), folder)


def _score_again(plan: Plan, subject: Subject, task: str, folder: Path) -> None:
    from gradeflow.evaluation.replay import Replay

    replay = Replay(plan, subject, task)
    replay.require_same(_run_harness(plan, subject, task, {"model": replay}, folder))


def _run_harness(plan: Plan, subject: Subject, task: str, model: Mapping[str, Any], folder: Path) -> "Evaluation":
    """Let lm-eval ask `model`, which `simple_evaluate` takes, and write all that it found into `folder`."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from gradeflow.evaluation import results, tasks

    settings = plan.settings
    tracker = EvaluationTracker(output_path=str(folder / results.NAME))
    with _sandboxed(plan, task):
        found = simple_evaluate(
            **model,
            tasks=tasks.load([task], settings),
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=None if settings.num_fewshot < 0 else settings.num_fewshot,
            limit=settings.limit or None,
            apply_chat_template=settings.chat_template,
            fewshot_as_multiturn=settings.chat_template,
            confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            evaluation_tracker=tracker,
        )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name in samples:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    results.write(folder, found, base=plan.base, base_digest=plan.base_digest, adapter=subject.digest)
    return results.read(folder, [task], base=plan.base_digest, adapter=subject.digest)


@contextlib.contextmanager
def _sandboxed(plan: Plan, task: str) -> Iterator[None]:
    """Where a task runs generated code, it runs in the sandbox."""
    from gradeflow.evaluation import tasks, unit_tests

    if not tasks.needs_code(task, plan.settings.include):
        yield
        return
    sandbox = Sandbox(plan.params.sandbox)
    with asyncio.Runner() as runner:
        try:
            with unit_tests.in_sandbox(sandbox, runner.run):
                yield
        finally:
            runner.run(sandbox.close())


@contextlib.contextmanager
def told(plan: Plan) -> Iterator[None]:
    """Let whatever breaks inside for lack of room or memory say so.

    Raises:
        EvaluationError: the disk of output or cache is full, or there is too little memory.
    """
    try:
        with contextlib.ExitStack() as watching:
            for folder in filter(None, (plan.out, plan.settings.cache)):
                watching.enter_context(disk.watched(Path(folder)))
            yield
    except GradeflowError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in disk.FULL:
            raise EvaluationError(f"{error.filename}: {disk.said(error)}") from error
        if isinstance(error, MemoryError) or MEMORY.search(str(error)):
            remedy = "lower evaluate.batch_size or max_model_len, or spread the model over more GPUs (evaluate.gpus)"
            raise EvaluationError(f"too little memory: {remedy}; {_line(error)}") from error
        raise


def main(path: str, descriptor: str) -> int:
    plan = Plan.read(Path(path))
    logging.getLogger("lm_eval").setLevel(os.environ.get("LMEVAL_LOG_LEVEL", "ERROR"))
    try:
        with told(plan):
            run(plan)
    except GradeflowError as error:
        said, status = str(error), error.status
    except Exception as error:  # noqa: BLE001 - whatever it was, its caller is told
        traceback.print_exc()
        said, status = _line(error), 1
    else:
        return 0
    os.write(int(descriptor), said.encode()[:LONGEST])
    return status


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
