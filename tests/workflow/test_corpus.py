"""Wrong programs, made by mutating right ones: nearly all are mended, or refused with the right class.

Half of them were not looked at while the checks were written.
"""

import functools
from collections.abc import Iterator

import pytest

from gradeflow.workflow.program import Program, ProgramError, parse
from support.mutants import RUNS, Mutant, mutants
from support.stand_in import run
from support.workflows import PROGRAMS

ENOUGH = 0.95


def verdict(mutant: Mutant) -> str:
    """Empty for a mutant that is dealt with."""
    try:
        program = parse(mutant.source)
    except ProgramError as error:
        return "" if error.failure in mutant.classes else f"refused as {error.failure}: {error.reason}"
    if not program.mends:
        return "accepted"
    failures = {failure for seed in RUNS if (failure := run(program.source, seed).failure)} - {"runtime"}
    return f"mended, and fails still: {failures}" if failures else ""


@functools.cache
def missed(*, held_out: bool) -> tuple[list[tuple[Mutant, str]], int]:
    chosen = [mutant for mutant in mutants() if mutant.is_held_out == held_out]
    return [(mutant, said) for mutant in chosen if (said := verdict(mutant))], len(chosen)


def by_mutator(misses: list[tuple[Mutant, str]]) -> Iterator[str]:
    return (f"{mutant.mutator}: {said}" for mutant, said in misses)


@pytest.mark.parametrize("source", PROGRAMS)
def test_the_programs_that_are_mutated_are_right(source: str) -> None:
    assert {run(source, seed).failure for seed in RUNS} <= {None, "runtime"}
    assert parse(source) == Program(source, "class" if "class Workflow" in source else "body")


@pytest.mark.slow
def test_there_are_enough_mutants_of_every_kind() -> None:
    assert len(mutants()) >= 500
    assert {failure for mutant in mutants() for failure in mutant.classes} >= {
        "unbound",
        "await",
        "contract",
        "arguments",
        "operator",
        "stdin",
        "attribute",
        "syntax",
    }


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_mutants_are_mended_or_refused_with_the_right_class(held_out: bool) -> None:
    misses, count = missed(held_out=held_out)
    assert 1 - len(misses) / count >= ENOUGH, "\n".join(by_mutator(misses))
