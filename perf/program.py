"""How long a program's check and mend take, beside Python's own `ast.parse` and `compile`.

python perf/program.py
"""

import ast
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradeflow.workflow.program import ProgramError, parse

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.workflows import PROGRAMS

ROUNDS = 200
BROKEN = {
    "mended: await": lambda source: source.replace("await ", "", 1),
    "mended: unbound": lambda source: f"if problem:\n    unset = problem\n{source}\nreturn unset, 0",
    "refused: operator": lambda source: source.replace("self.", "self.no_", 1),
}


def times(work: Callable[[], object]) -> tuple[float, float]:
    """p50 and p95, in milliseconds."""
    work()
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken), statistics.quantiles(taken, n=20)[-1]


def check(source: str) -> None:
    with contextlib.suppress(ProgramError):
        parse(source)


def plain(source: str) -> None:
    compile(ast.parse(source), "workflow", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def main() -> None:
    table = Table("program", "lines", "p50 ms", "p95 ms", "ast.parse + compile ms", "ratio")
    medians = []
    for number, source in enumerate(PROGRAMS):
        whole = "class Workflow" in source
        function = source if whole else "async def workflow(self):\n    " + source.replace("\n", "\n    ")
        base, _ = times(functools.partial(plain, function))
        variants = {"": source} if whole else {"": source} | {name: wrong(source) for name, wrong in BROKEN.items()}
        for name, text in variants.items():
            p50, p95 = times(functools.partial(check, text))
            medians.append(p50)
            label = f"{'class' if whole else 'body'} {number}{', ' if name else ''}{name}"
            table.add_row(
                label, str(source.count("\n")), f"{p50:.2f}", f"{p95:.2f}", f"{base:.2f}", f"{p50 / base:.1f}"
            )
    console = Console()
    console.print(table)
    console.print(f"p50 over all: {statistics.median(medians):.2f} ms; slowest p50: {max(medians):.2f} ms")


if __name__ == "__main__":
    main()
