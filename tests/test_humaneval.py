import ast
import asyncio
import gzip
import json
import os
import time
from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.sandbox import Sandbox
from gradeflow.scorer import Scorer
from gradeflow.sources import humaneval
from gradeflow.types import Example, Outcome

DATA = os.environ.get("GRADEFLOW_DATA", "")
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with the real HumanEval")


def rows() -> list[Example]:
    with gzip.open(Path(DATA) / "humaneval" / "HumanEval.jsonl.gz") as file:
        return [humaneval.example(json.loads(line)) for line in file]


def with_one_broken(example: Example) -> Example:
    """The row with the first of its assertions turned into its opposite."""
    tree = ast.parse(example.extra["test"])
    first = next(node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    first.test = ast.UnaryOp(ast.Not(), first.test)
    changed = {**example.extra, "test": ast.unparse(ast.fix_missing_locations(tree))}
    return Example(example.id, example.source, example.problem_type, example.problem, example.ground_truth, changed)


def graded(examples: list[Example]) -> list[Outcome]:
    settings = params.load(ROOT / "params.yaml")

    async def all_of_them() -> list[Outcome]:
        sandbox = Sandbox(settings.sandbox)
        scorer = Scorer(settings.scorer, sandbox, None)
        try:
            return await asyncio.gather(*(scorer.score(example, example.ground_truth) for example in examples))
        finally:
            await sandbox.close()

    return asyncio.run(all_of_them())


def test_every_canonical_solution_passes_and_with_one_assertion_broken_none_does() -> None:
    examples = rows()
    began = time.monotonic()
    whole, broken = graded(examples), graded([with_one_broken(example) for example in examples])
    seconds = time.monotonic() - began
    assert [example.extra["task_id"] for example, score in zip(examples, whole, strict=True) if score.value != 1] == []
    assert [e.extra["task_id"] for e, score in zip(examples, broken, strict=True) if score.value != 0] == []
    assert {score.reason.partition(":")[0] for score in broken} == {"AssertionError"}
    assert seconds < 60
