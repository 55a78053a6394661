"""One run of what a policy wrote: read, run isolated, its operators served from here, its end classified.

A program that fails is the policy's failure, with its class, and nothing stands in for it; a fault of the
executor or the sandbox is raised.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from gradeflow import params
from gradeflow.errors import Fault
from gradeflow.llm import ChatClient
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.trace import Trace
from gradeflow.types import Event, Example
from gradeflow.workflow import public_tests
from gradeflow.workflow.operators import OPERATORS, Budget, Refused, Tools
from gradeflow.workflow.program import FailureClass, Program, ProgramError, parse

Failure = Literal[FailureClass, "runtime", "timeout", "limit", "budget"]
FAILURES: tuple[Failure, ...] = get_args(Failure)


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """What a workflow answered, or the policy's own `failure`, which goes with a score of 0.

    `valid` says that the program ran to its end as it was written, without mends. `cost` is what the executor
    took, `operators` those called, in order; `events` begin with the workflow itself.
    """

    answer: str | None
    cost: float
    failure: str | None
    reason: str
    valid: bool
    operators: tuple[str, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class End:
    answer: str | None = None
    failure: Failure | None = None
    reason: str = ""


@dataclass(slots=True)
class Calls:
    """Serves the operator calls of one workflow, as many as its budget has."""

    tools: Tools
    settings: params.Workflow
    names: list[str] = field(default_factory=list)

    async def serve(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if name not in self.settings.operators:
            raise Refused(f"{name}: no such operator")
        if reason := OPERATORS[name].unfit(tuple(arguments)):
            raise Refused(reason)
        if len(self.names) >= self.settings.max_calls:
            self.tools.budget.overspend(f"more than {self.settings.max_calls} operator calls")
        self.tools.budget.require()
        self.names.append(name)
        trace = self.tools.trace
        with trace.span("operator", name, arguments) as span:
            span.outputs = value = await self._answer(name, replace(self.tools, trace=span.trace), arguments)
        return {"value": value, "usage": trace.usage()}

    @staticmethod
    async def _answer(name: str, tools: Tools, arguments: Mapping[str, Any]) -> Mapping[str, str | bool]:
        try:
            return await OPERATORS[name].serve(tools, **arguments)
        except (Fault, Refused):
            raise
        except Exception as error:
            said = f"operator {name} broke: {type(error).__name__}: {error}"
            raise Fault(said, cause="operator_crash") from error


async def run_workflow(
    completion: str,
    example: Example,
    client: ChatClient,
    sandbox: Sandbox,
    settings: params.Workflow,
    trace: Trace | None = None,
) -> WorkflowRun:
    """Run what the policy wrote on an example; of the example's `extra` it is given `entry_point` alone.

    The tests that it may see are those in the docstring of the problem itself. A `trace`, given empty, has the events
    of a run that a fault ends, too.

    Raises:
        Fault: the executor or the sandbox broke; the policy is not to blame.
    """
    trace = trace or Trace()
    budget = Budget(settings.max_tokens, settings.max_cost)
    mends: tuple[str, ...] = ()
    with trace.span("workflow", "workflow", {"completion": completion, "example": example.id}) as span:
        calls = Calls(Tools(client, sandbox, span.trace, example.problem, budget), settings)
        try:
            program = parse(completion, settings.operators)
        except ProgramError as error:
            end = End(failure=error.failure, reason=error.reason)
        else:
            mends = program.mends
            inputs = _inputs(program, example, settings)
            end = _end(await sandbox.run(_shim(), inputs=inputs, handler=calls.serve, wall_s=settings.wall_s), calls)
        span.outputs = {"answer": end.answer, "failure": end.failure, "reason": end.reason, "mends": mends}
    valid = end.failure is None and not mends
    cost = trace.usage()["total_cost"]
    return WorkflowRun(end.answer, cost, end.failure, end.reason, valid, tuple(calls.names), trace.events)


@functools.cache
def _shim() -> str:
    return Path(__file__).with_name("shim.py").read_text(encoding="utf-8")


def _inputs(program: Program, example: Example, settings: params.Workflow) -> dict[str, Any]:
    offered = [OPERATORS[name] for name in settings.operators]
    entry_point = str(example.extra.get("entry_point", ""))
    return {
        "source": program.source,
        "form": program.form,
        "operators": {operator.name: list(operator.parameters) for operator in offered},
        "attributes": {operator.attribute: operator.name for operator in offered},
        "problem": example.problem,
        "entry_point": entry_point,
        "tests": public_tests.as_text(public_tests.read(example.problem, entry_point)),
        "dataset": example.source,
    }


def _end(execution: Execution, calls: Calls) -> End:
    if overspent := calls.tools.budget.overspent:
        return End(failure="budget", reason=overspent)
    if execution.status == "limit":
        return End(failure="timeout" if execution.limit in {"wall", "cpu"} else "limit", reason=execution.error)
    if execution.status == "failed":
        return End(failure=_crash(execution), reason=f"{execution.error_type}: {execution.error}")
    returned = execution.value if isinstance(execution.value, dict) else {}
    if "answer" in returned:
        return End(answer=str(returned["answer"]))
    return End(failure="contract", reason=f"returned {returned.get('returned', 'nothing')}, not (answer, cost)")


def _crash(execution: Execution) -> Failure:
    if execution.error_type in {"NameError", "UnboundLocalError"}:
        return "unbound"
    return "await" if "coroutine" in execution.error else "runtime"
