"""The program that a policy wrote: what it was asked for, the check of what it answered, and what was mended.

Two forms are read: the body of `async def __call__(self, problem, entry_point)`, which the prompt asks for,
and AFlow's whole `class Workflow`. Checks look at the syntax tree alone; nothing of the program is executed.
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass

from gradeflow import params, prompt
from gradeflow.prompt import Message
from gradeflow.types import Example
from gradeflow.workflow.operators import OPERATORS, describe
from gradeflow.workflow.program.checks import CHECKS
from gradeflow.workflow.program.mends import MENDS, edited
from gradeflow.workflow.program.reading import ALLOWED_IMPORTS, FailureClass, Form, ProgramError, read

__all__ = ["ALLOWED_IMPORTS", "FailureClass", "Form", "Program", "ProgramError", "parse", "policy_messages"]


@dataclass(frozen=True, slots=True)
class Program:
    """A program that passed every check; `source` is its text after the mends."""

    source: str
    form: Form
    mends: tuple[str, ...] = ()


def policy_messages(example: Example, settings: params.Workflow) -> list[Message]:
    """What the policy reads: the problem and the operators, and nothing of the example's `extra`."""
    asked = prompt.load("policy")
    return prompt.user(asked.render(operators=describe(settings.operators), problem=example.problem))


def parse(completion: str, offered: Collection[str] = tuple(OPERATORS)) -> Program:
    """Read, mend and check what a policy wrote; it may use the `offered` operators alone.

    Raises:
        ProgramError: with the class of what is wrong, and the reason.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _parsed(completion, offered)
        except RecursionError:
            raise ProgramError("syntax", "nested too deeply") from None


def _parsed(completion: str, offered: Collection[str]) -> Program:
    reading = read(completion, offered)
    mends = []
    for name, mend in MENDS.items():
        if edits := list(mend(reading)):
            reading = read(edited(reading.source, edits), offered)
            mends.append(name)
    for check in CHECKS:
        check(reading)
    return Program(reading.source, reading.form, tuple(mends))
