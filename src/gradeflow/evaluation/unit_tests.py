"""`evaluate.load("code_eval")` in the sandbox: the metric of humaneval, mbpp and every task that asks for it by name.

lm-eval takes that metric from the hub and runs generated code in its own process. Here it needs no network, and each
program runs in an interpreter of the sandbox. A program passes when its tests have come to their end: one that ends
the interpreter early, or reports a result of its own, fails; one whose objects equal everything, or that searches the
frames of the interpreter, may still pass.
"""

import asyncio
import contextlib
import math
import os
import re
import secrets
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from gradeflow.errors import SandboxError
from gradeflow.sandbox import Execution, Sandbox

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
Results = dict[int, list[tuple[int, dict[str, Any]]]]

TIMEOUT_S = 3.0
"""What the published metric gives a program, and lm-eval does not change."""

PASSED = "passed"
_IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)

_PROGRAM = """
import harness

def _grade(inputs, hand_over):
    import builtins, sys
    secret = inputs.pop("secret")
    code, tests = (compile(inputs.pop(name), f"{name}.py", "exec") for name in ("code", "tests"))
    run, named = exec, vars(builtins)
    before = named.copy()
    program = type(sys)("program")
    sys.modules["program"] = program
    run(code, program.__dict__)
    named.update(before)
    run(tests, program.__dict__)
    hand_over(secret)

_grade(harness.inputs, harness.result)
"""


class Program(NamedTuple):
    code: str
    tests: str
    timeout_s: float


class CodeEval:
    """The metric as `evaluate` hands it out, with its arguments and results.

    lm-eval's tasks keep the one that they were imported with, so there is one a process, and `in_sandbox` says where
    it runs programs.
    """

    name = "code_eval"

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None
        self._wait: Wait | None = None
        self._collected: list[Program] | None = None
        self._known: dict[Program, str] = {}

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1, 10, 100),
        num_workers: int = 4,  # noqa: ARG002 - `sandbox.parallel` says how many run at once
        timeout: float = TIMEOUT_S,
    ) -> tuple[dict[str, float], Results]:
        """pass@k over the problems, and for each problem and prediction `passed`, `timed out` or what failed.

        Raises:
            SandboxError: the sandbox broke, or there is none; no program is to blame.
            SetupError: this machine cannot isolate.
        """
        programs = [
            [Program(code, tests, timeout) for code in codes]
            for codes, tests in zip(predictions, references, strict=True)
        ]
        flat = [program for own in programs for program in own]
        if self._collected is None:
            said = self._known | self._run([program for program in flat if program not in self._known])
        else:
            self._collected += flat
            said = dict.fromkeys(flat, "not run yet")
        results = {
            task: [
                (number, {"task_id": task, "passed": said[one] == PASSED, "result": said[one], "completion_id": number})
                for number, one in enumerate(own)
            ]
            for task, own in enumerate(programs)
        }
        counts = [(len(own), sum(said[one] == PASSED for one in own)) for own in programs]
        shares = {
            f"pass@{wanted}": statistics.fmean(pass_at(wanted, total, right) for total, right in counts)
            for wanted in k
            if counts and all(total >= wanted for total, _ in counts)
        }
        return shares, results

    @contextlib.contextmanager
    def running(self, sandbox: Sandbox, wait: Wait) -> Iterator[None]:
        before = self._sandbox, self._wait
        self._sandbox, self._wait = sandbox, wait
        try:
            yield
        finally:
            self._sandbox, self._wait = before
            self._known.clear()

    def run_ahead(self, ask: Callable[[], None]) -> None:
        """Run all programs that `ask` has computed, side by side; its own results are thrown away."""
        self._collected = []
        try:
            ask()
            programs = self._collected
        finally:
            self._collected = None
        self._known = self._run(programs)

    def _run(self, programs: Sequence[Program]) -> dict[Program, str]:
        distinct = list(dict.fromkeys(programs))
        if not distinct:
            return {}
        if self._sandbox is None or self._wait is None:
            raise SandboxError("generated code was to run outside of the sandbox", cause="sandbox")
        return dict(zip(distinct, self._wait(_run_all(self._sandbox, distinct)), strict=True))


METRIC = CodeEval()


@contextlib.contextmanager
def in_sandbox(sandbox: Sandbox, wait: Wait) -> Iterator[None]:
    """While it lasts, `evaluate.load("code_eval")` is the metric above; `wait` runs a coroutine in the sandbox's loop.

    lm-eval itself needs `confirm_run_unsafe_code=True` beside. HF_ALLOW_CODE_EVAL is what the published metric looks
    for before it runs code in this process, so it is taken out of the environment.
    """
    import evaluate

    published = evaluate.load

    def load(path: str, *arguments: Any, **named: Any) -> Any:
        return METRIC if path == METRIC.name else published(path, *arguments, **named)

    allowed = os.environ.pop("HF_ALLOW_CODE_EVAL", None)
    evaluate.load = load
    try:
        with METRIC.running(sandbox, wait):
            yield
    finally:
        evaluate.load = published
        if allowed is not None:
            os.environ["HF_ALLOW_CODE_EVAL"] = allowed


def run_together(task: Any) -> None:
    """Have a task's programs run side by side; lm-eval asks for one document's result, waits, and asks for the next."""
    filtered = task.apply_filters

    def apply_filters() -> Any:
        done = filtered()
        METRIC.run_ahead(ask)
        return done

    def ask() -> None:
        documents = defaultdict(list)
        for instance in task.instances:
            documents[instance.doc_id].append(instance)
        for own in documents.values():
            for name in own[0].filtered_resps:
                task.process_results(own[0].doc, [instance.filtered_resps[name] for instance in own])

    task.apply_filters = apply_filters


def pass_at(k: int, total: int, right: int) -> float:
    """The chance that of k predictions, drawn from `total` without putting back, one at least is right."""
    return 1 - math.comb(total - right, k) / math.comb(total, k)


async def _run_all(sandbox: Sandbox, programs: Sequence[Program]) -> list[str]:
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_run_one(sandbox, program)) for program in programs]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    return [task.result() for task in running]


async def _run_one(sandbox: Sandbox, program: Program) -> str:
    secret = secrets.token_hex(16)
    inputs = {"code": program.code, "tests": program.tests, "secret": secret}
    named = set(_IMPORTS.findall(f"{program.code}\n{program.tests}"))
    packages = not named <= sys.stdlib_module_names
    execution = await sandbox.run(_PROGRAM, inputs=inputs, wall_s=program.timeout_s, packages=packages)
    return PASSED if execution.status == "ok" and execution.value == secret else _why(execution)


def _why(execution: Execution) -> str:
    """In the published metric's words."""
    if execution.limit in {"wall", "cpu"}:
        return "timed out"
    return f"failed: {execution.error or 'it ended before its tests did'}"
