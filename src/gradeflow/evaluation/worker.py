"""The process that measures: `python -m gradeflow.evaluation.worker PLAN.json`.

It ends with 0 when every subject has whole results in every task. What is done lies in its folder as soon as it is, so
that a process that was ended early leaves all that it had, and the next one goes on from there.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow.errors import GradeflowError
from gradeflow.evaluation.plan import WORKFLOW, Plan, Subject
from gradeflow.sandbox import Sandbox

if TYPE_CHECKING:
    from gradeflow.evaluation.engine import Engine

FAILURE = "failure.txt"
"""In the plan's folder: what ended the worker, in one line."""


def run(plan: Plan) -> None:
    """Measure whatever of the plan is not measured yet."""
    from gradeflow.evaluation.engine import Engine

    engine = Engine(plan)
    for task in plan.tasks:
        if task == WORKFLOW:
            from gradeflow.evaluation import workflow

            workflow.measure(plan, engine, partial(_whole, plan, WORKFLOW))
            continue
        for subject in plan.subjects:
            _whole(plan, task, subject.name, partial(_measure, engine, subject, task))


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
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from gradeflow.evaluation import results, tasks

    plan, settings = engine.plan, engine.plan.settings
    tracker = EvaluationTracker(output_path=str(folder / results.NAME))
    with _sandboxed(plan, task):
        found = simple_evaluate(
            **engine.of(subject),
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
    results.read(folder, [task], base=plan.base_digest, adapter=subject.digest)


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


def main(path: str) -> int:
    plan = Plan.read(Path(path))
    logging.getLogger("lm_eval").setLevel(os.environ.get("LMEVAL_LOG_LEVEL", "ERROR"))
    failure = Path(plan.out) / FAILURE
    failure.unlink(missing_ok=True)
    try:
        run(plan)
    except GradeflowError as error:
        failure.write_text(f"{error}", encoding="utf-8")
        return error.status
    except Exception as error:  # noqa: BLE001 - whatever it was, its caller is told
        traceback.print_exc()
        with contextlib.suppress(OSError):
            failure.write_text(f"{type(error).__name__}: {error}".splitlines()[0], encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
